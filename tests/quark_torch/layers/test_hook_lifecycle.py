"""HookEngine: steps, failures, what is told, reading and closing."""

import os
import sys
import threading

import pytest
import torch
from torch import nn

import quark
import quark_core
import quark_torch
from quark import HookEngine, HookEngineConfig, HookScheduleConfig, LayerFilterConfig
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_torch.layers import hook_engine
from quark_torch.layers.recording import InertHook


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def count_hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def train(model, values=None):
    model(torch.randn(3, 4) if values is None else values).sum().backward()


@pytest.mark.parametrize("failing", ["find_unit_rules", "CompiledHooks", "list_foreign"])
def test_a_constructor_that_raises_leaves_the_run_and_the_model_as_they_were(
    session, monkeypatch, failing
):
    """A context in another process ends its stream with its last writer."""

    def fail(*_args, **_options):
        raise RuntimeError("broken")

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = HookEngine(session, model)
    run = first.open_run
    before = run._open_writers
    monkeypatch.setattr(hook_engine, failing, fail)
    with pytest.raises(RuntimeError, match="broken"):
        HookEngine(session, model, optimizer, config=HookEngineConfig(compiled=True))
    assert run._open_writers == before
    assert count_hooks(model) == 0
    first.close()
    assert run._open_writers == before - 1


class Unhookable(nn.Linear):
    def register_forward_hook(self, *_args, **_options):
        raise RuntimeError("broken")


def test_a_module_that_refuses_its_hook_leaves_none_on_those_before_it(session):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Unhookable(8, 2))
    with pytest.raises(RuntimeError, match="broken"):
        HookEngine(session, model, config=HookEngineConfig(compiled=True))
    assert count_hooks(model) == 0


class Failing(dict):
    """An output that cannot be looked into."""

    def items(self):
        raise ValueError("no looking")


class GivesFailing(nn.Module):
    def forward(self, values):
        return Failing(values=values)


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd = GivesFailing()

    def forward(self, values):
        return self.odd(self.linear(values))["values"]


@pytest.mark.long
def test_hooks_are_there_during_probed_steps_only(session):
    model = small()
    config = HookEngineConfig(schedule=HookScheduleConfig(every_n_steps=3))
    seen = []
    with HookEngine(session, model, config=config) as hooks:
        assert count_hooks(model) == 0
        for step in range(7):
            with hooks.step(step, epoch=2) as probed:
                assert probed is hooks.should_probe(step)
                seen.append((probed, count_hooks(model)))
                train(model)
            assert count_hooks(model) == 0
        assert seen == [(True, 3), (False, 0), (False, 0)] * 2 + [(True, 3)]
        assert {record.step for record in hooks.read()} == {0, 3, 6}
        assert {record.epoch for record in hooks.read()} == {2}


def test_an_unprobed_step_runs_none_of_our_code_in_the_model(session):
    model = small()
    config = HookEngineConfig(schedule=HookScheduleConfig(every_n_steps=2))
    called = []
    packages = tuple(os.path.dirname(one.__file__) + os.sep for one in (quark_core, quark_torch))

    def trace(frame, event, arg):
        if frame.f_code.co_filename.startswith(packages):
            called.append(frame.f_code.co_name)

    with HookEngine(session, model, config=config) as hooks:
        with hooks.step(0):
            train(model)
        for step, expected in ((1, False), (2, True)):
            with hooks.step(step):
                sys.setprofile(trace)
                train(model)
                sys.setprofile(None)
            assert bool(called) is expected


def test_begin_and_end(session):
    model = small()
    with HookEngine(session, model) as hooks:
        assert hooks.begin_step(0) is True
        train(model)
        assert hooks.end_step() is None
        hooks.end_step()
        assert len(hooks.flush()) == 6
        assert hooks.flush() == ()


def test_a_step_left_open_is_ended_by_the_next_and_told_once(engine, events):
    model = small()
    hooks = engine(model)
    for step in range(4):
        hooks.begin_step(step)
        train(model)
    hooks.end_step()
    assert count_hooks(model) == 0
    assert [len(hooks.read(step=step)) for step in range(4)] == [6] * 4
    (event,) = events("probe_left_open")
    assert (event.severity, event.step) == ("warning", 0)


def test_an_exception_of_the_user_removes_the_hooks(engine):
    model = small()
    hooks = engine(model)
    with pytest.raises(KeyError), hooks.step(0):
        model(torch.randn(3, 4))
        raise KeyError("theirs")
    assert count_hooks(model) == 0
    with pytest.raises(RuntimeError), hooks.step(1):
        model(torch.randn(3, 5))
    assert count_hooks(model) == 0
    assert len(hooks.read(step=0)) == 3
    with hooks.step(2):
        train(model)
    assert len(hooks.read(step=2)) == 6


def test_a_failing_hook_is_switched_off_and_told_once(engine, events, caplog):
    model = Fragile()
    hooks = engine(model, raise_on_error=False)
    for step in range(3):
        with hooks.step(step):
            train(model)
    assert model.linear.weight.grad is not None
    records = hooks.read()
    assert {record.module_name for record in records} == {"linear"}
    assert len(records) == 6
    (event,) = events("instrumentation_failed")
    assert event.severity == "error"
    assert event.step == 0
    assert event.payload["component"] == "HookEngine"
    assert event.payload["module"] == "odd"
    assert event.payload["where"] == "forward hook"
    assert "ValueError: no looking" in event.payload["reason"]
    assert sum("no looking" in record.message for record in caplog.records) == 1


@pytest.mark.long
def test_failures_are_raised_after_cleaning_up(engine, strict_session):
    model = Fragile()
    hooks = engine(model)
    with pytest.raises(ValueError, match="no looking"), hooks.step(0):
        assert count_hooks(model) == 2
        try:
            train(model)
        finally:
            assert count_hooks(model) == 0
    with (
        HookEngine(strict_session, model) as strict,
        pytest.raises(ValueError, match="no looking"),
        strict.step(0),
    ):
        train(model)
    # raise_on_error wins over strict_mode.
    config = HookEngineConfig(raise_on_error=False)
    with HookEngine(strict_session, model, config=config) as lenient, lenient.step(1):
        train(model)


@pytest.mark.parametrize("raises", [False, True])
def test_a_failing_gradient_hook(engine, events, monkeypatch, raises):
    model = small()
    hooks = engine(model, raise_on_error=raises, capture_forward=False)

    def fail(*_):
        raise OSError("broken")

    monkeypatch.setattr("quark_torch.measuring.device_probe.Probe.add", fail)
    with hooks.step(0):
        if raises:
            with pytest.raises(OSError, match="broken"):
                train(model)
        else:
            train(model)
            assert model[0].weight.grad is not None
    assert count_hooks(model) == 0
    (event,) = events("instrumentation_failed")
    assert event.payload["where"] == "gradient hook"


def test_scripted_modules_do_not_stop_anything(engine):
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(scripted, nn.Linear(4, 2))
    hooks = engine(model, raise_on_error=False)
    with hooks.step(0):
        train(model)
    assert "1" in {record.module_name for record in hooks.read()}


def test_steps_and_epochs_are_checked(engine):
    hooks = engine(small())
    for call in (hooks.begin_step, hooks.should_probe, lambda step: hooks.step(step).__enter__()):
        for bad in (-1, True, None, "1", 2**63):
            with pytest.raises(SchemaValidationError, match="step"):
                call(bad)
    with pytest.raises(SchemaValidationError, match="epoch"):
        hooks.begin_step(0, epoch=-1)
    assert hooks.should_probe(7) is True


def test_bad_arguments(session):
    model = small()
    for arguments, message in [
        ((session, "model"), "model must be a torch.nn.Module, not str"),
        ((session, model, 5), "optimizer must be"),
        (("session", model), "session"),
    ]:
        with pytest.raises(SchemaValidationError, match=message):
            HookEngine(*arguments)
    with pytest.raises(SchemaValidationError, match="config must be a HookEngineConfig"):
        HookEngine(session, model, config={"batch_size": 3})
    own = torch.optim.SGD(model[2].parameters(), lr=0.1)
    HookEngine(session, model, own).close()
    HookEngine(session, model, [own]).close()


def test_config_defaults_are_those_of_the_guide():
    config = HookEngineConfig()
    assert config.schedule == HookScheduleConfig()
    assert config.filters == LayerFilterConfig()
    assert (config.capture_forward, config.capture_backward) == (True, True)
    assert (config.batch_size, config.raise_on_error) == (100, None)
    assert (config.dead_unit_epsilon, config.saturation_threshold) == (0.0, 0.95)
    assert config.saturation_module_types == ("Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh", "ReLU6")
    with pytest.raises(AttributeError):
        config.batch_size = 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", 5),
        ("filters", ("Linear",)),
        ("capture_forward", 1),
        ("capture_all_outputs", None),
        ("raise_on_error", "yes"),
        ("compiled", 0),
        ("batch_size", 0),
        ("dead_unit_epsilon", -1.0),
        ("dead_unit_epsilon", float("nan")),
        ("dead_unit_epsilon", "a"),
        ("saturation_threshold", 1.0),
        ("saturation_threshold", 0.5),
        ("saturation_threshold", True),
        ("saturation_module_types", "Tanh"),
        ("saturation_module_types", (nn.Tanh,)),
    ],
)
def test_bad_config_names_its_field(field, value):
    with pytest.raises(SchemaValidationError, match=f"^{field}"):
        HookEngineConfig(**{field: value})


def test_closed_engines_and_ended_runs(tmp_path):
    model = small()
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with HookEngine(session, model) as hooks:
            hooks.begin_step(0)
            train(model)
        assert count_hooks(model) == 0
        hooks.close()
        assert len(hooks.read()) == 6
        with pytest.raises(InvalidRunStateError, match="closed"):
            hooks.begin_step(1)
        late = HookEngine(session, model)
        late.begin_step(5)
    # The run has ended with the probe open.
    train(model)
    late.end_step()
    assert count_hooks(model) == 0
    with pytest.raises(InvalidRunStateError):
        late.begin_step(6)


def test_reading_takes_every_filter(engine):
    model = small()
    hooks = engine(model)
    for step in range(6):
        with hooks.step(step, epoch=step // 2):
            train(model)

    def read(**filters):
        return hooks.read(**filters)

    assert len(read()) == 36
    assert {r.module_name for r in read(module_name="1")} == {"1"}
    assert {r.module_type for r in read(module_type="Linear")} == {"Linear"}
    assert {r.hook_direction for r in read(summary_type="gradient")} == {"backward"}
    assert {r.summary_type for r in read(hook_direction="forward")} == {"activation"}
    assert {r.step for r in read(step=3)} == {3}
    assert {r.step for r in read(step_min=4)} == {4, 5}
    assert {r.step for r in read(step_max=1)} == {0, 1}
    assert {r.epoch for r in read(epoch=1)} == {1}
    assert {r.epoch for r in read(epoch_min=1, epoch_max=2)} == {1, 2}
    newest = read(module_name="0", summary_type="activation", limit=2)
    assert [r.step for r in newest] == [4, 5]
    with pytest.raises(SchemaValidationError, match="limit"):
        read(limit=-1)


def test_flush_returns_the_latest_batch_at_most(engine):
    model = small()
    hooks = engine(model, batch_size=4)
    with hooks.step(0):
        train(model)
    assert len(hooks.flush()) == 2
    assert len(hooks.read()) == 6


def test_where_nothing_is_kept_the_answer_is_the_same(tmp_path):
    model = small()
    with (
        quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session,
        HookEngine(session, model) as hooks,
        hooks.step(0) as probed,
    ):
        assert probed is True
        assert count_hooks(model) == 0
        train(model)


def test_threads_share_a_probe(engine):
    model = small()
    hooks = engine(model, capture_backward=False)
    values = torch.randn(3, 4)
    with hooks.step(0):
        threads = [threading.Thread(target=lambda: model(values)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    indexes = sorted(record.call_index for record in hooks.read(module_name="0"))
    assert indexes == list(range(8))


def test_replicas_of_a_module_count_for_it(engine):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model, capture_backward=False)
    with hooks.step(0):
        replica = model[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[0].weight, model[0].bias
        replica(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert [record.call_index for record in hooks.read()] == [0, 1]


def test_several_engines_on_one_model(session):
    model = small()
    with HookEngine(session, model) as one, HookEngine(session, model) as other:
        with one.step(0), other.step(100):
            train(model)
        assert len(one.read(step=0)) == len(one.read(step=100)) == 6


def test_modules_that_went_away_are_passed_over(engine):
    model = small()
    hooks = engine(model)
    model[2] = nn.Linear(8, 3)
    with hooks.step(0):
        train(model)
    assert {record.module_name for record in hooks.read()} == {"0", "1"}
    assert isinstance(InertHook()(1, two=2), type(None))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_module_that_is_switched_off_is_named(engine, events, monkeypatch, is_compiled):
    if not is_compiled:
        monkeypatch.setattr("quark_torch.layers.eager_hooks.find_hooks", lambda: None)
    model = nn.Sequential(Fragile(), Fragile(), Fragile())
    hooks = engine(model, raise_on_error=False)
    for step in range(3):
        with hooks.step(step):
            train(model)
    (event,) = events("instrumentation_failed")
    assert event.payload["modules"] == ["0.odd", "1.odd", "2.odd"]
    assert event.payload["module_count"] == 3
    assert "0.odd, 1.odd, 2.odd" in event.payload["message"]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_backward_outside_of_its_step_is_told(engine, events, monkeypatch, is_compiled):
    if not is_compiled:
        monkeypatch.setattr("quark_torch.layers.eager_hooks.find_hooks", lambda: None)
    model = small()
    hooks = engine(model)
    for step in range(3):
        with hooks.step(step):
            loss = model(torch.randn(3, 4)).sum()
        assert not events("backward_outside_step") or step
        loss.backward()
    hooks.close()
    assert {record.summary_type for record in hooks.read()} == {"activation"}
    (event,) = events("backward_outside_step")
    assert (event.severity, event.step, event.payload["gradient_count"]) == ("warning", 0, 3)


def test_backward_after_the_last_step_is_told_at_the_end(engine, events):
    model = small()
    hooks = engine(model)
    with hooks.step(7):
        loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    hooks.close()
    (event,) = events("backward_outside_step")
    assert event.step == 7


def test_backward_inside_of_its_step_is_not_told(engine, events):
    model = small()
    hooks = engine(model)
    for step in range(3):
        with hooks.step(step):
            train(model)
    hooks.close()
    assert not events("backward_outside_step")
