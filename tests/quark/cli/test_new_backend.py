"""`quark backends new` writes a backend whose tests pass at once, and never over anything."""

import json
import os
import subprocess
import sys

import pytest

from quark_core.errors import SchemaValidationError


def run_tests(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["my-store"])
def test_its_tests_pass_at_once(invoke, tmp_path, name):
    result = invoke("backends", "new", name, "--into", tmp_path / "deep" / "place")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "deep" / "place" / "quark-my-store"
    assert str(folder / "src" / "quark_my_store" / "backend.py") in result.stdout
    report = tmp_path / "report.json"
    done = run_tests(folder, "-p", "quark_core.testing.report", "--conformance-json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(report.read_text())["TestMyStoreBackend"]
    words = [one["outcome"] for one in outcomes]
    assert set(words) == {"passed", "skipped"}
    assert words.count("passed") > 65


@pytest.mark.long
def test_a_spoiled_skeleton_fails_its_tests(invoke, tmp_path):
    invoke("backends", "new", "bad", "--into", tmp_path)
    backend = tmp_path / "quark-bad" / "src" / "quark_bad" / "backend.py"
    text = backend.read_text()
    backend.write_text(text.replace("os.truncate(path, whole)", "pass").replace("_append(", "(", 1))
    done = run_tests(tmp_path / "quark-bad", "-k", "written_batch or run_is_read_back")
    assert done.returncode == 1
    assert "2 failed" in done.stdout


@pytest.mark.parametrize("given", ["quark-x", "quark_x", "quark.x", "x"])
def test_the_name_of_the_distribution_is_not_doubled(invoke, tmp_path, given):
    result = invoke("backends", "new", given, "--into", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["quark-x"]
    assert (tmp_path / "quark-x" / "src" / "quark_x" / "backend.py").exists()
    assert 'name = "quark-x"' in (tmp_path / "quark-x" / "pyproject.toml").read_text()
    assert "Created the backend 'x' in the package quark-x" in result.stdout
    # What is asked for is what a clean environment lacks: the tests come after it.
    assert result.stdout.index("pip install") < result.stdout.index("python -m pytest")


BAD_NAMES = ["", "My", "9a", "a--b", "a b", "a/b", "../a", "a-", "-a", "größe", "a" * 51]


@pytest.mark.parametrize(
    "name", [*BAD_NAMES, "none", "csv", "quark-csv", "embedded", "new", "quark-"]
)
def test_a_name_that_cannot_be_is_refused(invoke, tmp_path, name):
    with pytest.raises(SchemaValidationError, match="NAME"):
        invoke("backends", "new", "--into", tmp_path, "--", name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_ever_written_over(invoke, tmp_path):
    (tmp_path / "quark-mine").mkdir()
    (tmp_path / "quark-mine" / "precious.txt").write_text("kept")
    (tmp_path / "quark-link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "quark-file").write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    for name in ("mine", "link", "file"):
        with pytest.raises(SchemaValidationError, match="already exists"):
            invoke("backends", "new", name, "--into", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "quark-file").read_text() == "a file"


@pytest.mark.long
def test_a_folder_that_cannot_be_written_is_one_line(quark_command, tmp_path):
    (tmp_path / "file").write_text("")
    done = quark_command("backends", "new", "mine", "--into", tmp_path / "file" / "below")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
