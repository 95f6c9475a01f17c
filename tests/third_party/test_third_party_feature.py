"""The example of a third party's feature, installed as a user installs it, and removed again."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from service_fixtures import serving

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_feature"
INSTALLED = {each.metadata["Name"] for each in distributions()}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not {"pip", "hatchling"} <= INSTALLED,
        reason="the example is built and installed with pip and hatchling",
    ),
]

TRAINING = """
import os, signal, sys, time
import quark
from quark_energy import record_energy

session = quark.start_run(project="p", storage_dir=".", backends=sys.argv[1])
print(session.run_id, flush=True)
for step in range(50):
    record_energy(session, "gpu0", 0.5 * step, step)
    quark.MetricsLogger(session).log("loss", 1 / (step + 1), step=step)
if sys.argv[2] == "kill":
    time.sleep(1)
    record_energy(session, "gpu0", 1.0, 50)
    os.kill(os.getpid(), signal.SIGKILL)
session.end_run()
"""
COUNT = """
import sys, quark
from quark_core.records.query import Query
run = quark.open_run(sys.argv[1], ".").open_run
print(run.read("metric", Query()).count, run.read(sys.argv[2], Query()).count)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the example is installed."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*command, str(EXAMPLE)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def run_python(tmp_path, site):
    """Runs Python in a folder of its own, with the plugin or without; returns its stdout."""

    def run(*arguments, plugin, expect=0):
        path = [str(site)] if plugin else []
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)]),
                "COLUMNS": "1000",  # so that no message is wrapped
            },
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    return run


def test_its_own_tests_pass(run_python):
    run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", EXAMPLE),
        *("-c", EXAMPLE / "pyproject.toml", EXAMPLE / "tests"),
        plugin=True,
    )


def test_a_run_with_its_records_is_used_without_it(tmp_path, run_python):
    run_id = run_python("-c", TRAINING, "csv", "end", plugin=True).split()[0]
    for command in (["runs"], ["show", run_id], ["doctor"], ["analyze", run_id], ["sync"]):
        run_python("-m", "quark", *command, plugin=False)
    assert "No such command 'energy'" in run_python("-m", "quark", "energy", plugin=False, expect=2)
    run_python(
        "-m", "quark", "export", run_id, "--format", "jsonl", "--output", "out", plugin=False
    )
    assert not any("energy" in path.name for path in (tmp_path / "out").iterdir())
    script = COUNT.replace("print(", "try:\n  print(").rstrip() + (
        "\nexcept quark.SchemaValidationError as error:\n  print(error)\n"
    )
    told = run_python("-c", script, run_id, "energy", plugin=False)
    assert "records of kind 'energy' are unknown here: the plugin that defines them" in told
    # Nothing of it is lost.
    assert run_python("-c", COUNT, run_id, "energy", plugin=True).split() == ["50", "50"]


def test_a_killed_run_is_recovered_without_it(run_python):
    run_id = run_python("-c", TRAINING, "csv", "kill", plugin=True, expect=-9).split()[0]
    # The mirror refuses what it has no table for; the store takes all.
    told = run_python("-m", "quark", "sync", plugin=False, expect=1)
    assert "the CSV mirror has no table for records of kind 'energy'" in told
    assert run_python("-c", COUNT, run_id, "metric", plugin=False).split() == ["50", "50"]
    energy = int(run_python("-c", COUNT, run_id, "energy", plugin=True).split()[1])
    assert energy >= 50


def test_a_server_without_it_keeps_its_records(tmp_path, run_python, monkeypatch):
    with serving(tmp_path / "server") as server:  # in this process, which does not have it
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key())
        run_id = run_python("-c", TRAINING, "csv", "end", plugin=True).split()[0]
        told = run_python(
            "-m", "quark", "export", run_id, "--format", "jsonl", "--output", "out", plugin=True
        )
        assert "energy records are not exported: kind must be one of" in told
        assert (tmp_path / "out" / "metric.jsonl").exists()
    (table,) = tmp_path.rglob("energy_use.csv")
    assert len(table.read_text().splitlines()) == 51
