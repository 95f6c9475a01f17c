"""Evaluation inside of a watched step is left out, and no step gives records without bound."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quark
from quark import HookEngineConfig
from quark_core.errors import SchemaValidationError


@pytest.fixture(params=["compiled hooks", "python hooks"], autouse=True)
def either_hooks(request, monkeypatch):
    if request.param == "python hooks":
        monkeypatch.setattr("quark_torch.layers.eager_hooks.find_hooks", lambda: None)


def make_net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model):
    model(torch.randn(5, 4)).square().mean().backward()


def evaluate(model, batches=3):
    model.eval()
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn(5, 4))
    model.train()


@pytest.mark.long
def test_evaluation_in_a_watched_step_gives_no_records(session, events):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.watch(session, model, optimizer, every_n_steps=1, telemetry=False) as watch:
        for step in range(3):
            watch.step(step)
            train(model)
            optimizer.step()
            evaluate(model, batches=50)
    assert {record.call_index for record in watch.hooks.read()} == {0}
    assert len(watch.hooks.read()) == 3 * 2 * 4
    (event,) = events("evaluation_left_out")
    assert (event.severity, event.step, event.payload["call_count"]) == ("info", 0, 200)
    assert "include_eval=True" in event.payload["message"]


@pytest.mark.long
def test_evaluation_is_recorded_where_it_is_asked_for(session, events):
    model = make_net()
    with quark.watch(session, model, every_n_steps=1, telemetry=False, include_eval=True) as watch:
        watch.step(0)
        train(model)
        evaluate(model)
    forward = watch.hooks.read(module_name="0", summary_type="activation")
    assert [record.call_index for record in forward] == [0, 1, 2, 3]
    assert not events("evaluation_left_out")


def test_evaluation_with_gradients_is_left_out_by_the_mode(engine):
    model = make_net()
    hooks = engine(model)
    with hooks.step(0):
        train(model)
        model.eval()
        model(torch.randn(5, 4))
    assert len(hooks.read()) == 8


@pytest.mark.long
def test_evaluation_in_training_mode_is_left_out_by_the_lack_of_gradients(engine):
    model = make_net()
    hooks = engine(model, capture_backward=False)
    with hooks.step(0):
        train(model)
        with torch.inference_mode():
            model(torch.randn(5, 4))
    assert len(hooks.read()) == 4


@pytest.mark.long
def test_a_frozen_norm_of_a_model_in_training_is_recorded(engine):
    model = make_net()
    model[1].eval()
    hooks = engine(model)
    with hooks.step(0):
        train(model)
    assert {record.module_name for record in hooks.read()} == set("0123")


@pytest.mark.long
def test_micro_batches_are_counted_without_evaluation(engine):
    model = make_net()
    hooks = engine(model)
    with hooks.step(0):
        train(model)
        evaluate(model)
        train(model)
    second = [r for r in hooks.read(module_name="0") if r.call_index == 1]
    assert [record.metadata for record in second] == [{"micro_batch": 1}] * 2


@pytest.mark.long
def test_a_checkpoint_is_no_evaluation(engine, events):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_net()

        def forward(self, values):
            return checkpoint(self.inner, values, use_reentrant=True)

    model = Checkpointed()
    hooks = engine(model)
    with hooks.step(0):
        model(torch.randn(5, 4, requires_grad=True)).square().sum().backward()
    assert len(hooks.read(summary_type="activation")) == 4
    assert len(hooks.read(summary_type="gradient")) == 4
    assert not events("evaluation_left_out")


def test_a_step_of_nothing_but_evaluation_says_so(engine, events):
    model = make_net().eval()
    hooks = engine(model)
    with hooks.step(0):
        train(model)
    assert hooks.read() == ()
    (event,) = events("probe_without_training")
    assert event.severity == "warning"
    assert "model.train()" in event.payload["message"]
    assert not events("probe_empty")


@pytest.mark.long
def test_calls_of_one_step_are_bounded_and_told(engine, events):
    model = make_net()
    hooks = engine(model, max_calls_per_step=5)
    for step in range(2):
        with hooks.step(step):
            for _ in range(12):
                train(model)
    for step in range(2):
        records = hooks.read(module_name="0", step=step)
        assert sorted(r.call_index for r in records) == sorted([*range(5), *range(5)])
    (event,) = events("calls_left_out")
    assert (event.step, event.payload["call_count"]) == (0, 7 * 4)
    assert "max_calls_per_step" in event.payload["message"]


@pytest.mark.long
def test_a_mode_of_a_wrapped_model_is_that_of_the_model(engine):
    model = make_net()
    wrapper = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    hooks = engine(wrapper)
    with hooks.step(0):
        train(wrapper)
        evaluate(wrapper.module)
    assert {record.call_index for record in hooks.read()} == {0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"include_eval": 1}, "include_eval must be True or False"),
        ({"max_calls_per_step": 0}, "max_calls_per_step must be a positive integer"),
        ({"max_calls_per_step": "2"}, "max_calls_per_step"),
    ],
)
def test_bad_values_are_refused(given, message):
    with pytest.raises(SchemaValidationError, match=message):
        HookEngineConfig(**given)


@pytest.mark.long
def test_training_is_the_same_with_evaluation_in_a_probed_step(session):
    def run(is_watched):
        torch.manual_seed(1)
        model = make_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        hooks = quark.HookEngine(session, model, optimizer) if is_watched else None
        for step in range(4):
            if hooks is not None:
                hooks.begin_step(step)
            optimizer.zero_grad()
            train(model)
            optimizer.step()
            evaluate(model)
        if hooks is not None:
            hooks.close()
        return model.state_dict()

    plain, watched = run(is_watched=False), run(is_watched=True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
