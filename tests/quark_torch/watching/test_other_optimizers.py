"""Optimizers that are made anew while a loop is watched, and wrappers around them."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import quark
from quark import EventLogger
from quark_core.errors import SchemaValidationError


@pytest.fixture
def session(tmp_path):
    torch.manual_seed(0)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def backward(model):
    model(torch.randn(6, 4)).square().mean().backward()


class Loop:
    """A watched loop whose optimizer may change; keeps what each step has really done."""

    def __init__(self, session, model, optimizer, *, every=1, given=True):
        self.model, self.optimizer = model, optimizer
        self.watch = quark.watch(session, model, optimizer if given else None, every_n_steps=every)
        self.index = 0
        self.moved = {}

    def run(self, steps, change=None):
        """Train; what changes does so at the top of the first step."""
        for _ in range(steps):
            self.watch.step(self.index)
            if change is not None:
                change()
                change = None
            before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            self.optimizer.zero_grad()
            self.make_step()
            self.moved[self.index] = {
                name: (p.detach() - before[name]).norm().item()
                for name, p in self.model.named_parameters()
            }
            self.index += 1

    def make_step(self):
        backward(self.model)
        self.optimizer.step()

    def close(self):
        self.watch.close()
        return self.watch.parameters.read_summaries()

    def check(self, records):
        assert records
        for record in records:
            real = self.moved[record.step][record.parameter_name]
            assert record.update_norm == pytest.approx(real, rel=1e-4), record.parameter_name


def find_alerts(session, rule):
    return [a for a in quark.AnalyzerEngine(session).analyze().alerts if a.rule_id == rule]


@pytest.mark.sampled
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("place", ["top", "bottom"])
def test_an_optimizer_that_is_made_anew(session, is_named, every, place):
    model = make()
    loop = Loop(session, model, torch.optim.SGD(model.parameters(), lr=0.1), every=every)

    def change():
        loop.optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.5)
        if is_named:
            loop.watch.optimizer = loop.optimizer
            assert loop.watch.optimizer == (loop.optimizer,)

    loop.run(8)
    if place == "bottom":
        change()
        loop.run(8)
    else:
        loop.run(8, change)
    assert loop.watch.optimizer == (loop.optimizer,)
    assert loop.watch.hooks.optimizer == (loop.optimizer,)
    records = loop.close()
    loop.check(records)
    found = {
        (r.step >= 8, r.optimizer_name, r.learning_rate, r.weight_decay, r.in_optimizer)
        for r in records
    }
    assert found == {(False, "SGD", 0.1, 0.0, True), (True, "AdamW", 0.003, 0.5, True)}
    (event,) = EventLogger(session).read(event_type="optimizers_changed")
    assert event.severity == "info"


@pytest.mark.sampled
@pytest.mark.parametrize("is_named", [True, False])
def test_a_head_that_is_swapped_with_its_optimizer(session, is_named):
    model = make()
    loop = Loop(session, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def change():
        model[2] = nn.Linear(8, 2)
        loop.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if is_named:
            loop.watch.optimizer = loop.optimizer

    loop.run(10)
    loop.run(20, change)
    records = loop.close()
    loop.check(records)
    assert {record.in_optimizer for record in records} == {True}
    assert not [
        r for r in loop.watch.hooks.read() if (r.metadata or {}).get("in_optimizer") is False
    ]
    assert find_alerts(session, "stagnant_layers") == []


@pytest.mark.long
def test_a_head_that_is_swapped_without_its_optimizer_is_still_told_of(session):
    model = make()
    loop = Loop(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(3)
    model[2] = nn.Linear(8, 2)
    loop.run(20)
    loop.close()
    (alert,) = find_alerts(session, "stagnant_layers")
    assert alert.culprit == "2"


def test_an_optimizer_for_another_part_comes_beside_the_first(session):
    model = make()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    loop = Loop(session, model, first)
    loop.run(2)
    second = torch.optim.Adam(model[2].parameters(), lr=0.01)

    def step_both():
        backward(model)
        first.step()
        second.step()

    loop.make_step = step_both
    loop.run(4)
    assert loop.watch.optimizer == (first, second)
    records = loop.close()
    loop.check([r for r in records if r.in_optimizer])
    names = {(r.step >= 2, r.module_name): r.optimizer_name for r in records}
    assert names == {
        (False, "0"): "SGD",
        (False, "2"): None,
        (True, "0"): "SGD",
        (True, "2"): "Adam",
    }


def test_two_that_step_on_the_same_parameters_are_both_followed(session):
    model = make()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model[0].parameters(), lr=0.05)
    loop = Loop(session, model, first)

    def step_in_turn():
        backward(model)
        (second if loop.index % 2 else first).step()

    loop.make_step = step_in_turn
    loop.run(12)
    assert set(loop.watch.optimizer) == {first, second}
    loop.close()
    assert len(EventLogger(session).read(event_type="optimizers_changed")) == 1


def test_optimizers_of_other_models_are_left_alone(session):
    model, other = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    loop = Loop(session, model, optimizer)

    def step_both():
        backward(model)
        backward(other)
        others.step()
        optimizer.step()

    loop.make_step = step_both
    loop.run(3)
    assert loop.watch.optimizer == (optimizer,)
    loop.check(loop.close())
    assert EventLogger(session).read(event_type="optimizers_changed") == ()


def test_where_none_was_given_none_is_looked_for_until_one_is_named(session):
    model = make()
    loop = Loop(session, model, torch.optim.SGD(model.parameters(), lr=0.1), given=False)
    loop.run(2)
    assert loop.watch.optimizer == ()
    loop.run(2, lambda: setattr(loop.watch, "optimizer", loop.optimizer))
    with pytest.raises(SchemaValidationError, match="optimizer must be"):
        loop.watch.optimizer = "SGD"
    loop.watch.optimizer = [loop.optimizer, torch.optim.SGD(make().parameters(), lr=0.1)]
    records = loop.close()
    assert len(EventLogger(session).read(event_type="optimizer_of_another_model")) == 1
    assert {(r.step >= 2, r.in_optimizer) for r in records} == {(False, None), (True, True)}
    loop.check([record for record in records if record.step >= 2])


@pytest.mark.long
def test_closing_leaves_every_optimizer_and_lets_go_of_the_old_one(session):
    before = len(_global_optimizer_pre_hooks)
    model = make()
    loop = Loop(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(2)
    old = weakref.ref(loop.optimizer)
    loop.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.run(1)
    gc.collect()
    assert old() is None
    loop.close()
    assert len(_global_optimizer_pre_hooks) == before
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as it is commonly written."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / (norm.item() + 1e-12))

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


class PlainWrapper:
    """A wrapper that is no optimizer itself."""

    def __init__(self, base):
        self.base = base
        self.zero_grad = base.zero_grad
        self.step = base.step


class Lookahead(torch.optim.Optimizer):
    """Goes back half the way after each second step, without PyTorch's own constructor."""

    def __init__(self, base):
        self.base = base
        self.param_groups = base.param_groups
        self.zero_grad = base.zero_grad

    def step(self):
        self.base.step()


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["closure", "two steps"])
@pytest.mark.parametrize("given", ["wrapper", "base", "both", "later"])
def test_sam(session, how, given):
    model = make()
    first = torch.optim.SGD(model.parameters(), lr=0.3)
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    loop = Loop(
        session,
        model,
        {"wrapper": sam, "base": sam.base_optimizer, "both": [sam.base_optimizer, sam]}.get(
            given, first
        ),
    )
    loop.optimizer = sam

    def close():
        sam.zero_grad()
        backward(model)

    def step():
        backward(model)
        if how == "closure":
            sam.step(close)
        else:
            sam.first_step()
            close()
            sam.second_step()

    loop.make_step = step
    loop.run(5)
    records = loop.close()
    loop.check(records)
    assert {record.in_optimizer for record in records} == {True}
    assert {record.learning_rate for record in records} == {0.1}
    assert EventLogger(session).read(event_type="updates_missing") == ()


@pytest.mark.parametrize("wrap", [PlainWrapper, Lookahead])
def test_wrappers_that_are_no_optimizers_of_pytorch_s_making(session, wrap):
    model = make()
    wrapper = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    loop = Loop(session, model, wrapper)
    loop.run(3)
    records = loop.close()
    loop.check(records)
    assert {record.optimizer_name for record in records} == {"SGD"}


def test_a_copy_of_an_optimizer_that_steps_takes_its_place(session):
    model = make()
    loop = Loop(session, model, torch.optim.Adam(model.parameters(), lr=0.1))
    loop.run(2)
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    loop.optimizer.load_state_dict(state)
    loop.run(2)
    loop.check(loop.close())
    assert loop.watch.optimizer == (loop.optimizer,)


@pytest.mark.parametrize(
    ("reason", "count"), [("no_optimizer_step", 1), ("in_no_optimizer", 1), (None, 0)]
)
def test_updates_that_are_missing_in_a_row_are_told_of_once(session, reason, count):
    model, other = make(), make()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    if reason == "in_no_optimizer":
        given = torch.optim.SGD(other.parameters(), lr=0.1)
    with quark.ParameterDiagnostics(session, model, given) as diagnostics:
        for step in range(9):
            given.zero_grad()
            backward(model)
            if reason is None and step % 3 != 1:
                given.step()
            diagnostics.snapshot(step)
    events = EventLogger(session).read(event_type="updates_missing")
    assert len(events) == count
    for event in events:
        assert (event.step, event.severity) == (2, "warning")
        assert event.payload["reason"] == reason
        assert "in a row" in event.payload["message"]


def test_an_optimizer_of_another_model_is_told_of_and_not_refused(session):
    model, other = make(), make()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.Adam(other.parameters(), lr=0.1)
    loop = Loop(session, model, own)
    loop.watch.close()
    loop.watch = quark.watch(session, model, [own, others], every_n_steps=1)
    loop.run(3)
    loop.check(loop.close())
    (event,) = EventLogger(session).read(event_type="optimizer_of_another_model")
    assert event.severity == "warning"
    assert "Adam (optimizer 1)" in event.payload["message"]
    assert not [
        r for r in loop.watch.hooks.read() if (r.metadata or {}).get("in_optimizer") is False
    ]


@pytest.mark.parametrize("parameters", [True, False])
def test_an_optimizer_of_another_model_alone(session, parameters):
    model = make()
    others = torch.optim.SGD(make().parameters(), lr=0.1)
    with quark.watch(session, model, others, every_n_steps=1, parameters=parameters) as watch:
        for step in range(3):
            watch.step(step)
            backward(model)
    (event,) = EventLogger(session).read(event_type="optimizer_of_another_model")
    assert event.payload["component"] == ("ParameterDiagnostics" if parameters else "HookEngine")
    if parameters:
        assert {r.in_optimizer for r in watch.parameters.read_summaries()} == {False}


def test_hooks_by_themselves_tell_of_it_too(session):
    model = make()
    optimizers = [torch.optim.SGD(made.parameters(), lr=0.1) for made in (make(), model)]
    with quark.HookEngine(session, model, optimizers) as hooks, hooks.step(0):
        backward(model)
    (event,) = EventLogger(session).read(event_type="optimizer_of_another_model")
    assert "SGD (optimizer 0)" in event.payload["message"]
    assert len(hooks.read(step=0)) == 6
