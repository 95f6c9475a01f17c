"""torch.compile: two graphs, no break, the same numbers; and what comes too late."""

import os

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import quark_torch
from quark import HookScheduleConfig

# The compiler itself uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)

EVERY_OTHER = HookScheduleConfig(every_n_steps=2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """In-place, shared, and tuple-giving modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.squash = nn.Tanh()

    def forward(self, values):
        values = self.act(self.first(values))
        values = self.act(self.second(values))
        return self.squash(self.norm(values))


def summarise(records):
    return {
        (r.module_name, r.summary_type, r.call_index): (
            r.tensor_shape,
            r.element_count,
            pytest.approx(r.mean, abs=1e-6),
            pytest.approx(r.variance, rel=1e-5, abs=1e-6),
            pytest.approx(r.norm, rel=1e-5, abs=1e-6),
            pytest.approx(r.minimum, rel=1e-5, abs=1e-6),
            pytest.approx(r.maximum, rel=1e-5, abs=1e-6),
            r.zero_ratio,
            r.dead_unit_ratio,
            r.saturation_ratio,
            r.nan_count,
            r.inf_count,
        )
        for r in records
    }


def run(hooks, model, batches, steps):
    for step in steps:
        with hooks.step(step):
            for values in batches:
                model(values).square().sum().backward()


def compare_with_eager(engine, backend, device="cpu", **options):
    eager, compiled = Net().to(device), Net().to(device)
    compiled.load_state_dict(eager.state_dict())
    batches = [torch.randn(5, 6, device=device), torch.randn(5, 6, device=device)]
    hooks = engine(eager, schedule=EVERY_OTHER)
    run(hooks, eager, batches, [100])
    expected = summarise(hooks.read(step=100))
    hooks.close()
    model = torch.compile(compiled, backend=backend, **options)
    hooks = engine(model, schedule=EVERY_OTHER)
    assert hooks.instrumented_module_names == ("first", "act", "second", "norm", "squash")
    return hooks, model, batches, expected


@pytest.mark.long
def test_two_graphs_no_break_and_the_numbers_of_eager(engine):
    hooks, model, batches, expected = compare_with_eager(engine, "aot_eager")
    run(hooks, model, batches, range(6))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert {record.step for record in hooks.read(step_max=99)} == {0, 2, 4}
    found = hooks.read(step=4)
    assert len(found) == 2 * 2 * 6
    assert summarise(found) == expected


@pytest.mark.long
def test_with_the_inductor(engine, device):
    """On a GPU the statistics are in the code that Triton makes."""
    hooks, model, batches, expected = compare_with_eager(engine, "inductor", device)
    run(hooks, model, batches, range(6))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert summarise(hooks.read(step=4)) == expected


@pytest.mark.gpu
@pytest.mark.long
def test_with_graphs_that_the_inductor_captures(engine):
    hooks, model, batches, expected = compare_with_eager(
        engine, "inductor", "cuda", mode="reduce-overhead"
    )
    run(hooks, model, batches, range(8))
    assert not counters["graph_break"]
    assert summarise(hooks.read(step=6)) == expected


@pytest.mark.long
def test_gradients_and_outputs_are_unchanged(engine):
    plain, probed = Net(), Net()
    probed.load_state_dict(plain.state_dict())
    values = torch.randn(5, 6)
    compiled = torch.compile(probed, backend="aot_eager")
    hooks = engine(compiled)
    with hooks.step(0):
        output = compiled(values)
        output.square().sum().backward()
    expected = plain(values)
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for one, other in zip(probed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.long
def test_a_model_compiled_in_place_and_a_compiled_part(engine):
    whole, part = Net(), Net()
    whole.compile(backend="eager")
    part.second = torch.compile(part.second, backend="eager")
    for step, model in enumerate((whole, part)):
        hooks = engine(model)
        with hooks.step(step):
            model(torch.randn(5, 6)).sum().backward()
        assert len(hooks.read(step=step)) == 12
        assert "second" in hooks.instrumented_module_names
        hooks.close()


@pytest.mark.long
def test_compiled_after_the_engine_was_made(engine):
    model = Net()
    hooks = engine(model, compiled=True, schedule=EVERY_OTHER)
    run(hooks, torch.compile(model, backend="eager"), [torch.randn(5, 6)], range(4))
    assert counters["stats"]["unique_graphs"] == 2
    assert len(hooks.read()) == 2 * 12


@pytest.mark.long
def test_hooks_that_come_too_late_are_told_once_and_loudly(engine, events, caplog):
    model = torch.compile(Net(), backend="eager")
    model(torch.randn(5, 6)).sum().backward()
    hooks = engine(model)
    run(hooks, model, [torch.randn(5, 6)], range(3))
    assert hooks.read() == ()
    (event,) = events("compiled_without_hooks")
    assert event.severity == "warning"
    assert sum("hooks were added" in record.message for record in caplog.records) == 1
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.long
@pytest.mark.parametrize("first", ["teacher", "student"])
def test_code_of_another_model_of_the_class_is_not_taken(engine, events, first):
    """Such as a teacher, an average of weights, or the same model in an earlier run."""
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    student, teacher = (torch.compile(Net(), backend="aot_eager") for _ in range(2))
    values = torch.randn(5, 6)
    for _ in range(2):
        hooks = engine(student)
        for step in range(3):
            with hooks.step(step):
                if first == "teacher":
                    teacher(values)
                student(values).sum().backward()
                if first == "student":
                    teacher(values)
        found = hooks.read()
        assert {record.step for record in found} == {0, 1, 2}
        assert {record.module_name for record in found} == set(hooks.instrumented_module_names)
        hooks.close()
        assert torch._dynamo.config.skip_nnmodule_hook_guards is before
    assert len(found) == 2 * 3 * 2 * 6
    assert not events("compiled_without_hooks")


@pytest.mark.long
def test_eager_hooks_stay_out_of_compiled_code(engine, events):
    """Compiled after the engine was made, without a word of it."""
    model = Net()
    hooks = engine(model, schedule=EVERY_OTHER)
    run(hooks, torch.compile(model, backend="eager"), [torch.randn(5, 6)], range(4))
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    (event,) = events("probe_empty")
    assert "compiled=True" in event.payload["message"]


@pytest.mark.long
def test_calls_without_gradients(engine):
    model = torch.compile(Net(), backend="eager")
    hooks = engine(model, include_eval=True)
    with hooks.step(0), torch.no_grad():
        model(torch.randn(5, 6))
    assert {record.summary_type for record in hooks.read()} == {"activation"}
    assert len(hooks.read()) == 6


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_evaluation_of_compiled_code_is_left_out(engine, backend):
    net = Net()
    model = torch.compile(net, backend=backend)
    hooks = engine(model)
    for step in range(3):
        with hooks.step(step):
            model(torch.randn(5, 6)).sum().backward()
            net.eval()
            model(torch.randn(5, 6))
            net.train()
            with torch.no_grad():
                model(torch.randn(5, 6))
        assert len(hooks.read(step=step)) == 12
        assert {r.call_index for r in hooks.read(step=step, module_name="first")} == {0}


@pytest.mark.long
def test_backward_after_the_step_is_not_sold_as_the_next_one(engine, events):
    model = torch.compile(Net(), backend="eager")
    hooks = engine(model)
    for step in range(3):
        with hooks.step(step):
            loss = model(torch.randn(5, 6)).sum()
        loss.backward()
    assert {record.summary_type for record in hooks.read()} == {"activation"}
    (event,) = events("backward_outside_step")
    assert event.step == 0
    assert event.payload["gradient_count"] == 6


@pytest.mark.long
def test_calls_beyond_the_rows_of_a_compiled_module_are_told(engine, events):
    model = torch.compile(Net(), backend="eager")
    hooks = engine(model)
    with hooks.step(0):
        for _ in range(20):
            model(torch.randn(5, 6)).sum().backward()
    assert {record.call_index for record in hooks.read()} == set(range(16))
    (event,) = events("calls_left_out")
    assert event.payload["call_count"] == 4


@pytest.mark.long
def test_other_batch_sizes(engine):
    model = torch.compile(Net(), backend="eager", dynamic=True)
    hooks = engine(model)
    for step, size in enumerate((5, 7, 9)):
        with hooks.step(step):
            model(torch.randn(size, 6)).sum().backward()
        shapes = {record.tensor_shape for record in hooks.read(step=step)}
        assert shapes == {(size, 6)}


@pytest.mark.long
def test_what_is_not_finite_and_what_is_scaled(engine):
    inner = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        inner[0].weight.copy_(torch.eye(2))
        inner[0].bias.zero_()
    model = torch.compile(inner, backend="eager")
    hooks = engine(model, grad_scaler=lambda: 8.0, include_eval=True)
    values = torch.tensor([[torch.nan, 1.0], [3.0, torch.inf]])
    with hooks.step(0):
        (model(torch.ones(2, 2)).sum() * 8.0).backward()
        with torch.no_grad():
            model(values)
    one, gradient = hooks.read(step=0)[:2]
    assert (one.mean, one.std) == (1.0, 0.0)
    assert (gradient.mean, gradient.metadata["grad_scale"]) == (1.0, 8.0)
    odd = next(record for record in hooks.read() if record.call_index == 1)
    assert odd.nan_count + odd.inf_count >= 2


@pytest.mark.long
def test_many_calls_fill_the_rows_that_there_are(engine):
    model = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    hooks = engine(model, capture_backward=False)
    with hooks.step(0):
        for _ in range(40):
            model(torch.ones(2, 2))
    assert [record.call_index for record in hooks.read()] == list(range(16))


@pytest.mark.long
def test_tuples_of_compiled_modules(engine, expect):
    class Two(nn.Module):
        def forward(self, values):
            return None, values * 2

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.two = nn.Linear(3, 3), Two()

        def forward(self, values):
            return self.two(self.linear(values))[1]

    model = torch.compile(Around(), backend="eager")
    hooks = engine(model, filters={"include_types": ("Two",)})
    with hooks.step(0):
        output = model(torch.randn(4, 3))
        output.square().sum().backward()
    activation, gradient = hooks.read()
    expect(activation, output)
    expect(gradient, output.detach() * 2)


@pytest.mark.long
def test_exported_programs_have_no_hooks(engine):
    package = os.path.dirname(quark_torch.__file__) + os.sep
    model = Net()
    hooks = engine(model)
    with hooks.step(0):
        for strict in (False, True):
            program = torch.export.export(model, (torch.randn(5, 6),), strict=strict)
            assert not any(package in str(node.meta) for node in program.graph.nodes)
            assert len(list(program.graph.nodes)) < 30
    assert hooks.read() == ()


@pytest.mark.long
def test_transforms_and_traces_are_left_alone(engine):
    model = nn.Sequential(nn.Linear(3, 3))
    hooks = engine(model)
    values = torch.randn(4, 3)
    parameters = dict(model.named_parameters())

    def loss(parameters, value):
        return torch.func.functional_call(model, parameters, (value,)).sum()

    with hooks.step(0):
        mapped = torch.vmap(model)(values)
        grads = torch.func.grad(loss)(parameters, values)
        fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            model(values)
    torch.testing.assert_close(mapped, model(values))
    assert set(grads) == set(parameters)
    assert hooks.read() == ()
    with hooks.step(1):
        traced = torch.jit.trace(model, values)
    assert "quark" not in str(traced.graph)


class Checkpointed(nn.Module):
    """A part is called twice in one checkpoint, and once in another."""

    def __init__(self, *, is_checkpointed=True):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.part = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.is_checkpointed = is_checkpointed

    def twice(self, values):
        return self.part(self.part(values))

    def forward(self, values):
        values = self.first(values)
        for run in (self.twice, self.part):
            if self.is_checkpointed:
                values = checkpoint(run, values, use_reentrant=False)
            else:
                values = run(values)
        return self.last(values)


def train_twice(hooks, model, batches, step):
    """Two micro-batches in a step, and the gradients that come of them."""
    model.zero_grad()
    with hooks.step(step):
        for values in batches:
            model(values).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


BACKENDS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_in_compiled_code(engine, backend):
    plain, inner = Checkpointed(is_checkpointed=False), Checkpointed()
    inner.load_state_dict(plain.state_dict())
    batches = [torch.randn(3, 4), 3 * torch.randn(3, 4)]
    expected_gradients = train_twice(engine(plain), plain, batches, 100)
    model = torch.compile(inner, backend=backend)
    hooks = engine(model, schedule=EVERY_OTHER)
    expected = summarise(hooks.read(step=100))
    for step in range(4):
        gradients = train_twice(hooks, model, batches, step)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[f"_orig_mod.{name}"], gradient)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    found = hooks.read(step=2)
    assert len(found) == 2 * 2 * (1 + 3 + 3 + 1)
    assert summarise(found) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_compiled_code_in_checkpoints(engine, events, caplog, is_reentrant):
    """What runs twice is recorded once; gradients, of which it cannot be told, not at all."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, values):
            values = self.first(values)
            for _ in range(2):
                values = checkpoint(self.part, values, use_reentrant=is_reentrant)
            return self.last(values)

    plain, model = Around(), Around()
    model.load_state_dict(plain.state_dict())
    batches = [torch.randn(3, 4), 3 * torch.randn(3, 4)]
    expected_gradients = train_twice(engine(plain), plain, batches, 100)
    model.part.compile(backend="aot_eager")
    hooks = engine(model)
    expected = summarise(hooks.read(step=100))
    for step in range(2):
        gradients = train_twice(hooks, model, batches, step)
        torch.testing.assert_close(gradients, expected_gradients)
    found = summarise(hooks.read(step=1))
    left = {key for key in expected if key[:2] == ("part", "gradient")}
    assert len(left) == 4
    assert found == {key: value for key, value in expected.items() if key not in left}
    (event,) = events("compiled_in_checkpoint")
    assert event.severity == "warning"
    assert sum("activation checkpoint" in record.message for record in caplog.records) == 1
