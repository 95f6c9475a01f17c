"""Gradients: frozen layers, checkpointing, accumulation, scalers, several passes."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quark import HookEngineConfig
from quark_core.errors import SchemaValidationError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values):
        # The same module twice in one segment: its calls are repeated in their order.
        return self.linear(torch.tanh(self.linear(values)))


class Checkpointed(nn.Module):
    """Three segments, of which two share a module."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.how = how

    def run(self, block, values):
        if self.how is None:
            return block(values)
        return checkpoint(block, values, use_reentrant=self.how)

    def forward(self, values):
        for block in (self.first, self.second, self.first):
            values = self.run(block, values)
        return values


def summarise(records):
    return {
        (r.module_name, r.summary_type, r.call_index): (
            pytest.approx(r.mean, abs=1e-6),
            pytest.approx(r.norm, rel=1e-5),
            r.metadata,
        )
        for r in records
    }


@pytest.mark.parametrize("how", [True, False])
def test_checkpointing_counts_once(engine, how):
    plain, checkpointed = Checkpointed(None), Checkpointed(how)
    checkpointed.load_state_dict(plain.state_dict())
    values = torch.randn(3, 4)
    found = []
    for step, model in enumerate((plain, checkpointed)):
        hooks = engine(model)
        with hooks.step(step):
            for _ in range(2):
                model(values.clone().requires_grad_()).square().sum().backward()
        found.append(hooks.read(step=step))
        hooks.close()
    direct, again = found
    assert len(direct) == len(again) == 2 * 2 * (4 + 2)
    assert summarise(again) == summarise(direct)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_one_checkpoint_within_another(engine):
    class Nested(Checkpointed):
        def forward(self, values):
            inner = super().forward
            return (
                inner(values) if self.how is None else checkpoint(inner, values, use_reentrant=True)
            )

    plain, nested = Nested(None), Nested(True)
    nested.load_state_dict(plain.state_dict())
    values = torch.randn(3, 4)
    found = []
    for step, model in enumerate((plain, nested)):
        hooks = engine(model)
        with hooks.step(step):
            model(values.clone().requires_grad_()).square().sum().backward()
        found.append(summarise(hooks.read(step=step)))
    assert found[0] == found[1]


def test_gradient_accumulation_counts_micro_batches(engine, expect):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model)
    outputs = []
    with hooks.step(0):
        for _ in range(3):
            outputs.append(model(torch.randn(2, 4)))
            (outputs[-1].square().sum() / 3).backward()
    activations = hooks.read(summary_type="activation")
    gradients = hooks.read(summary_type="gradient")
    for index in range(3):
        metadata = {"micro_batch": index} if index else None
        expect(activations[index], outputs[index], call_index=index, metadata=metadata)
        # Of this micro-batch alone, where the parameters' own gradients are running sums.
        expect(gradients[index], outputs[index] * 2 / 3, call_index=index, metadata=metadata)


def test_a_second_call_before_backward_is_no_micro_batch(engine):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model)
    with hooks.step(0):
        (model(torch.randn(2, 4)) * model(torch.randn(2, 4))).sum().backward()
    records = hooks.read()
    assert [r.metadata for r in records] == [None] * 4
    assert sorted((r.summary_type, r.call_index) for r in records) == [
        ("activation", 0),
        ("activation", 1),
        ("gradient", 0),
        ("gradient", 1),
    ]


class Scaler:
    def get_scale(self):
        return 1024.0


@pytest.mark.parametrize("scaler", [Scaler(), lambda: 1024.0])
def test_a_scale_is_divided_out(engine, expect, scaler):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model, grad_scaler=scaler)
    with hooks.step(0):
        output = model(torch.randn(2, 4))
        (output.square().sum() * 1024.0).backward()
    activation, gradient = hooks.read()
    expect(activation, output, metadata=None)
    expect(gradient, output.detach() * 2, metadata={"grad_scale": 1024.0})


@pytest.mark.long
def test_the_scaler_of_torch(engine, expect):
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = engine(model, optimizer, grad_scaler=scaler)
    for step in range(2):
        with hooks.step(step):
            output = model(torch.randn(2, 4))
            scaler.scale(output.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        (gradient,) = hooks.read(step=step, summary_type="gradient")
        expect(gradient, output.detach() * 2, metadata={"grad_scale": 4096.0})


def test_a_scaler_that_fails_is_told_once(engine, events):
    def scale():
        raise RuntimeError("no scale")

    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model, grad_scaler=scale, raise_on_error=False)
    for step in range(3):
        with hooks.step(step):
            model(torch.ones(2, 4)).sum().backward()
    assert len(hooks.read()) == 6
    assert len(events("instrumentation_failed")) == 1
    with pytest.raises(SchemaValidationError, match="grad_scaler"):
        HookEngineConfig(grad_scaler=5)


def test_frozen_layers_have_no_gradient_instead_of_zero(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.randn(3, 4)).sum().backward()
    assert {r.module_name for r in hooks.read(summary_type="gradient")} == {"2"}
    assert len(hooks.read(summary_type="activation")) == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_activations_only(engine, mode):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model, include_eval=True)
    with hooks.step(0), mode():
        model(torch.randn(3, 4))
    with mode(), hooks.step(1):
        model(torch.randn(3, 4))
    with hooks.step(2):
        model(torch.randn(3, 4)).sum().backward()
    assert [r.summary_type for r in hooks.read()] == ["activation"] * 3 + ["gradient"]


def test_two_passes_through_one_graph_are_told_apart(engine, expect):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model)
    with hooks.step(0):
        output = model(torch.randn(3, 4))
        output.sum().backward(retain_graph=True)
        (output * 3).sum().backward()
    _, first, second = hooks.read()
    expect(first, torch.ones(3, 4), metadata=None)
    expect(second, torch.full((3, 4), 3.0), metadata={"backward_index": 1})


def test_gradients_of_gradients(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hooks = engine(model)
    values = torch.randn(3, 4, requires_grad=True)
    with hooks.step(0):
        (slope,) = torch.autograd.grad(model(values).sum(), values, create_graph=True)
        slope.square().sum().backward()
    assert model[0].weight.grad is not None
    assert len(hooks.read(summary_type="gradient")) >= 2


def test_a_gradient_after_the_step_is_not_recorded(engine):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model)
    with hooks.step(0):
        output = model(torch.randn(3, 4))
    output.sum().backward()
    assert [r.summary_type for r in hooks.read()] == ["activation"]


def test_a_parameter_as_output_keeps_no_hook(engine):
    class Prompt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Parameter(torch.randn(3, 4))

        def forward(self):
            return self.tokens

    model = Prompt()
    hooks = engine(model)
    with hooks.step(0):
        model().sum().backward()
    assert len(hooks.read()) == 2
    assert not model.tokens._backward_hooks


def test_a_closure_runs_the_model_many_times(engine):
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    hooks = engine(model, optimizer)
    values = torch.randn(8, 4)
    runs = 0

    def closure():
        nonlocal runs
        runs += 1
        optimizer.zero_grad()
        loss = (model(values) - values.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    with hooks.step(0):
        optimizer.step(closure)
    assert runs > 2
    for summary_type in ("activation", "gradient"):
        records = hooks.read(summary_type=summary_type)
        assert [r.call_index for r in records] == list(range(runs))


def test_either_direction_alone(engine):
    model = nn.Sequential(nn.Linear(4, 4))
    for step, (forward, backward, expected) in enumerate(
        [(True, False, ["activation"]), (False, True, ["gradient"]), (False, False, [])]
    ):
        hooks = engine(model, capture_forward=forward, capture_backward=backward)
        with hooks.step(step):
            model(torch.randn(3, 4)).sum().backward()
        assert [r.summary_type for r in hooks.read(step=step)] == expected
        hooks.close()


def test_autocast(engine, expect):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model)
    with hooks.step(0), torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(3, 4))
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
    activation, gradient = hooks.read()
    expect(activation, output)
    expect(gradient, (output.detach().float() * 2).bfloat16())
