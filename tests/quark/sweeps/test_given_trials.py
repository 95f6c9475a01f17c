"""QUARK_TRIAL: somebody else has claimed the trial that a script works at."""

import subprocess
import sys

import pytest
from sweep_training import train

import quark
from quark_core.errors import SchemaValidationError
from quark_core.runs.backend_choice import open_reader

SCRIPT = """
import sys, quark
with quark.start_run(project="digits", config={"epochs": 1}) as session:
    assert session.trial is not None
    quark.MetricsLogger(session).log("val/acc", session.trial["lr"], step=5)
    print(session.run_id, session.trial.number, session.config["optimizer"])
    if sys.argv[1:] == ["fail"]:
        raise ValueError("out of memory")
"""


@pytest.fixture
def give(monkeypatch, root):
    """Gives a trial to this process by the environment."""

    def give_it(trial):
        monkeypatch.setenv("QUARK_TRIAL", trial.claim.to_text())
        monkeypatch.setenv("QUARK_SWEEP_STORAGE_DIR", str(root))

    return give_it


def run_script(tmp_path, *arguments):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip


def test_a_plain_script_trains_the_trial(open_sweep, give, tmp_path, root):
    sweep = open_sweep()
    trial = sweep.claim()
    give(trial)
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    run_id, number, optimizer = done.stdout.split()
    assert (int(number), optimizer) == (trial.number, trial["optimizer"])
    stored = open_reader(root).load_run(run_id)
    assert stored.trial == trial.claim
    assert stored.run.groups == ("sweeps/lr",)
    settled = sweep.trials()[trial.number]
    assert (settled.state, settled.run_id, settled.step) == ("completed", run_id, 5)
    assert settled.values == (trial["lr"],)
    assert not (tmp_path / ".quark").exists()


def test_a_script_that_fails_lets_it_be_tried_again(open_sweep, give, tmp_path):
    sweep = open_sweep()
    give(sweep.claim())
    assert run_script(tmp_path, "fail").returncode == 1
    settled = sweep.trials()[0]
    assert (settled.state, settled.failures) == ("waiting", 1)
    assert "out of memory" in settled.reason


def test_a_claim_that_is_over_begins_no_run(open_sweep, give, tmp_path, root):
    sweep = open_sweep(trials=1)
    trial = sweep.claim()
    trial.suspend()
    sweep.claim()
    give(trial)
    done = run_script(tmp_path)
    assert done.returncode == 1
    assert "claim 1 expired, another worker has it" in done.stderr
    assert open_reader(root).list_runs() == []


def test_a_loop_over_the_sweep_works_at_the_given_trial_alone(open_sweep, give):
    sweep = open_sweep()
    trial = sweep.claim("lr > 0")
    give(trial)
    numbers = []
    for given in sweep:
        train(given)
        numbers.append(given.number)
    assert numbers == [trial.number]
    states = [each.state for each in sweep.trials()]
    assert states == ["completed", "waiting", "waiting", "waiting"]


@pytest.mark.parametrize("text", ["nonsense", "s1/2", "s1/x/1", "s1/0/0", "/0/1"])
def test_what_names_no_trial_is_refused(monkeypatch, root, text):
    monkeypatch.setenv("QUARK_TRIAL", text)
    with pytest.raises(SchemaValidationError, match="QUARK_TRIAL must be sweep/number/token"):
        quark.start_run(project="digits", storage_dir=root)


def test_a_trial_of_no_sweep_is_refused(monkeypatch, open_sweep, root):
    sweep = open_sweep()
    monkeypatch.setenv("QUARK_TRIAL", "s0123/0/1")
    with pytest.raises(SchemaValidationError, match="does not exist in this store"):
        quark.start_run(project="digits", storage_dir=root)
    monkeypatch.setenv("QUARK_TRIAL", f"{sweep.id}/99/1")
    with pytest.raises(SchemaValidationError, match="has no trial 99"):
        quark.start_run(project="digits", storage_dir=root)
