"""What is recorded of parameters and gradients, against direct computation."""

import math

import pytest
import torch
from parameter_scenes import TiedModel, assert_statistics, by_name, make_classifier, run_backward
from torch import nn

import quark
from quark_torch.parameters.listing import find_role


def test_values_and_gradients_of_a_real_model(observe):
    model = make_classifier()
    run_backward(model)
    records, distributions = observe(model).snapshot(0, epoch=2, metadata={"split": "train"})
    assert distributions == ()
    found = by_name(records)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        record = found[name]
        assert_statistics(record, "value", parameter)
        assert_statistics(record, "gradient", parameter.grad)
        assert record.shape == tuple(parameter.shape)
        assert record.element_count == parameter.numel()
        assert record.dtype == "float32"
        assert record.requires_grad
        assert record.step == 0
        assert record.epoch == 2
        assert record.metadata == {"split": "train"}
        assert record.non_finite_value_count == record.non_finite_gradient_count == 0
        assert record.in_optimizer is None
        assert record.optimizer_name is None
        assert record.learning_rate is None
        assert record.update_norm is None
        assert record.update_to_parameter_ratio is None
    assert found["0.weight"].module_name == "0"
    assert found["0.weight"].module_type == "Conv2d"
    assert found["1.bias"].module_type == "BatchNorm2d"
    assert [record.parameter_role for record in records] == ["weight", "bias"] * 4
    assert all(quark.validate_record(record) == record for record in records)


def test_near_zero_and_non_finite_elements(observe):
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(
            torch.tensor([[0.0, 1e-9, -1e-9, 0.5], [math.nan, math.inf, -math.inf, -2.0]])
        )
    model.weight.grad = torch.tensor([[math.nan] * 4, [0.0, 3.0, 0.0, 4.0]])
    record = observe(model).snapshot(0)[0][0]
    assert record.non_finite_value_count == 3
    assert record.non_finite_gradient_count == 4
    assert record.value_near_zero_ratio == 3 / 8
    assert record.gradient_near_zero_ratio == 2 / 8
    assert (record.value_min, record.value_max) == (-2.0, 0.5)
    assert record.gradient_norm == 5.0
    assert observe(model, near_zero_epsilon=0.0).snapshot(0)[0][0].value_near_zero_ratio == 1 / 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(observe, dtype):
    model = nn.Linear(300, 40).to(dtype)
    with torch.no_grad():
        model.weight.mul_(4000)
    record = observe(model).snapshot(0)[0][0]
    assert record.dtype == str(dtype).removeprefix("torch.")
    assert_statistics(record, "value", model.weight)


def test_complex_parameters_are_read_by_magnitude(observe):
    model = nn.Linear(3, 3, dtype=torch.complex64)
    record = observe(model).snapshot(0)[0][0]
    assert_statistics(record, "value", model.weight.abs())
    assert record.metadata["notes"] == ["complex: of the magnitudes"]


@pytest.mark.long
def test_sparse_gradients(observe):
    model = nn.Embedding(10, 4, sparse=True)
    model(torch.tensor([1, 1, 7])).sum().backward()
    assert model.weight.grad.is_sparse
    record = observe(model).snapshot(0)[0][0]
    # Row 1 was used twice, so that its gradient is 2.
    assert record.gradient_norm == pytest.approx(math.sqrt(4 * 4 + 4))
    assert record.gradient_near_zero_ratio == 0.8
    assert record.metadata["density"] == 0.2


def test_what_cannot_be_read_is_told_of_once(observe, notices):
    empty = nn.Linear(1, 3)
    empty.weight = nn.Parameter(torch.empty(3, 0))
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), empty, nn.LazyLinear(4), nn.Linear(2, 2))
    diagnostics = observe(model)
    for step in range(3):
        found = by_name(diagnostics.snapshot(step)[0])
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert found["0.weight"].value_norm is None
    assert found["0.weight"].non_finite_value_count is None
    assert found["0.weight"].shape == (2, 2)
    assert found["1.weight"].element_count == 0
    assert found["1.weight"].value_mean is None
    assert found["1.weight"].value_near_zero_ratio is None
    assert found["3.weight"].value_norm > 0
    ((event_type, told),) = notices()
    assert event_type == "parameters_unread"
    assert told["parameters"] == ["0.weight", "0.bias"]


def test_float8_and_integer_parameters(observe):
    model = nn.Module()
    values = torch.tensor([1.0, -2.0, 0.0, 0.5])
    model.small = nn.Parameter(values.to(torch.float8_e4m3fn), requires_grad=False)
    model.whole = nn.Parameter(torch.tensor([1, -2, 0, 5]), requires_grad=False)
    found = by_name(observe(model).snapshot(0)[0])
    assert_statistics(found["small"], "value", values)
    assert_statistics(found["whole"], "value", model.whole)
    assert found["whole"].dtype == "int64"
    assert found["small"].module_name == "(model)"
    assert not found["small"].requires_grad


def test_tied_weights_and_shared_modules_are_recorded_once(observe):
    model = TiedModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    diagnostics = observe(model, optimizer)
    optimizer.step()
    found = by_name(diagnostics.snapshot(0)[0])
    assert list(found) == ["scale", "embedding.weight", "block.weight", "block.bias"]
    assert found["embedding.weight"].metadata == {"aliases": ["out.weight"]}
    assert found["block.bias"].metadata == {"aliases": ["again.bias"]}
    assert found["scale"].parameter_role == "other"
    assert found["scale"].metadata is None
    # A pattern fits if any of the names does.
    chosen = observe(model, include_parameter_patterns=(r"^out\.",)).snapshot(0)[0]
    assert [record.parameter_name for record in chosen] == ["embedding.weight"]


def test_frozen_parameters(observe):
    model = make_classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    run_backward(model)
    optimizer.step()
    found = by_name(diagnostics.snapshot(0)[0])
    frozen = found["0.weight"]
    assert not frozen.requires_grad
    assert frozen.in_optimizer
    assert frozen.gradient_norm is None
    assert frozen.gradient_near_zero_ratio is None
    assert frozen.non_finite_gradient_count is None
    assert frozen.update_norm is None
    assert frozen.value_norm > 0
    assert found["4.weight"].update_norm > 0


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layer.weight", "weight"),
        ("rnn.weight_ih_l0", "weight"),
        ("rnn.bias_hh_l0_reverse", "bias"),
        ("attention.in_proj_weight", "weight"),
        ("attention.in_proj_bias", "bias"),
        ("attention.bias_k", "bias"),
        ("layer.parametrizations.weight.original0", "weight"),
        ("layer.parametrizations.bias.original", "bias"),
        ("norm.weight", "weight"),
        ("class_token", "other"),
        ("weight_block.scale", "other"),
    ],
)
def test_roles(name, role):
    assert find_role(name) == role


def test_roles_and_patterns_choose(observe):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def names(**config):
        return [record.parameter_name for record in observe(model, **config).snapshot(0)[0]]

    everything = [name for name, _ in model.named_parameters()]
    assert sorted(names()) == sorted(everything)
    assert all("bias" in name for name in names(include_parameter_roles=("bias",)))
    assert names(include_parameter_patterns=(r"linear\d\.weight$",)) == [
        "linear1.weight",
        "linear2.weight",
    ]
    left = names(include_parameter_patterns=("linear",), exclude_parameter_patterns=("bias", "2"))
    assert left == ["linear1.weight"]


def test_prefixes_of_wrappers_are_taken_off(observe):
    model = torch.compile(make_classifier(), backend="eager")
    assert "0.weight" in by_name(observe(model).snapshot(0)[0])
    averaged = torch.optim.swa_utils.AveragedModel(make_classifier())
    assert "4.bias" in by_name(observe(averaged).snapshot(0)[0])
    inner = nn.Module()
    inner.module = nn.Linear(2, 2)
    inner.head = nn.Linear(2, 2)
    # Here it is the user's own name and no wrapper.
    assert "module.weight" in by_name(observe(inner).snapshot(0)[0])


def test_parametrized_weights_are_recorded_by_what_is_trained(observe):
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    found = by_name(observe(model).snapshot(0)[0])
    assert set(found) == {
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }
    assert found["0.bias"].module_type == "Linear"


def test_parameters_that_come_and_change_are_seen(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    run_backward(model)
    optimizer.step()
    diagnostics.snapshot(0)
    model.adapter = nn.Linear(3, 3)
    model[6].weight = nn.Parameter(torch.zeros(3, 16))
    optimizer.add_param_group({"params": [*model.adapter.parameters()], "lr": 0.5, "name": "lora"})
    run_backward(model)
    optimizer.step()
    found = by_name(diagnostics.snapshot(1)[0])
    assert found["adapter.weight"].in_optimizer
    assert found["adapter.weight"].optimizer_group_index == 1
    assert found["adapter.weight"].optimizer_group_name == "lora"
    assert found["adapter.weight"].learning_rate == 0.5
    # The optimizer still has the old one.
    assert found["6.weight"].in_optimizer is False
    assert found["6.weight"].value_norm == 0
    assert found["6.weight"].update_norm is None
    assert found["0.weight"].update_norm > 0


def test_channels_last_and_views_are_read_in_place(observe):
    model = make_classifier().to(memory_format=torch.channels_last)
    assert_statistics(observe(model).snapshot(0)[0][0], "value", model[0].weight)
    model = nn.Module()
    base = torch.randn(6, 8)
    model.odd = nn.Parameter(base[::2, 1::3])
    assert_statistics(observe(model).snapshot(0)[0][0], "value", base[::2, 1::3])


def test_extreme_scales(observe):
    model = nn.Module()
    model.large = nn.Parameter(torch.full((4,), 1e30))
    model.tiny = nn.Parameter(torch.full((4,), 1e-30))
    model.offset = nn.Parameter(1000 + torch.randn(100_000))
    found = by_name(observe(model).snapshot(0)[0])
    assert found["large"].value_norm == pytest.approx(2e30, rel=1e-6)
    assert found["tiny"].value_norm == pytest.approx(2e-30, rel=1e-6)
    assert_statistics(found["offset"], "value", model.offset)


def test_nothing_of_the_model_is_touched(observe):
    model = make_classifier()
    optimizer = torch.optim.Adam(model.parameters())
    diagnostics = observe(
        model,
        optimizer,
        capture_distributions=True,
        distribution_types=("value", "gradient", "update"),
    )
    run_backward(model)
    optimizer.step()
    parameters = list(model.parameters())
    before = [(p._version, p.grad._version, p.grad.clone(), p.clone()) for p in parameters]
    diagnostics.snapshot(0)
    for parameter, (version, gradient_version, gradient, value) in zip(
        parameters, before, strict=True
    ):
        assert parameter._version == version
        assert parameter.grad._version == gradient_version
        assert torch.equal(parameter.grad, gradient)
        assert torch.equal(parameter, value)
        assert parameter.grad_fn is None
    assert torch.is_grad_enabled()
