"""What a run knows of the machine, the libraries and the switches that decide of its numbers."""

import dataclasses
import importlib
import sys

import pytest

from quark.analysis.comparison.changes import compare_settings
from quark.provenance.environment import find_packages
from quark.provenance.sources import read_packages
from quark_core.records import EnvironmentSnapshot
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import digest_environment
from quark_core.runs.backend_choice import open_reader


def load(project, run_id):
    return open_reader(project.store).load_run(run_id)


def test_imported_packages_are_told_from_installed_ones(project):
    project.write_training("import yaml, numpy")
    run_id = project.train()
    values = load(project, run_id).environment.values
    assert {"PyYAML", "pyyaml"} & set(values["imported"])
    assert "numpy" in values["imported"]
    assert "torch" not in values["imported"]
    assert values["packages"]["numpy"] == __import__("numpy").__version__
    packages = read_packages(open_reader(project.store), run_id)
    assert len(packages) == values["installed"]["count"]
    assert f"numpy=={__import__('numpy').__version__}" in packages
    assert values["cpu"]
    assert values["blas"]["numpy"]


def test_nothing_is_imported_in_order_to_be_asked(project):
    project.write_training(
        body="session.open_run.background.join(); import sys; "
        "assert not {'torch', 'threadpoolctl', 'pandas'} & sys.modules.keys()"
    )
    run_id = project.train()
    assert "switches" not in load(project, run_id).environment.values


@pytest.mark.long
def test_a_switch_that_is_set_after_the_start_is_seen(project):
    project.write_training(
        "import torch",
        body="session.open_run.background.join(); torch.backends.cudnn.benchmark = True; "
        "torch.use_deterministic_algorithms(True)",
    )
    stored = load(project, project.train())
    switches = stored.environment.values["switches"]["torch"]
    assert switches["cudnn_benchmark"] is True
    assert switches["deterministic_algorithms"] is True
    assert switches["default_dtype"] == "torch.float32"
    assert stored.digests.environment == digest_environment(stored.environment.values)


def test_equal_environments_have_equal_digests(project):
    project.write_training("import numpy")
    first, second = (load(project, project.train()).digests for _ in range(2))
    assert first.environment == second.environment is not None


def test_what_was_only_installed_comes_last_and_in_one_line(project):
    project.write_training("import numpy")
    stored = load(project, project.train())
    values = dict(stored.environment.values)
    other = {
        **values,
        "packages": {**values["packages"], "numpy": "9.9", "mlflow": "0.1", "wandb": "0.2"},
        "installed": {"count": 3, "digest": "f" * 64},
        "switches": {"torch": {"cudnn_benchmark": True}},
    }
    changed = dataclasses.replace(stored, environment=EnvironmentSnapshot(JsonObject(other)))
    found = compare_settings([stored], [changed])
    assert [change.path for change in found] == [
        "switches.torch.cudnn_benchmark",
        "packages.numpy",
        "installed",
    ]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path with distributions of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def install(distribution, *modules, lines=0):
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        listed = [f"{info.name}/filler{number},," for number in range(lines)]
        for module in modules:
            (tmp_path / module).mkdir(exist_ok=True)
            listed.append(f"{module}/part_{distribution}.py,sha256=x,1")
            (tmp_path / module / f"part_{distribution}.py").touch()
        (info / "RECORD").write_text("\n".join(listed) + "\n")
        return tmp_path

    yield install
    for name in set(sys.modules) - known:
        if name.partition(".")[0].startswith("site_"):
            del sys.modules[name]


def test_a_module_is_found_at_the_end_of_a_long_list_of_files(site):
    root = site("long_list", "site_other_name", lines=20_000)
    (root / "site_other_name" / "__init__.py").touch()
    importlib.import_module("site_other_name")
    assert "long-list" in find_packages().imported


def test_all_distributions_of_a_shared_namespace_count_as_imported(site):
    site("space_one", "site_space")
    site("space_two", "site_space")
    site("elsewhere", "site_elsewhere")
    importlib.import_module("site_space.part_space_one")
    imported = set(find_packages().imported)
    assert {"space-one", "space-two"} <= imported
    assert "elsewhere" not in imported


def test_nothing_is_looked_up_again_where_nothing_else_was_imported(site):
    root = site("late", "site_late")
    (root / "site_late" / "__init__.py").touch()
    first = find_packages()
    assert find_packages(before=first) is first
    importlib.import_module("site_late")
    again = find_packages(before=first)
    assert "late" in again.imported
    assert "late" not in first.imported


def test_what_a_run_before_found_out_is_kept_until_something_is_installed_or_taken_away(site):
    root = site("kept", "site_kept")
    (root / "site_kept" / "__init__.py").touch()
    importlib.import_module("site_kept")
    first = find_packages()
    assert find_packages() is first
    # One that says anew what it brings, as a package that is installed once more.
    for info in root.glob("*.dist-info"):
        info.rename(root / "renamed-2.0.dist-info")
    again = find_packages()
    assert ("kept" in first.imported, "kept" in again.imported) == (True, False)
    assert again.versions["renamed"] == "2.0"
    assert "renamed" in again.imported


def test_what_quark_imports_late_says_nothing_of_a_run(project):
    project.write_training("import psutil", body="import pynvml, os")
    values = load(project, project.train()).environment.values
    assert not {"psutil", "nvidia-ml-py"} & set(values["imported"])
