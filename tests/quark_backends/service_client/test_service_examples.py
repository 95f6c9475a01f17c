"""The examples and the live training, as they are, against a service in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from service_fixtures import serving_process

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The variables that lead to a service in a process of its own."""
    folder = tmp_path_factory.mktemp("service")
    with serving_process(folder) as server:
        yield {
            **{k: v for k, v in os.environ.items() if not k.startswith("QUARK_")},
            "QUARK_PERSISTENCE_URL": server.url,
            "QUARK_USER_KEY": server.make_key("default", "ingest", "read"),
            "PYTHONIOENCODING": "utf-8",
            "OMP_NUM_THREADS": "1",
            "QUARK_QUIET": "1",
            "COLUMNS": "200",
        }


@pytest.fixture
def run_python(tmp_path, environment):
    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            cwd=tmp_path,
            env={**environment, **variables},
            encoding="utf-8",
            timeout=280,
        )

    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("session_lifecycle.py", r"the run lies in http://127.0.0.1:\d+/v1/runs/\w+"),
        ("store_artifacts.py", r"checkpoint: \(10000,\)"),
        ("batch_diagnostics.py", "hard: batch "),
        ("smoke_tests.py", "Quark works here."),
    ],
)
def test_an_example(run_python, tmp_path, script, expected):
    done = run_python(ROOT / "examples" / script)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(expected, done.stdout)
    assert list(tmp_path.rglob("*.db")) == []


@pytest.mark.long
def test_the_demo(run_python, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = run_python(ROOT / "examples" / "train_digits.py", "--epochs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Best validation accuracy 0." in done.stdout
    assert list(tmp_path.rglob("*.db")) == []
    listed = run_python("-m", "quark", "runs")
    assert "digits" in listed.stdout


@pytest.mark.long
def test_a_transformer_is_trained_and_everything_arrives(run_python):
    pytest.importorskip("torch")
    script = ROOT / "tests" / "quark_backends" / "live_service" / "run_transformer_persistence.py"
    done = run_python(script, "--steps", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything arrived." in done.stdout


@pytest.mark.long
def test_it_brings_a_service_of_its_own(run_python):
    pytest.importorskip("torch")
    script = ROOT / "tests" / "quark_backends" / "live_service" / "run_transformer_persistence.py"
    done = run_python(script, "--start", "--steps", "3", QUARK_PERSISTENCE_URL="")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_training_needs_to_know_the_service(run_python):
    pytest.importorskip("torch")
    script = ROOT / "tests" / "quark_backends" / "live_service" / "run_transformer_persistence.py"
    done = run_python(script, QUARK_PERSISTENCE_URL="")
    assert done.returncode == 2
    assert "QUARK_PERSISTENCE_URL" in done.stderr
