"""Outputs that are no tensor, modules that are called oddly."""

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import quark
from quark import HookEngine
from quark_torch.layers.eager_hooks import find_tensors

Pair = collections.namedtuple("Pair", "indexes values")


@dataclasses.dataclass
class Plain:
    label: str
    logits: torch.Tensor


class ModelOutput(collections.OrderedDict):
    """Like the outputs of transformers: a mapping that is no plain dict."""


class Wrapping(nn.Module):
    """Gives the output of a linear layer in some container."""

    def __init__(self, wrap):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, values):
        return self.wrap(self.linear(values))


def unwrap(output, path):
    for part in path.split("."):
        if isinstance(output, dict):
            output = output[part]
        elif isinstance(output, (tuple, list)) and part.isdigit():
            output = output[int(part)]
        else:
            output = getattr(output, part)
    return output


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda out: (out, out * 2), "0"),
        (lambda out: [torch.arange(3), out], "1"),
        (lambda out: {"state": None, "logits": out}, "logits"),
        (lambda out: Plain("x", out), "logits"),
        (lambda out: Pair(torch.arange(3), out), "1"),
        (lambda out: ModelOutput(loss=out.sum(), logits=out), "loss"),
        (lambda out: ({"deep": [torch.arange(3), (out,)]},), "0.deep.1.0"),
    ],
)
def test_the_first_float_tensor_is_found_with_its_gradient(engine, expect, wrap, path):
    model = Wrapping(wrap)
    hooks = engine(model, filters={"include_types": ("Wrapping",), "leaf_modules_only": False})
    with hooks.step(0):
        output = unwrap(model(torch.randn(3, 4)), path)
        output.square().sum().backward()
    activation, gradient = hooks.read()
    expect(activation, output, metadata={"output_path": path})
    expect(gradient, output.detach() * 2, metadata={"output_path": path})
    assert gradient.call_index == activation.call_index == 0


def test_every_output_on_request(engine, expect):
    model = Wrapping(lambda out: (out, {"twice": out * 2, "of": torch.arange(3)}))
    hooks = engine(
        model,
        filters={"include_types": ("Wrapping",), "leaf_modules_only": False},
        capture_all_outputs=True,
    )
    with hooks.step(0):
        first, others = model(torch.randn(3, 4))
        (first.sum() + others["twice"].square().sum()).backward()
    records = hooks.read(summary_type="activation")
    assert [record.metadata["output_path"] for record in records] == ["0", "1.twice", "1.of"]
    expect(records[1], first.detach() * 2)
    gradients = {
        record.metadata["output_path"]: record for record in hooks.read(summary_type="gradient")
    }
    expect(gradients["1.twice"], first.detach() * 4)
    assert set(gradients) == {"0", "1.twice"}


def test_containers_are_searched_with_bounds():
    holds_itself: list = []
    holds_itself.append(holds_itself)
    assert find_tensors(holds_itself, every=True) == []
    assert find_tensors("text", every=True) == []
    assert find_tensors({"a": object(), "b": None}, every=False) == []
    many = [torch.ones(1) for _ in range(1000)]
    assert len(find_tensors(many, every=True)) == 64
    ((path, tensor),) = find_tensors([torch.arange(2), "x"], every=False)
    assert (path, tensor.tolist()) == ("0", [0, 1])
    deep = torch.ones(1)
    for _ in range(50):
        deep = [deep]
    assert find_tensors(deep, every=True) == []


@pytest.mark.sampled
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_give_their_sequence(engine, expect, packed):
    model = nn.LSTM(4, 5, batch_first=True)
    hooks = engine(model)
    values = torch.randn(3, 6, 4)
    if packed:
        values = pack_padded_sequence(values, torch.tensor([6, 4, 2]), batch_first=True)
    with hooks.step(0):
        output, _ = model(values)
        output = output.data if packed else output
        output.square().sum().backward()
    activation, gradient = hooks.read()
    path = "0.data" if packed else "0"
    expect(activation, output, module_name="(model)", metadata={"output_path": path})
    expect(gradient, output.detach() * 2, metadata={"output_path": path})


@pytest.mark.long
def test_attention_never_calls_its_projection(engine, events):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.randn(2, 5, 8)).sum().backward()
    names = {record.module_name for record in hooks.read()}
    assert {"linear1", "self_attn"} < names
    assert "self_attn.out_proj" not in hooks.instrumented_module_names
    hooks.close()
    assert not events("modules_never_called")


@pytest.mark.long
def test_attention_is_a_leaf(engine, expect):
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0))
    hooks = engine(model)
    outputs = []
    attention = model[1].self_attn
    attention.register_forward_hook(lambda m, a, out: outputs.append(out[0].clone()))
    with hooks.step(0):
        model(torch.randn(5, 2, 8)).sum().backward()
    activation, gradient = hooks.read(module_name="1.self_attn")
    expect(activation, outputs[0], module_type="MultiheadAttention")
    assert gradient.summary_type == "gradient"


def test_attention_that_calls_its_own_projection_is_no_leaf(engine):
    class Calling(nn.MultiheadAttention):
        def forward(self, query):
            return self.out_proj(query)

    hooks = engine(nn.Sequential(Calling(8, 2)))
    assert hooks.instrumented_module_names == ("0.out_proj",)


def test_attention_as_a_whole(engine, expect):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    hooks = engine(model, filters={"include_names": ("self_attn",), "leaf_modules_only": False})
    outputs = []
    model.self_attn.register_forward_hook(lambda m, a, out: outputs.append(out[0].clone()))
    with hooks.step(0):
        model(torch.randn(2, 5, 8)).sum().backward()
    activation, gradient = hooks.read()
    expect(activation, outputs[0], module_type="MultiheadAttention")
    assert gradient.metadata == {"output_path": "0"}


class Opaque(torch.Tensor):
    """Has a shape, and elements that nobody can have."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of an Opaque")


class GivesOpaque(nn.Module):
    def forward(self, values):
        return Opaque()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_outputs_that_cannot_be_read_are_told_once(engine, events, monkeypatch, is_compiled):
    if not is_compiled:
        monkeypatch.setattr("quark_torch.layers.eager_hooks.find_hooks", lambda: None)
    model = nn.ModuleList([nn.Linear(4, 4), GivesOpaque(), GivesOpaque()])
    hooks = engine(model, raise_on_error=False)
    for step in range(3):
        with hooks.step(step):
            for module in model:
                module(torch.randn(3, 4))
    assert {record.module_name for record in hooks.read()} == {"0"}
    (event,) = events("outputs_unread")
    assert (event.severity, event.step) == ("warning", 0)
    assert event.payload["modules"] == ["1", "2"]
    assert "Opaque" in event.payload["reason"]


def test_outputs_that_cannot_be_read_raise_in_strict_mode(strict_session):
    model = nn.ModuleList([GivesOpaque()])
    with HookEngine(strict_session, model) as hooks:
        with pytest.raises(NotImplementedError, match="of an Opaque"), hooks.step(0):
            model[0](torch.randn(3, 4))
        (event,) = quark.EventLogger(strict_session).read(event_type="instrumentation_failed")
    assert event.payload["modules"] == ["0"]


def test_outputs_without_elements_are_told_and_raise_nowhere(engine, events):
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    hooks = engine(model)
    with hooks.step(0):
        model(torch.empty(3, 4, device="meta"))
    (event,) = events("outputs_unread")
    assert event.payload["modules"] == ["0"]


def test_in_place_modules_are_seen_on_both_sides(engine, expect):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    values, weights = torch.randn(5, 6), [p.detach().clone() for p in model.parameters()]
    before = values @ weights[0].T + weights[1]
    after = before.clamp(min=0)
    hooks = engine(model)
    with hooks.step(0):
        model(values).sum().backward()
    of_relu = weights[2].sum(0).expand(5, 6)
    by_name = {(record.module_name, record.summary_type): record for record in hooks.read()}
    expect(by_name["0", "activation"], before)
    expect(by_name["1", "activation"], after)
    expect(by_name["1", "gradient"], of_relu)
    # What reaches the linear layer has gone through the ReLU.
    expect(by_name["0", "gradient"], of_relu * (before > 0))


def test_in_place_addition_after_a_module(engine, expect):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, values):
            out = self.linear(values)
            out += values
            return out

    model = Residual()
    hooks = engine(model)
    values = torch.randn(3, 4)
    alone = model.linear(values).detach()
    with hooks.step(0):
        model(values).square().sum().backward()
    activation, gradient = hooks.read()
    expect(activation, alone)
    expect(gradient, (alone + values) * 2)


@pytest.mark.long
def test_hooks_change_no_output_and_no_gradient(engine):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LSTM(6, 3))
    values = torch.randn(5, 2, 6)

    def run():
        model.zero_grad()
        out, (hidden, cell) = model(values)
        (out.sum() + cell.sum()).backward()
        return [out, hidden, cell, *(p.grad.clone() for p in model.parameters())]

    plain = run()
    with engine(model, capture_all_outputs=True).step(0):
        probed = run()
    for one, other in zip(plain, probed, strict=True):
        assert torch.equal(one, other)


def test_every_hook_returns_none(engine, monkeypatch):
    from quark_torch.layers import eager_hooks

    returned = []
    for kind in (eager_hooks.ForwardHook, eager_hooks.GradientHook):
        original = kind.__call__

        def spy(self, *args, original=original):
            returned.append(original(self, *args))

        monkeypatch.setattr(kind, "__call__", spy)
    model = nn.Sequential(nn.Linear(2, 2))
    with engine(model).step(0):
        model(torch.ones(1, 2)).sum().backward()
    assert returned == [None, None]


def test_shared_modules_count_their_calls(engine, expect):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, values):
            middle = self.first(values)
            return middle, self.second(middle)

    model = Tied()
    hooks = engine(model)
    assert hooks.instrumented_module_names == ("first",)
    for step in (0, 1):
        with hooks.step(step):
            middle, last = model(torch.randn(3, 4))
            last.square().sum().backward()
    records = hooks.read(step=1)
    found = [(record.summary_type, record.call_index) for record in records]
    # Backward goes the other way, and each gradient has the index of its own forward.
    assert found == [("activation", 0), ("activation", 1), ("gradient", 1), ("gradient", 0)]
    expect(records[0], middle, metadata={"aliases": ["second"]})
    expect(records[2], last.detach() * 2)
    expect(records[3], (last.detach() * 2) @ model.first.weight.detach())
