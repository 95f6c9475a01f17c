"""One training with five backends: every point is in each, by that tool's own reader, once."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if None in map(find_spec, ("torch", "mlflow", "flask", "wandb", "tensorboard")):
    pytest.skip("needs torch, mlflow, flask, wandb and tensorboard", allow_module_level=True)

# The last place: names of benchmarks must hide nothing.
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from mirroring.points import Run
from serving.mlflow_server import MlflowServer

BACKENDS = {"embedded", "mlflow", "wandb", "csv", "tensorboard"}
STEPS = 300


@pytest.fixture(scope="module")
def uri():
    with MlflowServer() as server:
        yield server.uri


def check(tallies):
    assert {tally.backend for tally in tallies} == BACKENDS
    for tally in tallies:
        assert tally.points > 8 * STEPS
        assert (tally.lost, tally.doubled, tally.other, tally.differs) == (0, 0, 0, 0), tallies


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_point_is_in_every_backend(tmp_path, uri):
    run = Run(tmp_path, STEPS, uri)
    run.finish()
    check(run.count("points"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_kill_and_a_resume_leave_every_point_once_in_every_backend(tmp_path, uri):
    run = Run(tmp_path, STEPS, uri)
    process = run.start(pause_s=0.03)  # seconds for whoever is to kill it
    run.wait_for(STEPS // 2, process)
    loose = run.kill(process)
    assert 0 < run.ledger.done < STEPS
    run.finish()
    check(run.count("kills", loose=loose, times=1))
