"""The kernel is built where it can be, and nothing depends on it."""

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from quark_torch.kernels import building
from quark_torch.kernels.building import (
    PROBING_SOURCE,
    KernelBuildError,
    build_kernel,
    build_probing,
    library_name,
)
from quark_torch.kernels.loader import find_kernel, load_library, load_probing

ROOT = Path(__file__).parents[3]
MEASURE = (
    "import torch; from quark_torch.measuring.measures import measure;"
    "from quark_torch.kernels.loader import find_kernel;"
    "print(find_kernel() is not None, measure(torch.ones(5)).norm ** 2)"
)


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    return done.stdout.split()


@pytest.mark.long
def test_it_can_be_turned_off():
    assert run(MEASURE, QUARK_TORCH_KERNEL="0") == ["False", "5.000000000000001"]


@pytest.mark.long
def test_it_is_found_in_the_cache(tmp_path, kernel, monkeypatch):
    folder = tmp_path / "quark" / "kernels"
    folder.mkdir(parents=True)
    shutil.copy(kernel.path, folder / library_name())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_kernel.cache_clear()
    try:
        assert find_kernel() is not None
    finally:
        find_kernel.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "other"])
def test_a_library_that_cannot_be_loaded_is_passed_over(tmp_path, kernel, damage, caplog):
    path = tmp_path / "lean.so"
    data = kernel.path.read_bytes()
    if damage == "other":
        source = tmp_path / "other.c"
        source.write_text("int quark_interface(void) { return 0; }\n")
        subprocess.run([*building._find_compiler(), "-shared", source, "-o", path], check=True)
    else:
        path.write_bytes({"empty": b"", "text": b"no library", "cut": data[:3000]}[damage])
    with caplog.at_level(logging.DEBUG, "quark.torch"):
        assert load_library(path) is None
    assert len([record for record in caplog.records if record.name == "quark.torch"]) == 1


def test_another_source_has_another_name(tmp_path, monkeypatch):
    name = library_name()
    changed = tmp_path / "lean.c"
    changed.write_text(building.SOURCE.read_text() + "\n")
    monkeypatch.setattr(building, "SOURCE", changed)
    assert library_name() != name


HOOKS = (
    "import torch; from quark_torch.kernels.compiled_probing import find_hooks;"
    "print(find_hooks() is not None)"
)


@pytest.mark.long
def test_the_hooks_can_be_turned_off():
    assert run(HOOKS, QUARK_TORCH_PROBING="0") == ["False"]
    assert run(HOOKS, QUARK_TORCH_KERNEL="0") == ["False"]


@pytest.mark.long
def test_hooks_without_the_table_of_pytorch_are_not_used():
    code = f"import torch; del torch.Tensor.__dlpack_c_exchange_api__; {HOOKS}"
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        assert run(code) == ["False"]


def test_a_part_of_the_hooks_changes_their_name(tmp_path):
    for path in PROBING_SOURCE.parent.glob("probing*.[ch]"):
        shutil.copy(path, tmp_path)
    source = tmp_path / PROBING_SOURCE.name
    assert library_name(source) == library_name(PROBING_SOURCE)
    part = tmp_path / "probing_view.h"
    part.write_text(part.read_text() + "\n")
    assert library_name(source) != library_name(PROBING_SOURCE)


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "other"])
def test_hooks_that_cannot_be_loaded_are_passed_over(tmp_path, kernel, damage, caplog):
    path = tmp_path / "probing.so"
    make = {
        "empty": lambda: b"",
        "text": lambda: b"no library",
        "cut": lambda: hooks_library(tmp_path / "built").read_bytes()[:3000],
        "other": kernel.path.read_bytes,
    }
    path.write_bytes(make[damage]())
    with caplog.at_level(logging.DEBUG, "quark.torch"):
        assert load_probing(path) is None
    assert len([record for record in caplog.records if record.name == "quark.torch"]) == 1


def test_no_headers_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(building.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(KernelBuildError, match=r"no Python\.h"):
        build_probing(tmp_path)
    assert list(tmp_path.iterdir()) == []


def hooks_library(folder):
    """Compiled hooks, or a skip where there are no headers of Python."""
    try:
        return build_probing(folder)
    except KernelBuildError as error:
        pytest.skip(f"no compiled hooks: {error}")


@pytest.mark.parametrize(
    "compiler", ["false", "/no/such/compiler", "sh -c 'echo broken >&2; exit 3'"]
)
def test_a_compiler_that_fails_is_told(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(KernelBuildError):
        build_kernel(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError, match="Install gcc or clang"):
        build_kernel(tmp_path)


@pytest.mark.long
def test_the_command_says_what_it_did(tmp_path, kernel):
    package = tmp_path / "quark_torch"
    shutil.copytree(ROOT / "quark_torch", package, ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "-m", "quark_torch.kernels"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (package / "kernels" / library_name()).is_file()
    assert (package / "kernels" / library_name(PROBING_SOURCE)).is_file()
    environment["CC"] = "false"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "works without it" in done.stderr


@pytest.mark.parametrize("compiles", [pytest.param(True, marks=pytest.mark.long), False])
def test_wheels_are_of_a_platform_only_with_the_kernel(tmp_path, kernel, compiles):
    pytest.importorskip("hatchling")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("quark", "quark_backends", "quark_core", "quark_torch"):
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    environment = {**os.environ} if compiles else {**os.environ, "CC": "false"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert ("none-any" in wheel.name) is not compiles
    names = (library_name(), library_name(PROBING_SOURCE)) if compiles else ()
    assert sorted(libraries) == sorted(f"quark_torch/kernels/{name}" for name in names)
