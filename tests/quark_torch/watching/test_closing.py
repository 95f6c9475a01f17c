"""Whatever an instrument does at its end, the run ends as the training did."""

import pytest
import torch
from torch import nn

import quark
from quark import EventLogger
from quark_core.errors import InvalidRunStateError
from quark_torch.failures import do_each


def script(module):
    with pytest.warns(DeprecationWarning, match="jit"):
        return torch.jit.script(module)


def trace(module):
    with pytest.warns(DeprecationWarning, match="jit"):
        return torch.jit.trace(module, torch.zeros(2, 4))


class Odd(nn.Module):
    """A module of a class that cannot be asked for its forward."""

    class Refusing:
        def __get__(self, owner, kind):
            if owner is None:
                raise RuntimeError("ask an instance")
            return owner.run

    forward = Refusing()

    def run(self, values):
        return values * 1.0


def count_hooks(model, optimizer):
    found = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    found += sum(len(module._forward_hooks) for module in model.modules())
    return found + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()


def watch_training(session, model, optimizer, *, steps=3):
    with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
        for step in range(steps):
            watch.step(step)
            train(model, optimizer)
    return watch


def is_closed(writer, *call):
    with pytest.raises(InvalidRunStateError, match="closed"):
        getattr(writer, call[0])(*call[1:])
    return True


def assert_all_closed(watch, model, optimizer):
    assert is_closed(watch.hooks, "begin_step", 9)
    assert is_closed(watch.parameters, "snapshot", 9)
    assert is_closed(watch.telemetry, "start_step", 9)
    assert count_hooks(model, optimizer) == 0


@pytest.mark.parametrize("make", [script, trace])
@pytest.mark.parametrize("place", ["submodule", "whole", "child of a script"])
def test_a_scripted_or_traced_module_lets_the_run_complete(tmp_path, make, place):
    if place == "submodule":
        model = nn.Sequential(make(nn.Linear(4, 4)), nn.Linear(4, 2))
    elif place == "whole":
        model = make(nn.Linear(4, 4))
    else:
        model = nn.Sequential(make(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        watch = watch_training(session, model, optimizer)
        assert_all_closed(watch, model, optimizer)
        assert {record.step for record in watch.parameters.read_summaries()} == {0, 1, 2}
    assert session.status == "completed"


def test_a_module_that_cannot_be_looked_at_lets_the_run_complete(tmp_path):
    model = nn.Sequential(Odd(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        # The layer is looked at under a forward of its own all the same.
        watch = watch_training(session, model, optimizer)
        assert {record.module_name for record in watch.hooks.read()} == {"0", "1"}
    assert session.status == "completed"


@pytest.mark.parametrize("part", ["hooks", "parameters", "telemetry"])
def test_a_part_that_raises_at_its_end_leaves_the_others_closed(tmp_path, monkeypatch, part):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
            watch.step(0)
            train(model, optimizer)
            failing = getattr(watch, part)
            close = failing.close

            def fail():
                close()
                raise OSError("planted")

            monkeypatch.setattr(failing, "close", fail)
        assert_all_closed(watch, model, optimizer)
        (event,) = EventLogger(session).read(event_type="instrumentation_failed")
        assert event.severity == "error"
        assert event.payload["component"] == "TrainingWatch"
        assert "OSError: planted" in event.payload["reason"]
    assert session.status == "completed"


@pytest.mark.parametrize("part", ["ParameterDiagnostics", "SystemTelemetry"])
def test_a_part_that_cannot_be_made_leaves_no_hook_of_the_others(tmp_path, monkeypatch, part):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_, **__):
        raise OSError("planted")

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        monkeypatch.setattr(f"quark_torch.watching.{part}", fail)
        with pytest.raises(OSError, match="planted"):
            quark.watch(session, model, optimizer)
        assert count_hooks(model, optimizer) == 0
        train(model, optimizer)
    assert session.status == "completed"


@pytest.mark.parametrize("part", ["hooks", "parameters"])
def test_a_fault_within_a_part_s_end_closes_the_rest_of_it(tmp_path, monkeypatch, part):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_):
        raise OSError("planted")

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
            watch.step(0)
            train(model, optimizer)
            if part == "hooks":
                monkeypatch.setattr("quark_torch.layers.hook_engine.HookEngine.settle", fail)
            else:
                monkeypatch.setattr("quark_torch.parameters.measuring.MicroBatches.end", fail)
        monkeypatch.undo()
        assert is_closed(watch.hooks, "begin_step", 9)
        assert is_closed(watch.parameters, "snapshot", 9)
        assert not optimizer._optimizer_step_pre_hooks
        (event,) = EventLogger(session).read(event_type="instrumentation_failed")
        assert "OSError: planted" in event.payload["reason"]
    assert session.status == "completed"


def test_strict_runs_raise_it_once_all_is_closed(tmp_path, monkeypatch):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_):
        raise OSError("planted")

    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        watch = quark.watch(session, model, optimizer, every_n_steps=1)
        watch.step(0)
        train(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("quark_torch.layers.hook_engine.HookEngine.settle", fail)
            with pytest.raises(OSError, match="planted"):
                watch.close()
        assert_all_closed(watch, model, optimizer)
    assert session.status == "completed"


def test_a_run_that_is_ended_inside_of_the_watch(tmp_path, caplog):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
            watch.step(0)
            train(model, optimizer)
            session.end_run("completed")
        assert count_hooks(model, optimizer) == 0
        with pytest.raises(InvalidRunStateError):
            watch.step(1)
    assert session.status == "completed"


def test_an_exception_of_the_training_is_not_replaced(tmp_path, monkeypatch):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_):
        raise OSError("planted")

    with (
        pytest.raises(ZeroDivisionError, match="theirs"),
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        quark.watch(session, model, optimizer, every_n_steps=1) as watch,
    ):
        watch.step(0)
        train(model, optimizer)
        monkeypatch.setattr("quark_torch.layers.hook_engine.HookEngine.settle", fail)
        raise ZeroDivisionError("theirs")
    assert session.status == "failed"
    assert count_hooks(model, optimizer) == 0


def test_a_keyboard_interrupt_at_the_end_still_does_the_rest():
    done = []

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        do_each(lambda: done.append(1), interrupt, lambda: 1 / 0, lambda: done.append(2))
    assert done == [1, 2]
