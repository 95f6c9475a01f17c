"""A metric that no run has is refused with the names near it; a changed setting is shown."""

import pytest

import quark


@pytest.fixture
def store(tmp_path, log_run):
    values = {"train/loss": [2.0, 1.0], "val/loss": [2.0, 1.5], "accuracy": [0.1, 0.9]}
    for run_id in ("r1", "r2"):
        log_run(tmp_path, run_id, values=values)
    return tmp_path


def test_compare_refuses_a_target_that_no_run_has(invoke, store):
    done = invoke("compare", "r1", "r2", "-d", store, "--target", "acuracy", "at_least", "0.5")
    assert done.exit_code == 2
    assert "none of the runs has metric 'acuracy'; near it: 'accuracy'" in done.stderr
    known = invoke("compare", "r1", "r2", "-d", store, "--target", "accuracy", "at_least", "0.5")
    assert known.exit_code == 0


def test_follow_refuses_a_metric_that_an_ended_run_has_not(invoke, store):
    done = invoke("follow", "r1", "-d", store, "--once", "--no-analyze", "--metric", "los")
    assert done.exit_code == 2
    assert "--metric: the run has no metric 'los'; near it: 'train/loss'" in done.stderr
    known = invoke("follow", "r1", "-d", store, "--once", "--no-analyze", "--metric", "val/loss")
    assert known.exit_code == 0


def test_follow_only_says_so_of_a_run_that_may_get_it(invoke, start, tmp_path):
    with start(tmp_path, "r1") as session:
        quark.MetricsLogger(session).log("train/loss", 1.0, step=1)
        session.flush()
        done = invoke("follow", "r1", "-d", tmp_path, "--once", "--no-analyze", "--metric", "loss")
    assert done.exit_code == 0
    assert "has no metric 'loss'; near it: 'train/loss', so far" in done.stderr


def test_a_changed_setting_and_what_it_was_are_shown(invoke, start, tmp_path):
    with start(tmp_path, "r1", config={"lr": 0.1}) as session:
        session.config["lr"] = 0.25
    shown = invoke("show", "r1", "-d", tmp_path).stdout
    assert "lr       0.25" in shown
    assert "config: lr 0.1 becomes 0.25" in shown
