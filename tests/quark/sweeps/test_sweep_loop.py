"""`for trial in sweep`, `sweep.run` and `sweep.claim` in one process, with real runs."""

import gc
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from sweep_training import SPACE, train

import quark
from quark_core.backends.coordination import NewTrial
from quark_core.errors import InvalidRunStateError, SchemaValidationError, StopRequested
from quark_core.records.sweeps import TrialResult
from quark_core.runs.backend_choice import open_reader


def list_states(sweep):
    return [trial.state for trial in sweep.trials()]


def test_each_trial_is_a_run_with_its_parameters_group_and_objective(open_sweep, root):
    sweep = open_sweep(trials=3)
    for trial in sweep:
        session = train(trial, config={"epochs": 3})
        assert session.trial is trial
        assert trial.session is session
    trials = sweep.trials()
    assert [trial.state for trial in trials] == ["completed"] * 3
    for trial in trials:
        run = quark.open_run(trial.run_id, root)
        assert run.groups == ("sweeps/lr",)
        assert run.config["lr"] == trial.parameters["lr"]
        assert run.config["optimizer"] == trial.parameters["optimizer"]
        assert run.config["epochs"] == 3
        assert run.config["quark_objective"] == "val/acc"
        assert run.config["quark_objective_mode"] == "max"
        assert trial.values == (pytest.approx(3 * trial.parameters["lr"]),)
        assert (trial.step, trial.token) == (2, 1)
        stored = open_reader(root).load_run(trial.run_id)
        assert stored.trial == trial.claim
        assert not stored.superseded
    assert sweep.best == max(trials, key=lambda trial: trial.parameters["lr"])
    assert sweep.is_over
    assert sweep.load().counts == {"completed": 3}


def test_a_run_of_quark_start_run_takes_the_trial_up_too(open_sweep, root):
    sweep = open_sweep(trials=2)
    for trial in sweep:
        with quark.start_run(project="digits", storage_dir=root) as session:
            assert session.trial is trial
            quark.MetricsLogger(session).log({"val/acc": trial["lr"], "loss": 1.0}, step=0)
        # The trial has its run: another one is no trial's.
        with quark.start_run(project="digits", storage_dir=root) as other:
            assert other.trial is None
            assert other.groups == ()
        with pytest.raises(InvalidRunStateError, match=r"trial \d already has run \w+"):
            trial.start_run()
    assert list_states(sweep) == ["completed"] * 2
    with quark.start_run(project="digits", storage_dir=root) as session:
        assert session.trial is None


def test_a_trial_is_a_mapping_of_its_parameters(open_sweep):
    trial = open_sweep().claim()
    assert {**trial} == trial.parameters
    assert set(trial) == {"lr", "optimizer"}
    assert len(trial) == 2
    with pytest.raises(KeyError, match=r"'momentum'.*Its parameters are lr, optimizer"):
        trial["momentum"]
    trial.parameters["lr"] = 5
    assert trial["lr"] != 5
    assert repr(trial).startswith("Trial(0 of 'lr', ")
    trial.suspend()


def test_an_exception_fails_the_run_and_the_trial_is_tried_again(open_sweep, root):
    sweep = open_sweep(trials=2, max_failures=2)
    seen = []

    def step(trial):
        seen.append((trial.number, trial.claim.token))
        with trial.start_run():
            if trial.number == 0:
                raise ValueError("bad corner")

    sweep.run(step)
    assert seen == [(0, 1), (0, 2), (1, 1)]
    broken, other = sweep.trials()
    assert (broken.state, broken.failures) == ("broken", 2)
    assert "ValueError: bad corner" in broken.reason
    assert other.state == "completed"
    assert other.values is None
    assert sweep.best is None


def test_the_second_claim_knows_the_run_of_the_first(open_sweep, root):
    sweep = open_sweep(trials=1)
    first = sweep.claim()
    with pytest.raises(KeyboardInterrupt), first.start_run() as session:
        raise KeyboardInterrupt
    trial = sweep.trials()[0]
    assert (trial.state, trial.failures) == ("suspended", 0)
    second = sweep.claim()
    assert second.earlier_run_id == session.run_id
    with second.start_run() as resumed:
        quark.MetricsLogger(resumed).log("val/acc", 1.0, step=0)
    assert resumed.run_id != session.run_id
    assert open_reader(root).load_run(session.run_id).superseded
    assert not open_reader(root).load_run(resumed.run_id).superseded
    assert sweep.best.run_id == resumed.run_id


def test_an_earlier_run_may_be_resumed_under_the_new_claim(open_sweep, root):
    sweep = open_sweep(trials=1)
    with pytest.raises(KeyboardInterrupt), sweep.claim().start_run() as session:
        raise KeyboardInterrupt
    for trial in sweep:
        with quark.resume_run(run_id=trial.earlier_run_id, storage_dir=root) as resumed:
            assert resumed.trial is trial
            quark.MetricsLogger(resumed).log("val/acc", 2.0, step=1)
    stored = open_reader(root).load_run(session.run_id)
    assert (stored.trial.token, stored.superseded, stored.run.attempt) == (2, False, 1)
    trial = sweep.trials()[0]
    assert (trial.state, trial.values, trial.run_id) == ("completed", (2.0,), session.run_id)


def test_a_promoted_trial_knows_the_run_that_it_goes_on_from(open_sweep):
    sweep = open_sweep(search="halving", trials=3, budget=3)
    runs = {}
    for trial in sweep:
        if trial.rung:
            parent = trial.origin["parent"]
            assert trial.earlier_run_id == runs[parent]
        else:
            assert trial.earlier_run_id is None
        runs[trial.number] = train(trial, steps=trial.budget).run_id
    assert len(runs) == 4


def test_what_a_loop_leaves_is_given_back(open_sweep):
    sweep = open_sweep(trials=3)
    for _ in sweep:
        break
    with pytest.raises(ZeroDivisionError):
        for _ in sweep:
            raise ZeroDivisionError
    assert list_states(sweep) == ["suspended", "waiting", "waiting"]
    assert sweep.trials()[0].token == 2
    for trial in sweep:
        train(trial)
    assert list_states(sweep) == ["completed"] * 3


def test_a_run_that_a_loop_leaves_open_is_ended_with_its_trial(open_sweep):
    sweep = open_sweep(trials=1)
    for trial in sweep:
        session = trial.start_run()
        quark.MetricsLogger(session).log("val/acc", 0.5, step=0)
    assert session.status == "completed"
    assert sweep.best.values == (0.5,)


def test_what_was_said_of_a_trial_counts_before_how_its_run_ends(open_sweep):
    sweep = open_sweep(trials=3)
    for trial in sweep:
        with trial.start_run() as session:
            quark.MetricsLogger(session).log("val/acc", 0.5, step=7)
            if trial.number == 0:
                trial.complete(0.9)
            if trial.number == 1:
                trial.fail("no memory is large enough; token=abcdefghijklmnopqrstuvwxyz0123456789")
            if trial.number == 2:
                trial.suspend("later")
                trial.fail("never")
    first, second, third = sweep.trials()
    assert (first.state, first.values, first.step) == ("completed", (0.9,), 7)
    assert (second.state, second.values) == ("failed", (0.5,))
    assert second.reason.startswith("no memory is large enough")
    assert "abcdefghijklmnopqrstuvwxyz" not in second.reason
    assert (third.state, third.reason) == ("failed", "never")


def test_a_training_function_may_return_its_figure(open_sweep):
    returned = {
        0: None, 1: 0.25, 2: (0.5,), 3: {"val/acc": 0.75}, 4: float("nan"),
    }  # fmt: skip
    sweep = open_sweep(trials=5)
    best = sweep.run(lambda trial: returned[trial.number])
    trials = sweep.trials()
    assert [trial.state for trial in trials] == ["completed"] * 5
    assert [trial.values for trial in trials] == [None, (0.25,), (0.5,), (0.75,), None]
    assert best == trials[3]
    assert all(trial.run_id is None for trial in trials)


def test_a_figure_that_is_returned_counts_where_the_run_has_logged_none(open_sweep):
    def step(trial):
        with trial.start_run() as session:
            if trial.number:
                quark.MetricsLogger(session).log("val/acc", 0.5, step=0)
        return 0.9

    sweep = open_sweep(trials=2)
    sweep.run(step)
    assert [trial.values for trial in sweep.trials()] == [(0.9,), (0.5,)]


def test_a_training_function_may_take_the_session(open_sweep, root):
    def step(trial, session):
        assert session.trial is trial
        return trial["lr"]

    sweep = open_sweep(trials=2)
    assert sweep.run(step).values == (max(t.parameters["lr"] for t in sweep.trials()),)
    assert all(open_reader(root).load_run(t.run_id).state == "completed" for t in sweep.trials())


def test_a_function_that_never_works_ends_the_worker(open_sweep, caplog):
    calls = []

    def step(trial):
        calls.append(trial.number)
        raise ImportError("no module named model")

    sweep = open_sweep(trials=50)
    with pytest.raises(ImportError):
        sweep.run(step)
    assert calls == [0, 0, 0, 1, 1]
    assert [t.state for t in sweep.trials()[:3]] == ["broken", "waiting", "waiting"]
    with pytest.raises(SchemaValidationError, match="train must be a function"):
        sweep.run("train.py")


def test_what_is_returned_must_be_figures(open_sweep):
    sweep = open_sweep(trials=1, max_failures=1)
    sweep.run(lambda trial: {"accuracy": 1.0})
    assert "lacks 'val/acc'" in sweep.trials()[0].reason
    pair = open_sweep("pair", trials=1, max_failures=1, metric=["a", "b"], mode="min")
    pair.run(lambda trial: 1.0)
    assert "must be 2 numbers" in pair.trials()[0].reason


def test_several_metrics_have_a_front(open_sweep):
    figures = [(0.9, 30), (0.8, 10), (0.7, 20), (0.95, 40), (0.8, 10)]
    sweep = open_sweep(trials=5, metric=["acc", "latency"], mode=["max", "min"])
    sweep.run(lambda trial: figures[trial.number])
    assert [trial.number for trial in sweep.best_trials] == [0, 1, 3, 4]
    assert sweep.best.number == 3


def test_the_best_keeps_the_constraints(open_sweep):
    figures = [(0.9, 30), (0.8, 10), (0.7, 20)]
    sweep = open_sweep(trials=3, constraints=["latency <= 20"])
    for trial in sweep:
        accuracy, latency = figures[trial.number]
        with trial.start_run() as session:
            metrics = quark.MetricsLogger(session)
            metrics.log({"val/acc": accuracy, "latency": latency}, step=0)
    assert [trial.constraints for trial in sweep.trials()] == [(10,), (-10,), (0,)]
    assert sweep.best.number == 1


def test_figures_that_nobody_told_are_read_from_the_run(open_sweep, root):
    sweep = open_sweep(trials=1)
    trial = sweep.claim()
    with trial.start_run() as session:
        # Written past the loggers, so that the trial has not seen it go by.
        record = quark.MetricRecord(None, "", 0, 0, 0, 0, "val/acc", "val", "acc", 0.5, step=3)
        session.write([record])
        trial._watch.newest[0] = None
    assert sweep.best.values == (0.5,)


def test_a_claim_may_say_which_trial(open_sweep):
    sweep = open_sweep(trials=6)
    sweep.add({"lr": 5.0, "optimizer": "rmsprop"})
    found = sweep.claim("optimizer == 'rmsprop'")
    assert found["lr"] == 5.0
    assert sweep.claim("optimizer == 'rmsprop'") is None
    low = sweep.claim("param.lr < 0.5 and failures == 0")
    assert low["lr"] < 0.5
    third = sweep.claim(number=found.number)
    assert third is None
    with pytest.raises(SchemaValidationError, match="where, column 4"):
        sweep.claim("lr ~ 3")
    for trial in (found, low):
        trial.suspend()


def test_pausing_gives_nothing_and_cancelling_ends_it(open_sweep):
    sweep = open_sweep(trials=3)
    held = sweep.claim()
    assert sweep.pause().state == "paused"
    assert sweep.claim() is None
    assert sweep.resume().claim() is not None
    assert sweep.cancel().state == "cancelled"
    assert [*sweep] == []
    assert sorted(list_states(sweep)) == ["cancelled", "running", "running"]
    held.complete(0.5)
    assert sweep.best.values == (0.5,)
    with pytest.raises(SchemaValidationError):
        sweep.resume()
    with pytest.raises(SchemaValidationError):
        sweep.add({"lr": 1.0, "optimizer": "adam"})


def test_trials_that_are_added_need_every_parameter(open_sweep):
    with pytest.raises(SchemaValidationError, match=r"parameters\[1\] must have .* lr, optimizer"):
        open_sweep().add({"lr": 1.0, "optimizer": "adam"}, {"lr": 1.0})


def test_a_sweep_is_joined_by_its_name(open_sweep, root):
    made = open_sweep(trials=2)
    joined = quark.sweep("lr", storage_dir=root)
    assert joined.id == made.id
    assert joined.definition.to_dict() == made.definition.to_dict()
    joined.run(lambda trial: 1.0)
    assert made.is_over
    joined.close()
    by_project = quark.sweep("lr", project="digits", storage_dir=root, lease_s=5)
    assert by_project.definition.lease_s == 5
    by_project.close()
    open_sweep(project="letters")
    with pytest.raises(SchemaValidationError, match="in several projects"):
        quark.sweep("lr", storage_dir=root)
    with pytest.raises(SchemaValidationError, match="sweep 'other' does not exist"):
        quark.sweep("other", storage_dir=root)


def test_another_definition_under_one_name_is_refused_by_its_place(open_sweep):
    open_sweep()
    with pytest.raises(
        SchemaValidationError, match=r"already exists with a different definition: seed is 0, not 1"
    ):
        open_sweep(seed=1)
    with pytest.raises(SchemaValidationError, match=r"space\['lr'\] is"):
        open_sweep(space={**SPACE, "lr": [1.0]})


def test_joining_makes_no_store(tmp_path):
    with pytest.raises(quark.SessionStoreError):
        quark.sweep("lr", project="digits", storage_dir=tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(SchemaValidationError, match="project is required"):
        quark.sweep("lr", space=SPACE, metric="a", mode="min", storage_dir=tmp_path)


def test_a_setting_other_than_the_parameter_is_told(open_sweep, caplog):
    sweep = open_sweep(trials=1, space={"lr": [0.1], "model.layers": [4]})
    for trial in sweep:
        with (
            caplog.at_level(logging.WARNING, "quark"),
            trial.start_run(config={"lr": 0.5, "model": {"layers": 4}}) as session,
        ):
            config = dict(session.config)
    assert config["lr"] == 0.5
    assert config["model"] == {"layers": 4}
    assert "model.layers" not in config
    assert "has lr = 0.1, but the run's config has 0.5" in caplog.text


def test_a_stop_at_a_rung_is_asked_for_in_the_loop(open_sweep):
    sweep = open_sweep(search="asha", trials=3, budget=27, space={"lr": [0.9, 0.5, 0.1]})
    for trial in sweep:
        train(trial, steps=27)
    states = {trial.state for trial in sweep.trials()}
    assert states == {"completed", "pruned"}


def test_log_itself_ends_a_training_where_that_was_asked_for(open_sweep, root):
    space = {"lr": quark.uniform(0, 1)}
    sweep = open_sweep(search="asha", trials=8, budget=27, stop=True, space=space)
    reached = {}
    for trial in sweep:
        with trial.start_run() as session:
            metrics = quark.MetricsLogger(session)
            for step in range(27):
                reached[trial.number] = step
                metrics.log({"val/acc": trial["lr"], "loss": 1.0}, step=step)
            reached[trial.number] = "end"
    trials = sweep.trials()
    pruned = [trial for trial in trials if trial.state == "pruned"]
    assert pruned
    assert len(pruned) < len(trials)
    for trial in trials:
        assert reached[trial.number] == (trial.step if trial.state == "pruned" else "end")
    stored = open_reader(root).load_run(pruned[0].run_id)
    assert stored.state == "completed"
    values = quark.MetricsLogger(quark.open_run(pruned[0].run_id, root)).read(metric_key="loss")
    assert values[-1].step == pruned[0].step
    events = quark.EventLogger(quark.open_run(pruned[0].run_id, root)).read()
    assert not [event for event in events if event.event_type == "runtime_error"]


def test_the_end_by_a_rung_leaves_no_other_block(open_sweep):
    sweep = open_sweep(search="asha", trials=2, budget=3, stop=True, space={"lr": [0.9]})
    ended = []
    for trial in sweep:
        trial._watch.waiting.clear()
        with trial.start_run() as session:
            trial.stop_with("failed", "the loss has exploded")
            with pytest.raises(StopRequested) as caught:
                quark.MetricsLogger(session).log("val/acc", 1.0, step=0)
            assert caught.value.request.by == "quark sweep"
            ended.append(trial.number)
            raise caught.value
    assert ended == [0, 1]
    assert [(t.state, t.reason) for t in sweep.trials()] == [
        ("failed", "the loss has exploded")
    ] * 2


def test_a_person_who_stops_the_run_ends_the_trial(open_sweep, root):
    sweep = open_sweep(trials=1)
    for trial in sweep:
        with trial.start_run() as session:
            quark.MetricsLogger(session).log("val/acc", 0.5, step=0)
            quark.stop_run(session, reason="I know better")
            session.open_run.stream._on_beat()
            for _ in range(500):
                if trial.should_stop():
                    break
                session.flush()
            assert trial.should_stop()
    trial = sweep.trials()[0]
    assert trial.state == "pruned"
    assert "I know better" in trial.reason


def test_a_configuration_that_is_done_gives_its_trial_the_earlier_figures(open_sweep, root):
    first = open_sweep("first", trials=1, space={"lr": [0.25]})
    for trial in first:
        train(trial)
    second = open_sweep("second", trials=1, space={"lr": [0.25]})
    for trial in second:
        with trial.start_run(if_done="skip") as session:
            assert session.already_done is not None
    trial = second.trials()[0]
    assert (trial.state, trial.values) == ("completed", (0.75,))


def test_runs_without_a_trial_pay_nothing(root):
    with quark.start_run(project="digits", storage_dir=root) as session:
        channel = session.open_run.stream.channel("metric")
        assert "MetricWatch" not in repr(channel.append)
        assert session.trial is None


def list_open_files(folder):
    """What of a folder this process has open."""
    links = Path("/proc/self/fd").iterdir()
    named = [os.readlink(link) for link in links if link.is_symlink()]
    return [name for name in named if name.startswith(str(folder))]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_sweep_that_is_let_go_of_leaves_nothing_open(tmp_path):
    sweep = quark.sweep(
        "s", project="p", space=SPACE, metric="val/acc", mode="max", trials=2, storage_dir=tmp_path
    )
    trial = sweep.claim()
    assert list_open_files(tmp_path)
    trial.suspend("enough")
    del sweep, trial
    gc.collect()
    assert not list_open_files(tmp_path)


def test_what_is_broken_is_tried_again_once_whoever_asks(open_sweep):
    sweep = open_sweep(trials=3, max_failures=1)
    for trial in sweep:
        if trial.number == 0:
            with pytest.raises(ZeroDivisionError), trial.start_run():
                raise ZeroDivisionError
        elif trial.number == 1:
            trial.fail("its parameters do not go together")
        else:
            train(trial)
    assert list_states(sweep) == ["broken", "failed", "completed"]
    (again,) = sweep.retry()
    assert (again.number, again.parameters, again.state) == (
        3,
        sweep.trials()[0].parameters,
        "waiting",
    )
    assert again.origin["retry_of"] == 0
    assert sweep.retry() == []
    with pytest.raises(SchemaValidationError, match="trial 0 is already being retried as trial 3"):
        sweep.retry(0)
    for number, said in (
        (2, "trial 2 is completed"),
        (9, "trial 9 does not exist"),
        (-1, "trial -1 does not exist"),
    ):
        with pytest.raises(SchemaValidationError, match=said):
            sweep.retry(number)
    with pytest.raises(SchemaValidationError, match="numbers must contain int, got '1'"):
        sweep.retry("1")
    assert [trial.origin["retry_of"] for trial in sweep.retry(1)] == [1]
    for trial in sweep:
        train(trial)
    assert list_states(sweep)[3:] == ["completed"] * 2
    assert sweep.is_over


def break_trials(sweep, count):
    for _ in range(count):
        claim = sweep.claim().claim
        broken = TrialResult(state="waiting")
        sweep.store.settle_trial(*msgspec.structs.astuple(claim), broken, lease_s=60.0)
    assert list_states(sweep) == ["broken"] * count


def test_two_who_ask_at_once_for_overlapping_trials_have_each_tried_again_once(
    open_sweep, monkeypatch
):
    sweep, other = (open_sweep(trials=3, max_failures=1) for _ in range(2))
    break_trials(sweep, 3)
    have_looked = threading.Barrier(2)
    look = type(sweep.store).list_trials

    def look_both(store, *args, **kwargs):
        found = look(store, *args, **kwargs)
        have_looked.wait(30)
        return found

    with monkeypatch.context() as raced, ThreadPoolExecutor(2) as pool:
        raced.setattr(type(sweep.store), "list_trials", look_both)
        asked = [pool.submit(sweep.retry), pool.submit(other.retry, 1, 2)]
        of = [[trial.origin["retry_of"] for trial in each.result()] for each in asked]
    assert of == [[0, 1, 2], [1, 2]]
    assert sorted(trial.origin["retry_of"] for trial in sweep.trials()[3:]) == [0, 1, 2]


def test_an_origin_of_anybody_keeps_nobody_from_trying_again(open_sweep):
    sweep = open_sweep(trials=1, max_failures=1)
    break_trials(sweep, 1)
    odd = [
        NewTrial(parameters={"lr": 0.1}, origin={"retry_of": value})
        for value in ([0], {"a": 0}, "0", 0.5, None)
    ]
    sweep.store.add_trials(sweep.id, odd, key="odd")
    (again,) = sweep.retry()
    assert again.origin["retry_of"] == 0
