"""In which mode a model is evaluated, and which hooks that takes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import quark
from quark_torch.schedule import HookScheduleConfig

RULE = "training_mode_in_evaluation"


class Net(nn.Sequential):
    """A model in which modes matter."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def learn(model):
    model(torch.randn(6, 4)).sum().backward()


def evaluate(model):
    with torch.no_grad():
        model(torch.randn(6, 4))


def read_modes(engine, step):
    """Of the modules at a step: what their records say of evaluations."""
    found = {}
    for record in engine.read(step=step, summary_type="activation"):
        if record.metadata is not None and "evaluation" in record.metadata:
            found[record.module_name] = record.metadata["evaluation"]
    return found


def count_hooks(model):
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())


@pytest.mark.sampled
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
def test_the_mode_of_an_evaluation_after_a_probed_step(engine, is_training, is_inside):
    model = Net()
    hooks = engine(model, schedule=HookScheduleConfig(every_n_steps=2))
    for step in range(3):
        hooks.begin_step(step)
        learn(model)
        if not is_inside:
            hooks.end_step()
        if step == 0:
            model.train(is_training)
            evaluate(model)
            model.train()
        hooks.end_step()
    told = {"step": 0, "training": is_training}
    assert read_modes(hooks, 2) == {"1": told, "2": told}
    assert read_modes(hooks, 0) == {}


@pytest.mark.sampled
@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_of_an_evaluation_after_a_step_that_is_not_probed(engine, is_training):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    hooks = engine(model, optimizer, schedule=HookScheduleConfig(every_n_steps=10))
    in_training = []
    for step in range(21):
        with hooks.step(step) as is_probed:
            learn(model)
            if not is_probed:
                in_training.append(count_hooks(model))
            optimizer.step()
        if (step + 1) % 6 == 0:
            model.train(is_training)
            evaluate(model)
            model.train()
    assert not any(in_training)
    assert read_modes(hooks, 10) == {key: {"step": 5, "training": is_training} for key in "12"}
    told = {"step": 17, "training": is_training, "earlier": [[11, is_training]]}
    assert read_modes(hooks, 20) == dict.fromkeys("12", told)
    hooks.close()
    assert count_hooks(model) == 0


@pytest.mark.long
def test_after_a_few_evaluations_only_probed_steps_are_listened_to(engine):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    hooks = engine(model, optimizer, schedule=HookScheduleConfig(every_n_steps=50))
    after = []
    for step in range(20):
        with hooks.step(step):
            learn(model)
            optimizer.step()
        after.append(count_hooks(model))
        model.eval()
        evaluate(model)
        evaluate(model)
        model.train()
    assert after == [1] * 8 + [0] * 12


@pytest.mark.long
def test_a_loop_that_begins_only_steps_that_are_due(engine):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    hooks = engine(model, optimizer, schedule=HookScheduleConfig(every_n_steps=8))
    hooked = []
    for step in range(16):
        if hooks.should_probe(step):
            hooks.begin_step(step)
        hooked.append(count_hooks(model) > 0)
        learn(model)
        optimizer.step()
        hooks.end_step()
    # A few training passes outside of a step take the hook out once and for all.
    assert hooked == [True] * 5 + [False] * 3 + [True] * 2 + [False] * 6


@pytest.mark.long
def test_steps_that_are_not_probed_have_no_hooks(engine):
    model = Net()
    hooks = engine(model, schedule=HookScheduleConfig(every_n_steps=3))
    for step in range(7):
        is_probed = hooks.begin_step(step)
        learn(model)
        assert bool(count_hooks(model)) is is_probed
        hooks.end_step()
    hooks.close()
    assert count_hooks(model) == 0


def test_a_model_in_which_no_mode_matters_has_no_hook_after_a_step(engine):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.0))
    hooks = engine(model)
    with hooks.step(0):
        learn(model)
    assert count_hooks(model) == 0


@pytest.mark.long
def test_dropout_that_is_left_active_on_purpose(engine):
    model = Net()
    hooks = engine(model)
    with hooks.step(0):
        learn(model)
    model.eval()
    model[2].train()
    evaluate(model)
    model.train()
    with hooks.step(1):
        learn(model)
    assert read_modes(hooks, 1)["2"] == {"step": 0, "training": False}


def test_an_evaluation_after_a_pass_that_makes_labels(engine):
    model = Net()
    hooks = engine(model)
    with hooks.step(0):
        evaluate(model)
        learn(model)
    model.eval()
    evaluate(model)
    model.train()
    with hooks.step(1):
        learn(model)
    assert read_modes(hooks, 1)["1"] == {"step": 0, "training": False}


@pytest.mark.long
def test_copies_that_are_made_before_the_next_step_are_free(engine):
    model = Net()
    hooks = engine(model)
    with hooks.step(0):
        learn(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        evaluate(other)
    with hooks.step(1):
        learn(model)
    assert read_modes(hooks, 1) == {}


def test_a_wrapped_model(engine):
    model = nn.DataParallel(Net())
    hooks = engine(model)
    with hooks.step(0):
        learn(model)
    evaluate(model)
    with hooks.step(1):
        learn(model)
    assert read_modes(hooks, 1)["1"] == {"step": 0, "training": True}


@pytest.mark.sampled
@pytest.mark.parametrize("every_n_steps", [1, 7, 10, 50, 200])
@pytest.mark.parametrize("is_forgotten", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_forgotten_eval_is_found_at_every_cadence(
    tmp_path, every_n_steps, is_forgotten, is_first
):
    """Also by `quark.watch`, and whether a validation begins a step or ends it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        watch = quark.watch(session, model, optimizer, every_n_steps=every_n_steps)
        metrics = quark.MetricsLogger(session)

        def validate(step):
            model.train(is_forgotten)
            evaluate(model)
            model.train()
            metrics.log("val/loss", 0.5, step=step)

        for step in range(220):
            watch.step(step)
            if is_first and step % 33 == 32:
                validate(step)
            learn(model)
            optimizer.step()
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
            if not is_first and step % 33 == 32:
                validate(step)
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    result = quark.AnalyzerEngine(opened).analyze()
    found = [alert.title for alert in result.alerts if alert.rule_id == RULE]
    assert found == (["Validation runs in training mode"] if is_forgotten else [])
    assert result.verdicts[RULE].state == ("fired" if is_forgotten else "quiet")


def test_where_no_evaluation_was_seen_the_rule_says_that_it_could_not_look(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        watch = quark.watch(session, model, optimizer, every_n_steps=500)
        metrics = quark.MetricsLogger(session)
        for step in range(60):
            watch.step(step)
            learn(model)
            optimizer.step()
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
            if step % 10 == 9:
                evaluate(model)
                metrics.log("val/loss", 0.5, step=step)
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    verdict = quark.AnalyzerEngine(opened).analyze().verdicts[RULE]
    assert verdict.state == "no_data"
    assert "before a probed step" in verdict.reason
