"""The example of a third party's backend, installed as a user installs it."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"

pytest.importorskip("fsspec")
# Not find_spec: setuptools takes a look for pip as a reason to leave distutils alone, and
# PyTorch's compiler in the same process could not import setuptools after that.
INSTALLED = {each.metadata["Name"] for each in distributions()}
pytestmark = pytest.mark.skipif(
    not {"pip", "hatchling"} <= INSTALLED,
    reason="the example is built and installed with pip and hatchling",
)

TRAINING = """
import sys
import quark

with quark.start_run(project="p", storage_dir=sys.argv[1], backends=sys.argv[2]) as session:
    metrics = quark.MetricsLogger(session)
    quark.EventLogger(session).log("begun")
    for step in range(500):
        metrics.log("train/loss", 1 / (step + 1), step=step)
assert session.report_delivery().complete
print(session.run_id)
"""


@pytest.fixture(scope="module")
def run_python(tmp_path_factory):
    """Runs Python where the example is installed, in a folder of its own."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    done = subprocess.run([*command, str(EXAMPLE)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(site), *filter(None, sys.path)])

    def run(*arguments, cwd):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jsonl:./out", "jsonl+file://{root}/elsewhere"])
def test_a_training_goes_through_the_installed_backend(tmp_path, run_python, backend):
    specification = backend.format(root=tmp_path)
    run_id = run_python("-c", TRAINING, tmp_path, specification, cwd=tmp_path).split()[-1]
    folder = tmp_path / ("out" if "out" in backend else "elsewhere") / run_id
    lines = [
        json.loads(line)
        for path in sorted(folder.rglob("*-metric.jsonl"))
        for line in path.read_text().splitlines()[1:]
    ]
    losses = [line["value"] for line in lines if line["metric_key"] == "train/loss"]
    assert losses == [1 / (step + 1) for step in range(500)]


@pytest.mark.long
def test_it_is_listed_with_its_distribution(tmp_path, run_python):
    listed = json.loads(run_python("-m", "quark", "backends", "--json", cwd=tmp_path))
    (found,) = [one for one in listed["backends"] if one["name"] == "jsonl"]
    assert found["origin"] == "quark-jsonl"
    assert found["capabilities"] == ["idempotent", "read"]
    assert listed["left_out"] == []


@pytest.mark.long
def test_its_own_tests_pass_with_the_conformance_kit(tmp_path, run_python):
    report = tmp_path / "report.json"
    run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", EXAMPLE),
        *("-c", EXAMPLE / "pyproject.toml", "-p", "quark_core.testing.report"),
        *("--conformance-json", report, EXAMPLE / "tests"),
        cwd=tmp_path,
    )
    (outcomes,) = json.loads(report.read_text()).values()
    counts = {
        word: sum(one["outcome"] == word for one in outcomes) for word in ("passed", "failed")
    }
    assert counts["failed"] == 0
    assert counts["passed"] > 65
    reasons = {one["reason"] for one in outcomes if one["outcome"] == "skipped"}
    assert all("does not declare" in reason or "old_stores" in reason for reason in reasons)
