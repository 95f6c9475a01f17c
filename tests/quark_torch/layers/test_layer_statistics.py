"""The numbers of layer summaries, against direct computation."""

import math

import pytest
import torch
from torch import nn

from quark import HookEngine, HookEngineConfig, validate_record
from quark.analysis.curves import collect_layers
from quark_core.records.columns import Columns
from quark_torch.layer_filter import LayerFilterConfig


def keep(into):
    """A forward hook that keeps a copy of the output and its gradient."""

    def hook(module, args, output):
        into.append(output.detach().clone())
        if output.requires_grad:
            output.register_hook(lambda grad: into.append(grad.detach().clone()))

    return hook


@pytest.mark.long
def test_values_are_those_of_the_tensors(engine, expect):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    kept = {name: [] for name, _ in model.named_children()}
    for name, module in model.named_children():
        module.register_forward_hook(keep(kept[name]))
    hooks = engine(model)
    with hooks.step(3, epoch=1) as probed:
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert probed is True
    records = hooks.read()
    assert len(records) == 10
    for record in records:
        validate_record(record)
        activation, gradient = kept[record.module_name]
        is_activation = record.summary_type == "activation"
        expect(
            record,
            activation if is_activation else gradient,
            step=3,
            epoch=1,
            call_index=0,
            hook_direction="forward" if is_activation else "backward",
            module_type=type(model[int(record.module_name)]).__name__,
            metadata=None,
        )
    assert [record.module_name for record in records[:5]] == list("01234")
    assert [record.module_name for record in records[5:]] == list("43210")


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_read_as_wide_numbers(engine, expect, dtype):
    class Huge(nn.Module):
        def forward(self, values):
            return values.to(dtype) * 300

    model = Huge()
    hooks = engine(model)
    given = torch.rand(200, 200)
    with hooks.step(0):
        output = model(given)
    # The norm is far beyond what float16 can hold.
    expect(hooks.read()[0], output)


def test_a_large_mean_does_not_hide_the_variance(engine):
    model = nn.Sequential(nn.Identity())
    hooks = engine(model)
    with hooks.step(0):
        model(torch.randn(1000, 100) + 1000.0)
    assert hooks.read()[0].variance == pytest.approx(1.0, rel=0.02)


def test_what_is_not_finite_is_counted_and_left_out(engine):
    model = nn.Sequential(nn.Identity())
    hooks = engine(model)
    values = torch.tensor([[1.0, math.nan, 3.0], [math.inf, -math.inf, 0.0]])
    with hooks.step(0):
        model(values)
        model(torch.full((2, 2), math.nan))
    mixed, none = hooks.read()
    assert (mixed.nan_count, mixed.inf_count, mixed.element_count) == (1, 2, 6)
    assert mixed.mean == pytest.approx(4 / 3)
    assert (mixed.minimum, mixed.maximum) == (0.0, 3.0)
    assert mixed.zero_ratio == pytest.approx(1 / 6)
    assert (none.nan_count, none.mean, none.std, none.norm, none.minimum) == (4, *[None] * 4)
    validate_record(none)


def test_odd_tensors_never_stop_training(engine):
    class Odd(nn.Module):
        def forward(self, values):
            return values

    model = nn.Sequential(Odd())
    hooks = engine(model)
    indexes = torch.tensor([[0, 0, 1], [0, 0, 1]])
    odd = {
        "empty": torch.empty(0, 3),
        "int": torch.arange(6),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([3 + 4j, 0j]),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.sparse_coo_tensor(
            indexes, torch.tensor([1.0, 2.0, 4.0]), (2, 2), check_invariants=True
        ),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
        "scalar": torch.tensor(2.5),
    }
    for step, tensor in enumerate(odd.values()):
        with hooks.step(step):
            assert model(tensor) is tensor
    found = {name: hooks.read(step=step) for step, name in enumerate(odd)}
    assert found.pop("meta") == ()
    (empty,) = found["empty"]
    assert (empty.element_count, empty.mean, empty.zero_ratio) == (0, None, None)
    assert found["int"][0].mean == 2.5
    assert found["complex"][0].maximum == 5.0
    assert found["sparse"][0].norm == 5.0
    assert found["sparse"][0].metadata["density"] == 0.5
    assert found["float8"][0].mean == 1.0
    assert found["nested"][0].mean == pytest.approx(0.4)
    assert found["scalar"][0].tensor_shape == ()
    for records in found.values():
        validate_record(records[0])


def test_dead_units_are_not_zeros(engine):
    """A ReLU at work has half its elements at zero, and no dead unit."""
    relu = nn.ReLU()
    model = nn.Sequential(relu)
    hooks = engine(model)
    values = torch.randn(64, 10)
    values[:, :3] = -1.0
    with hooks.step(0):
        output = model(values)
    (record,) = hooks.read(summary_type="activation")
    assert record.dead_unit_ratio == pytest.approx(0.3)
    assert record.zero_ratio == pytest.approx((output == 0).double().mean().item())
    assert record.zero_ratio > 0.5


def test_units_of_images_are_channels(engine):
    conv = nn.Conv2d(1, 4, 1, bias=False)
    with torch.no_grad():
        conv.weight[0] = conv.weight[3] = 0.0
    model = nn.Sequential(conv, nn.ReLU())
    with torch.no_grad():
        conv.weight[1:3] = conv.weight[1:3].abs()
    hooks = engine(model)
    with hooks.step(0):
        model(torch.rand(2, 1, 5, 5))
    assert [record.dead_unit_ratio for record in hooks.read(hook_direction="forward")] == [0.5] * 2


def test_units_of_sequences_follow_the_module_before(engine):
    linear = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    conv = nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU())
    model = nn.ModuleDict({"linear": linear, "conv": conv})
    with torch.no_grad():
        for layer in (linear[0], conv[0]):
            layer.weight[:2] = 0.0
            layer.bias[:2] = -1.0
            layer.weight[2:] = 1.0
            layer.bias[2:] = 1.0
    hooks = engine(model, filters={"include_types": ("ReLU",)}, capture_backward=False)
    with hooks.step(0):
        linear(torch.rand(3, 6, 4))
        conv(torch.rand(3, 4, 6))
    assert [record.dead_unit_ratio for record in hooks.read()] == [0.5, 0.5]


def test_one_sample_says_nothing_of_units(engine):
    model = nn.Sequential(nn.Linear(4, 4))
    hooks = engine(model, capture_backward=False)
    with hooks.step(0):
        model(torch.zeros(1, 4))
        model(torch.zeros(2, 4))
    assert [record.dead_unit_ratio is None for record in hooks.read()] == [True, False]


@pytest.mark.long
def test_a_collapsed_batch_shows_though_its_features_differ(engine):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    nn.init.zeros_(model[0].weight)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.randn(32, 6)).square().sum().backward()
    activations, gradients = hooks.read()[:3], hooks.read()[3:]
    for record in activations:
        assert record.std > 0.05
        assert record.sample_variation_ratio < 1e-6
    assert [record.sample_variation_ratio for record in gradients] == [None] * 3
    nn.init.normal_(model[0].weight)
    with hooks.step(1):
        model(torch.randn(32, 6))
    assert all(record.sample_variation_ratio > 0.1 for record in hooks.read(step=1))
    history = collect_layers(Columns.from_records("layer", hooks.read()))["2", "activation"]
    collapsed, healthy = history["sample_variation_ratio"]
    assert collapsed == activations[2].sample_variation_ratio < healthy


def test_epsilon_is_of_activations_only(engine):
    model = nn.Sequential(nn.Identity())
    hooks = engine(model, dead_unit_epsilon=0.1)
    values = torch.full((4, 2), 0.05, requires_grad=True)
    with hooks.step(0):
        (model(values) * 0.01).sum().backward()
    activation, gradient = hooks.read()
    assert (activation.zero_ratio, activation.dead_unit_ratio) == (1.0, 1.0)
    assert (gradient.zero_ratio, gradient.dead_unit_ratio) == (0.0, None)


@pytest.mark.parametrize(
    ("module", "values", "share"),
    [
        (nn.Sigmoid(), [-9.0, 9.0, 0.0, 1.0], 0.5),
        (nn.Tanh(), [-9.0, 9.0, 0.0, 1.75], 0.5),
        (nn.Hardsigmoid(), [-9.0, 9.0, 0.0, 1.0], 0.5),
        (nn.Hardtanh(), [-9.0, 9.0, 0.0, 0.94], 0.5),
        (nn.Hardtanh(-2.0, 4.0), [-1.95, 3.9, 1.0, -1.0], 0.5),
        (nn.ReLU6(), [-9.0, 9.0, 0.0, 5.0], 0.25),
        (nn.ReLU(), [-9.0, 9.0, 0.0, 1.0], None),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
def test_saturation_is_at_the_ends_of_the_modules_range(engine, module, values, share):
    model = nn.Sequential(module)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.tensor([values]))
    assert hooks.read()[0].saturation_ratio == share


@pytest.mark.long
def test_saturation_can_be_chosen_and_switched_off(session):
    model = nn.Sequential(nn.Softsign(), nn.Tanh())
    values = torch.tensor([[99.0, 0.0]])
    config = HookEngineConfig(
        saturation_threshold=0.9, saturation_module_types=("torch.nn.Softsign",)
    )
    with HookEngine(session, model, config=config) as hooks, hooks.step(0):
        model(values)
    assert [record.saturation_ratio for record in hooks.read()] == [0.5, None]
    config = HookEngineConfig(
        saturation_threshold=None, filters=LayerFilterConfig(include_types=("Tanh",))
    )
    with HookEngine(session, model, config=config) as hooks, hooks.step(1):
        model(values)
    assert hooks.read(step=1)[0].saturation_ratio is None
