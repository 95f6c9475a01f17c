"""What a sweep says of itself, and how it refuses what was written wrongly."""

import logging

import pytest

import quark
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import StoredTrial

SPACE = {"lr": quark.uniform(1e-4, 1.0, log=True), "optimizer": ["adam"]}


@pytest.fixture
def open_sweep(tmp_path):
    """Opens sweeps of two trials in a store of the test's own."""
    opened = []

    def make(name="lr", **given):
        wanted = {"space": SPACE, "metric": "loss", "mode": "min", "trials": 2} | given
        opened.append(quark.sweep(name, project="p", storage_dir=tmp_path, **wanted))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def log_loss(trial, session):
    quark.MetricsLogger(session).log("loss", trial.number / 3 + 0.5, step=4)


def test_sweep_trial_and_best_are_one_short_line_each(open_sweep):
    sweep = open_sweep()
    assert repr(sweep) == "Sweep('lr' of 'p', random, 2 trials, loss min)"
    best = sweep.run(log_loss)
    assert repr(best) == (
        f"StoredTrial(0, completed, 0.5, lr=0.1021 optimizer='adam', run {best.run_id})"
    )


def test_what_a_store_says_of_a_trial_cannot_command_a_terminal():
    trial = StoredTrial(
        "s1", 0, {"a\x1b[2J": "\x1b]0;x\x07", "b": 1}, {}, "failed", reason="\x1b[31m" * 500
    )
    assert "\x1b" not in repr(trial)
    assert len(repr(trial)) < 700


def test_a_trial_says_one_line_and_its_sweep_one_more(open_sweep, capfd, monkeypatch):
    monkeypatch.delenv("QUARK_QUIET")
    open_sweep().run(log_loss)
    first, *trials = capfd.readouterr().err.splitlines()
    assert first.startswith("quark: sweep lr of p — quark sweep show lr -d ")
    assert len(trials) == 2
    start = "quark: trial 0 of lr completed: loss 0.5 (lr=0.1021 optimizer='adam') after "
    assert trials[0].startswith(start)
    assert " — quark show " in trials[0]


def test_a_trial_that_fails_is_told_as_failed(open_sweep, capfd, monkeypatch):
    monkeypatch.delenv("QUARK_QUIET")

    def train(trial, session):
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ"):
        open_sweep(trials=9).run(train)
    assert "quark: trial 0 of lr failed (lr=" in capfd.readouterr().err


def test_a_metric_that_no_run_logs_is_told_once(open_sweep, caplog):
    def train(trial, session):
        quark.MetricsLogger(session).log("val/acc", 1.0, step=0)

    with caplog.at_level(logging.WARNING, "quark"):
        assert open_sweep("never-logged").run(train) is None
    told = [each for each in caplog.messages if "without a metric value" in each]
    assert len(told) == 1
    assert "no finite value of 'loss'" in told[0]
    assert "trial.complete(value)" in told[0]


def test_a_figure_that_is_returned_is_none_that_lacks(open_sweep, caplog):
    with caplog.at_level(logging.WARNING, "quark"):
        assert open_sweep("returned").run(lambda trial, session: 0.5).values == (0.5,)
    assert caplog.messages == []


@pytest.mark.parametrize("text", ["log:1e-4:1", "unifrom:0:0.5", "int:1:4", "log:1:2:5"])
def test_a_range_in_a_text_is_no_fixed_value(open_sweep, text):
    with pytest.raises(SchemaValidationError, match=r"space\['x'\] .*quark\.uniform"):
        open_sweep(space={"x": text})
    open_sweep("meant", space={"x": [text], "url": "http://host:80", "time": "a:b:c"})


def test_an_object_that_is_no_range_is_told_what_one_is(open_sweep):
    with pytest.raises(SchemaValidationError, match=r"space\['x'\].*quark\.uniform"):
        open_sweep(space={"x": object()})
    with pytest.raises(SchemaValidationError, match="quark sweep new --space FILE"):
        open_sweep(space={"x": {"min": 0, "max": 1}})


@pytest.mark.parametrize("where", ["failurs == 0", "param.lrr > 1", "not (lr > 0 or rat == null)"])
def test_a_name_that_no_trial_has_is_refused(open_sweep, where):
    with pytest.raises(SchemaValidationError, match=r"no trial has .*lr, optimizer.*failures"):
        open_sweep().claim(where)


def test_names_that_trials_have_are_taken(open_sweep):
    sweep = open_sweep(space={"lr": [0.1], "net": [{"depth": 3}]}, search="grid", trials=None)
    trial = sweep.claim("lr == 0.1 and net.depth == 3 and failures == 0 and origin.place == null")
    assert trial is None or trial.number == 0
    assert sweep.claim("param.lr > 1") is None


def test_a_sweep_that_is_not_there_is_named_as_it_was_asked_for(open_sweep, tmp_path):
    open_sweep()
    with pytest.raises(
        SchemaValidationError, match=r"sweep 'lrr' does not exist in project 'p'.*space="
    ):
        quark.sweep("lrr", project="p", storage_dir=tmp_path)
