"""Ranks of one launch work at the same trials, and stop together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from held_ports import hold_port

import quark
from quark_core.errors import SchemaValidationError
from quark_core.runs.backend_choice import open_reader

PROGRAM = Path(__file__).with_name("sweep_ranks.py")
FOREIGN = ("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_")


def launch(root, name, stop="flag", logs="all", processes=2, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    environment |= {"QUARK_LAUNCH_TIMEOUT_SECONDS": "90"}
    place, port = hold_port()
    with place:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
             "--master-port", str(port), str(PROGRAM), str(root), name, stop, logs],
            capture_output=True, text=True, timeout=280, env=environment,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [[line for line in said if line["rank"] == rank] for rank in range(processes)], done


@pytest.mark.long
@pytest.mark.parametrize("stop", ["flag", "stop"])
def test_all_ranks_train_the_same_trials_and_stop_at_the_same_step(root, stop):
    pytest.importorskip("torch")
    (first, second), _ = launch(root, "ranks", stop)
    assert [line["trial"] for line in first] == list(range(5))
    for one, other in zip(first, second, strict=True):
        assert {**one, "rank": 1} == other
    with quark.sweep("ranks", storage_dir=root) as sweep:
        trials = sweep.trials()
    assert [(t.token, t.step, t.run_id) for t in trials] == [
        (1, line["step"], line["run"]) for line in first
    ]
    states = {trial.state for trial in trials}
    assert states == {"completed", "pruned"}
    assert all((t.state == "completed") == (t.step == 8) for t in trials)
    assert len(open_reader(root).list_runs()) == 5


@pytest.mark.long
def test_a_rank_that_does_not_see_the_rungs_keeps_all_from_stopping(root):
    pytest.importorskip("torch")
    (first, second), done = launch(root, "blind", logs="zero")
    assert {line["step"] for line in first + second} == {8}
    assert "the trial is not stopped at step 1, because not all ranks reached it" in done.stderr
    with quark.sweep("blind", storage_dir=root) as sweep:
        assert {trial.state for trial in sweep.trials()} == {"completed"}


def test_ranks_of_no_launch_that_is_known_are_refused(open_sweep, monkeypatch):
    for name in [*os.environ]:
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        SchemaValidationError, match="rank 1 of 2 of an unknown launch, so its ranks cannot"
    ):
        next(iter(open_sweep()))
