"""Several processes at one sweep by Optuna, of which one is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from optuna.trial import TrialState

import quark

WORKER = Path(__file__).with_name("sweep_worker.py")


def start(root, step_s, **changes):
    environment = {**os.environ, "SWEEP_CHANGES": json.dumps(changes)}
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(root), "killed", str(step_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.long
@pytest.mark.parametrize("search", ["hyperband", "cmaes"])
def test_what_a_killed_worker_had_is_finished_by_another(root, search):
    changes = {"search": search, "budget": 9, "trials": 10}
    processes = [start(root, 0.01, **changes) for _ in range(3)]
    try:
        line = next(line for line in processes[0].stdout if "trains" in line)
        processes[0].kill()
        for process in processes[1:]:
            _, said = process.communicate(timeout=250)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    with quark.sweep("killed", storage_dir=root) as sweep:
        trials = sweep.trials()
        assert [trial.number for trial in trials] == list(range(10))
        assert {trial.state for trial in trials} <= {"completed", "pruned"}
        taken_up = trials[json.loads(line)["trains"]]
        assert (taken_up.token, taken_up.losses) == (2, 1)
        sweep.search.propose(trials)
        known = sweep.search._open()[0].get_trials()
        own = [each for each in known if not each.user_attrs]
        assert sorted(trial.origin["optuna"] for trial in trials) == [each.number for each in own]
        for trial in trials:
            told = known[trial.origin["optuna"]]
            pruned = trial.state == "pruned"
            assert told.state == (TrialState.PRUNED if pruned else TrialState.COMPLETE)
            assert told.params == trial.parameters
            assert pruned or told.value == trial.values[0]
