"""Compiled hooks give the records that Python's give, and are as careful with what they hold."""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quark
from quark_torch.kernels.compiled_probing import find_hooks
from quark_torch.kernels.loader import find_kernel
from quark_torch.layers import eager_hooks
from quark_torch.layers.recording import InertHook, make_hook_types
from quark_torch.measuring.tensor_reading import pack_limits
from quark_torch.measuring.tensor_statistics import Wanted

pytestmark = pytest.mark.skipif(find_hooks() is None, reason="the hooks are not compiled here")

_OF_THE_RUN = {"run_id", "writer_id", "sequence", "time_us"}


def make_mlp():
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Sliced(nn.Module):
    def forward(self, x):
        return x[..., ::2]


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inside = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inside, self.first(x), use_reentrant=self.use_reentrant)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.again = self.layer
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.again(torch.relu(self.layer(self.layer(x))))


class GivesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 6))

    def forward(self, _x):
        return self.table


class Odd(nn.Module):
    """Parameters, scalars, lists, integers, float64, and what is empty or full of NaN."""

    def __init__(self):
        super().__init__()
        self.table = GivesParameter()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.wide = nn.Linear(6, 2, dtype=torch.float64)
        self.identity = nn.Identity()

    def forward(self, x):
        table = self.table(x)
        sequence, _ = self.lstm(table[None])
        self.identity(torch.arange(3))
        self.identity(torch.zeros(0, 4))
        self.identity([x, x * 2])
        self.identity(torch.full((3, 2), float("nan")))
        self.identity(x.expand(2, *x.shape))
        self.identity(torch.zeros(3, 2, dtype=torch.complex64).imag)
        self.identity(torch.tensor([1e30, float("inf"), -1e-30]))
        total = self.identity(self.wide(table.double()).sum()).float()
        return total + sequence.sum()


def make_transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


SCENES = {
    "mlp": (make_mlp, (5, 6)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Residual(), Residual()), (2, 3, 8, 8)),
    "channels_last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Residual()).to(memory_format=torch.channels_last),
        (2, 3, 8, 8),
    ),
    "transformer": (make_transformer, (2, 5, 8)),
    "lstm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 3)), (7, 2, 6)),
    "shared": (Shared, (4, 6)),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), (4, 6)),
    "checkpoint_reentrant": (lambda: Checkpointed(use_reentrant=True), (4, 6)),
    "forms": (lambda: nn.Sequential(nn.Linear(6, 4), Transposed(), Sliced()), (3, 5, 6)),
    "bfloat16": (lambda: make_mlp().bfloat16(), (5, 6)),
    "float16": (lambda: make_mlp().half(), (5, 6)),
    "float64": (lambda: make_mlp().double(), (5, 6)),
    "odd": (Odd, (3, 6)),
}


def train(model, inputs, times=1):
    for _ in range(times):
        found = model(inputs)
        found = found[0] if isinstance(found, tuple) else found
        found.float().pow(2).sum().backward()


def record(folder, compiled, scene, work=train, **config):
    """The records of one probed step, without what differs from run to run."""
    make, shape = SCENES[scene]
    torch.manual_seed(3)
    model = make()
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(shape).to(dtype).requires_grad_(scene == "checkpoint_reentrant")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not compiled:
            patch.setattr(eager_hooks, "find_hooks", lambda: None)
        session = stack.enter_context(
            quark.start_run(project="p", storage_dir=folder / str(compiled))
        )
        hooks = stack.enter_context(
            quark.HookEngine(session, model, config=quark.HookEngineConfig(**config))
        )
        with hooks.step(4, epoch=2):
            tape = hooks._probed.tape
            work(model, inputs)
        assert isinstance(tape, find_hooks().Tape) is compiled
        records = hooks.read()
        assert not quark.EventLogger(session).read(event_type="instrumentation_failed")
    return tape, [
        {k: v for k, v in msgspec.structs.asdict(each).items() if k not in _OF_THE_RUN}
        for each in records
    ]


def as_text(records):
    """Records to compare, NaN included."""
    return [repr(each) for each in records]


def compare(folder, scene, work=train, **config):
    tape, ours = record(folder, True, scene, work, **config)
    _, theirs = record(folder, False, scene, work, **config)
    assert theirs
    assert as_text(ours) == as_text(theirs)
    return tape, ours


@pytest.mark.sampled
@pytest.mark.parametrize("scene", SCENES)
def test_records_are_those_of_python(tmp_path, scene):
    tape, _ = compare(tmp_path, scene, saturation_threshold=0.9)
    if scene != "float64":
        tape.read(0)  # which raises where compiled code has taken nothing


@pytest.mark.sampled
@pytest.mark.parametrize("scene", ["mlp", "conv", "channels_last", "transformer", "float16"])
def test_what_differs_between_samples_is_known_of_activations(tmp_path, scene):
    _, records = compare(tmp_path, scene)
    for each in records:
        ratio = each["sample_variation_ratio"]
        if each["summary_type"] == "gradient":
            assert ratio is None
        else:
            assert 0 < ratio <= 1


@pytest.mark.sampled
@pytest.mark.parametrize("scene", ["mlp", "conv", "checkpoint", "checkpoint_reentrant"])
def test_accumulation_is_counted_alike(tmp_path, scene):
    _, records = compare(tmp_path, scene, lambda model, inputs: train(model, inputs, times=3))
    assert {(each["metadata"] or {}).get("micro_batch", 0) for each in records} == {0, 1, 2}


@pytest.mark.long
def test_a_second_backward_pass_is_counted_alike(tmp_path):
    def work(model, inputs):
        loss = model(inputs).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    _, records = compare(tmp_path, "mlp", work)
    assert sum((each["metadata"] or {}).get("backward_index", 0) for each in records) == 5


@pytest.mark.sampled
@pytest.mark.parametrize(
    "config",
    [{"capture_forward": False}, {"capture_backward": False}, {"capture_all_outputs": True}],
)
def test_what_is_captured_is_alike(tmp_path, config):
    compare(tmp_path, "lstm", **config)
    compare(tmp_path / "2", "mlp", **config)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(tmp_path, mode):
    def work(model, inputs):
        with mode():
            model(inputs)

    compare(tmp_path, "mlp", work, include_eval=True)
    config = {"capture_backward": False, "include_eval": True}
    tape, _ = compare(tmp_path / "2", "mlp", work, **config)
    tape.read(4)


@pytest.mark.long
def test_autocast_and_hooks_of_the_user(tmp_path):
    def work(model, inputs):
        seen = []
        model[0].register_forward_hook(lambda *given: seen.append(given[2].shape))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(inputs)
        found.register_hook(lambda gradient: gradient * 2)
        found.float().sum().backward()
        assert seen == [(5, 16)]

    compare(tmp_path, "mlp", work)


@pytest.mark.long
def test_transforms_tracing_and_modes_take_nothing_wrong(tmp_path):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def work(model, inputs):
        torch.func.vmap(model)(inputs)
        torch.func.grad(lambda x: model(x).sum())(inputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)
            torch.jit.trace(model, inputs)
        with Mode():
            train(model, inputs)

    compare(tmp_path, "mlp", work)


@pytest.mark.long
def test_compiling_in_a_probed_step_sees_no_hooks(tmp_path):
    def work(model, inputs):
        torch._dynamo.reset()
        torch.compile(model, backend="eager", fullgraph=True)(inputs).sum().backward()
        train(model, inputs)

    compare(tmp_path, "mlp", work)


@pytest.mark.long
def test_an_exception_of_the_user_passes(tmp_path):
    class Broken(nn.Module):
        def forward(self, _x):
            raise ZeroDivisionError("planted")

    def work(model, inputs):
        with pytest.raises(ZeroDivisionError, match="planted"):
            nn.Sequential(model, Broken())(inputs)
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.zeros(3, 7))

    compare(tmp_path, "mlp", work)


def test_a_failure_of_ours_switches_the_module_off(session, events, monkeypatch):
    model = make_mlp()
    hooks = quark.HookEngine(session, model)
    monkeypatch.setattr(hooks._sites[0], "calls", None, raising=False)
    monkeypatch.setattr(eager_hooks, "count", lambda: iter(()))
    with hooks.step(0):
        train(model, torch.randn(5, 6))
    [event, *_] = events("instrumentation_failed")
    assert "cannot be counted" in event.payload["reason"]
    assert all(site.failed for site in hooks._sites)
    with hooks.step(1):
        train(model, torch.randn(5, 6))


@pytest.mark.long
def test_replicas_and_threads(session):
    model = make_mlp()
    hooks = quark.HookEngine(session, model)
    inputs = torch.randn(5, 6)
    with hooks.step(0):
        threads = [threading.Thread(target=train, args=(model, inputs, 20)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = hooks.read(module_name="0", hook_direction="forward")
    assert sorted(each.call_index for each in records) == list(range(80))
    assert len({(each.mean, each.norm) for each in records}) == 1


def test_copies_are_inert_and_leave_the_original_alone(session):
    model = make_mlp()
    hooks = quark.HookEngine(session, model)
    inputs = torch.randn(5, 6)
    with hooks.step(0):
        found = model(inputs)
        [hook] = found._backward_hooks.values()
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (copied, pickled):
            assert [type(each) for each in other[0]._forward_hooks.values()] == [InertHook]
            train(other, inputs)
        assert type(copy.copy(hook)) is InertHook
        assert type(copy.deepcopy(hook)) is InertHook
        assert type(pickle.loads(pickle.dumps(hook))) is InertHook
    assert len(hooks.read()) == 5
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_put_back_where_they_were(session):
    model = make_mlp()
    order = []
    model[0].register_forward_hook(lambda *_: order.append("first"))
    hooks = quark.HookEngine(session, model)
    for step in range(3):
        with hooks.step(step):
            assert len(model[0]._forward_hooks) == 2 + step
            train(model, torch.randn(5, 6))
        assert len(model[0]._forward_hooks) == 1 + step
        handle = model[0].register_forward_hook(lambda *_: order.append("later"))
        assert handle.id in model[0]._forward_hooks
    assert len(hooks.read()) == 30
    assert order.count("first") == 3


def test_nothing_keeps_a_tensor(session):
    model = make_mlp()
    hooks = quark.HookEngine(session, model)
    with hooks.step(0):
        found = model(torch.randn(5, 6))
        tensor = weakref.ref(found)
        found.sum().backward()
        assert sys.getrefcount(found) == 2
        del found
        assert tensor() is None
    assert len(hooks.read()) == 10


def count_ours():
    gc.collect()
    kinds = (*make_hook_types(find_hooks()), find_hooks().Tape, eager_hooks.ProbedStep)
    return sum(type(each) in kinds for each in gc.get_objects())


@pytest.mark.long
def test_nothing_is_left_over(session):
    model = make_mlp()
    hooks = quark.HookEngine(session, model)
    inputs = torch.randn(5, 6)
    site, module_reference = hooks._sites[0], hooks._sites[0].module

    def work(step):
        with hooks.step(step):
            train(model, inputs)
            model(inputs)  # whose gradient hooks are never called
        hooks.settle()

    for step in range(3):
        work(step)
    counts = count_ours()
    before = [sys.getrefcount(each) for each in (site, module_reference, inputs)]
    blocks = sys.getallocatedblocks()
    for step in range(3, 203):
        work(step)
        hooks._recent.clear()
    session.flush()
    assert count_ours() == counts
    after = [sys.getrefcount(each) for each in (site, module_reference, inputs)]
    assert all(abs(new - old) < 20 for new, old in zip(after, before, strict=True))
    assert sys.getallocatedblocks() - blocks < 20_000


def test_tensors_that_outlive_the_step(session):
    model = make_mlp()
    hooks = quark.HookEngine(session, model)
    hooks.begin_step(0)
    tensor = model(torch.randn(5, 6))
    hooks.close()
    tensor.sum().backward()  # its hooks are still there, and take nothing
    assert len(hooks.read()) == 5


def test_a_tape_refuses_what_it_cannot_use():
    compiled, kernel = find_hooks(), find_kernel()
    limits = pack_limits(Wanted())
    types = make_hook_types(compiled)
    good = ([], print, *types, kernel.address, kernel.level, True, True, limits, None, 100)
    tape = compiled.Tape(*good)
    for place, wrong in [(0, ()), (2, int), (3, int), (4, "x"), (8, b"short"), (9, 3)]:
        bad = list(good)
        bad[place] = wrong
        with pytest.raises((TypeError, ValueError)):
            compiled.Tape(*bad)
    with pytest.raises(IndexError):
        tape.read(0)
    with pytest.raises(TypeError):
        tape.make_call(1, 2)
    with pytest.raises(TypeError):
        tape.make_call(tape, tape, 3, iter(()), 0, limits)
    tape.close()
    assert not tape.is_open
    empty = compiled.Gradient()
    assert empty.take(torch.ones(2)) is True
    with pytest.raises(AttributeError):
        _ = empty.site
    assert compiled.Call().take(None, torch.ones(2)) is True


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
def test_what_is_seen_of_tensors():
    look = find_hooks().look
    tensor = torch.randn(3, 4)
    assert look(tensor) == (tensor.data_ptr(), 12, 0, (3, 4))
    assert look(tensor.t()) == (tensor.data_ptr(), 12, 0, (4, 3))
    assert look(tensor[1:, :]) == (tensor.data_ptr() + 16, 8, 0, (2, 4))
    assert look(nn.Parameter(tensor)) == (tensor.data_ptr(), 12, 0, (3, 4))
    assert look(torch.tensor(2.0).bfloat16())[1:] == (1, 2, ())
    assert look(tensor.half())[1:3] == (12, 3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for other in (
        tensor[:, ::2],
        tensor.expand(2, 3, 4),
        tensor.double(),
        tensor.int(),
        tensor.to(torch.complex64),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        tensor.to_sparse(),
        tensor.to("meta"),
        torch.ones([1] * 9),
        torch.zeros(0),
        nested,
        freed,
        torch._efficientzerotensor(3),
        torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        3,
        None,
        "tensor",
    ):
        assert look(other) is None
