"""Gradients of a watched loop under a GradScaler, which was given or is found by itself."""

import pytest
import torch
from torch import nn

import quark
from quark import EventLogger
from quark_core.errors import SchemaValidationError


class Loop:
    """The same training with a scaler or without one."""

    def __init__(self, scaler=None, micro_batches=1):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = scaler
        self.micro_batches = micro_batches

    def run(self, index, *, overflow=False):
        if index % self.micro_batches == 0:
            self.optimizer.zero_grad()
        torch.manual_seed(index)
        loss = self.model(torch.randn(6, 4)).square().mean()
        is_last = index % self.micro_batches == self.micro_batches - 1
        if self.scaler is None:
            loss.backward()
            if is_last:
                self.optimizer.step()
            return
        self.scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
        if is_last:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def make_scaler(**arguments):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, **arguments})


def record(tmp_path, loop, *, steps=8, every=1, overflows=(), strict=False, **arguments):
    """The gradients that are recorded of layers and parameters, and what was told."""
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=strict) as session:
        with quark.watch(
            session, loop.model, loop.optimizer, every_n_steps=every, **arguments
        ) as watch:
            for index in range(steps):
                watch.step(index)
                loop.run(index, overflow=index in overflows)
        layers = {(r.step, r.module_name): r for r in watch.hooks.read(summary_type="gradient")}
        parameters = {(r.step, r.parameter_name): r for r in watch.parameters.read_summaries()}
        events = EventLogger(session).read(event_type="grad_scaler_found")
    return layers, parameters, events


def find_scales(records):
    """By step, by what the records say that gradients were multiplied."""
    return {step: (r.metadata or {}).get("grad_scale") for (step, _), r in records.items()}


def assert_same(found, expected, steps=range(8)):
    for key, wanted in expected.items():
        if key[0] not in steps:
            continue
        for field in ("mean", "std", "norm", "minimum", "maximum", "variance"):
            value = getattr(wanted, field)
            assert getattr(found[key], field) == pytest.approx(value, rel=1e-4, abs=1e-12), key


@pytest.fixture
def plain(tmp_path):
    return record(tmp_path / "plain", Loop())


@pytest.mark.sampled
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_layer_gradients_are_unscaled_and_say_by_what(tmp_path, plain, is_given, strict):
    scaler = make_scaler()
    given = {"grad_scaler": scaler} if is_given else {}
    layers, parameters, events = record(tmp_path, Loop(scaler), strict=strict, **given)
    if is_given or not strict:
        assert find_scales(layers) == dict.fromkeys(range(8), 2.0**16)
        assert_same(layers, plain[0])
        assert events == ()
    else:
        # A strict run records gradients as they come, before the scaler is seen.
        assert find_scales(layers) == {0: None, **dict.fromkeys(range(1, 8), 2.0**16)}
        assert_same(layers, plain[0], range(1, 8))
        assert len(events) == 1
    for key, wanted in plain[1].items():
        assert parameters[key].gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-4)
        assert parameters[key].update_norm == pytest.approx(wanted.update_norm, rel=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("is_given", [True, False])
def test_a_scale_that_changes_is_that_of_the_step(tmp_path, plain, is_given):
    scaler = make_scaler(growth_interval=2)
    given = {"grad_scaler": scaler} if is_given else {}
    layers, _, _ = record(tmp_path, Loop(scaler), **given)
    assert find_scales(layers) == {step: 2.0 ** (16 + step // 2) for step in range(8)}
    assert_same(layers, plain[0])


@pytest.mark.long
def test_a_function_gives_the_scale(tmp_path, plain):
    scaler = make_scaler()
    layers, _, _ = record(tmp_path, Loop(scaler), grad_scaler=scaler.get_scale)
    assert_same(layers, plain[0])


@pytest.mark.long
def test_probes_before_the_scaler_was_seen_are_told_of(tmp_path):
    scaler = make_scaler()
    loop = Loop(scaler, micro_batches=4)
    layers, parameters, (event,) = record(tmp_path, loop, steps=16, every=2)
    unmarked = sorted(step for step, scale in find_scales(layers).items() if scale is None)
    assert unmarked == [0, 2]
    assert event.severity == "warning"
    assert event.payload["probes_before"] == 2
    expected, _, _ = record(tmp_path / "plain", Loop(micro_batches=4), steps=16, every=2)
    assert_same(layers, expected, range(3, 16))
    assert {r.metadata["accumulated"] for r in parameters.values()} == {4}


def test_steps_that_overflow_before_the_scaler_is_seen(tmp_path):
    scaler = make_scaler()
    layers, parameters, (event,) = record(tmp_path, Loop(scaler), overflows=(0, 1))
    scales = find_scales(layers)
    assert [scales[step] for step in (0, 1)] == [None, None]
    assert {scale for step, scale in scales.items() if step >= 2} == {2.0**14}
    assert event.payload["probes_before"] == 2
    assert parameters[3, "0.weight"].update_norm > 0


@pytest.mark.long
def test_a_scaler_that_is_switched_off_is_none(tmp_path, plain):
    layers, _, events = record(tmp_path, Loop(make_scaler(enabled=False)))
    assert set(find_scales(layers).values()) == {None}
    assert_same(layers, plain[0])
    assert events == ()


@pytest.mark.long
def test_the_scaler_of_another_model_is_none_of_ours(tmp_path, plain):
    other = Loop(make_scaler())

    class Both(Loop):
        def run(self, index, *, overflow=False):
            other.run(index)
            super().run(index)

    layers, _, _ = record(tmp_path, Both())
    assert set(find_scales(layers).values()) == {None}
    assert_same(layers, plain[0])


@pytest.mark.long
def test_a_scaler_that_is_made_anew(tmp_path, plain):
    class Anew(Loop):
        def run(self, index, *, overflow=False):
            if index == 4:
                self.scaler = make_scaler(init_scale=2.0**10)
            super().run(index)

    layers, _, _ = record(tmp_path, Anew(make_scaler()))
    scales = find_scales(layers)
    # The step in which it is seen first was begun with the one before.
    assert [scales[step] for step in (0, 3, 4, 5, 7)] == [2.0**16, 2.0**16, *[2.0**10] * 3]
    assert_same(layers, plain[0])


@pytest.mark.long
def test_without_an_optimizer_and_without_parameters(tmp_path, plain):
    loop = Loop(make_scaler())
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        quark.watch(session, loop.model, every_n_steps=1, parameters=False) as watch,
    ):
        for index in range(8):
            watch.step(index)
            loop.run(index)
        watch.close()
        found = watch.hooks.read(summary_type="gradient")
    assert_same({(r.step, r.module_name): r for r in found}, plain[0])


@pytest.mark.long
def test_hooks_by_themselves_find_it_too(tmp_path, plain):
    loop = Loop(make_scaler())
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with quark.HookEngine(session, loop.model, loop.optimizer) as hooks:
            for index in range(4):
                with hooks.step(index):
                    loop.run(index)
        found = {(r.step, r.module_name): r for r in hooks.read(summary_type="gradient")}
    assert_same(found, plain[0], range(4))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model(tmp_path, plain):
    torch._dynamo.reset()
    loop = Loop(make_scaler())
    loop.model = torch.compile(loop.model, backend="aot_eager")
    layers, _, _ = record(tmp_path, loop, steps=3)
    assert find_scales(layers) == dict.fromkeys(range(3), 2.0**16)
    assert_same(layers, plain[0], range(3))
    torch._dynamo.reset()


def test_a_bad_scaler_is_refused(tmp_path):
    loop = Loop()
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        pytest.raises(SchemaValidationError, match="grad_scaler must be a GradScaler"),
    ):
        quark.watch(session, loop.model, loop.optimizer, grad_scaler=5)


@pytest.mark.long
def test_training_is_the_same_to_the_last_bit(tmp_path):
    watched, alone = Loop(make_scaler(growth_interval=3)), Loop(make_scaler(growth_interval=3))
    record(tmp_path, watched, overflows=(2,))
    for index in range(8):
        alone.run(index, overflow=index == 2)
    pairs = zip(watched.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert watched.scaler.state_dict() == alone.scaler.state_dict()
