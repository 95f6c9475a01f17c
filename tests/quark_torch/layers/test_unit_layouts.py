"""Which dimension holds the units of a layer's output, whatever order the layers are defined in."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Tutorial(nn.Module):
    """One activation for everything, defined last, as in tutorials."""

    def __init__(self, *, dead=7):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8 * 10 * 10, 12)
        self.relu = nn.ReLU()
        with torch.no_grad():
            self.conv.weight.abs_()
            self.conv.bias[:dead] = -1000.0

    def forward(self, images):
        images = self.relu(self.conv(images))
        return self.relu(self.head(images.flatten(1)))


def probe(engine, model, *inputs, **options):
    hooks = engine(model, **options)
    with hooks.step(0):
        model(*inputs).square().mean().backward()
    return hooks.read(summary_type="activation")


def find_ratios(records, name):
    return [record.dead_unit_ratio for record in records if record.module_name == name]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_shared_activation_has_the_units_of_what_was_given_to_it(engine, form):
    model = Tutorial().to(memory_format=form)
    images = torch.rand(4, 3, 10, 10).to(memory_format=form)
    records = probe(engine, model, images)
    assert find_ratios(records, "conv") == [0.0]
    first, second = find_ratios(records, "relu")
    assert first == 0.875
    assert second in {count / 12 for count in range(13)}


def test_the_python_hooks_find_the_same(engine, monkeypatch):
    monkeypatch.setattr("quark_torch.layers.eager_hooks.find_hooks", lambda: None)
    records = probe(engine, Tutorial(), torch.rand(4, 3, 10, 10))
    assert find_ratios(records, "relu")[0] == 0.875


def test_a_frozen_shared_activation_goes_by_the_sizes_that_the_layers_give(engine):
    """Without gradients there is no graph that would tell what made a tensor."""
    model = Tutorial().requires_grad_(False)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.rand(4, 3, 10, 10))
    assert find_ratios(hooks.read(), "relu")[0] == 0.875


def test_sizes_that_fit_two_layers_tell_nothing(engine):
    model = Tutorial()
    model.other = nn.Linear(3, 10)
    model.requires_grad_(False)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.rand(4, 3, 10, 10))
    assert find_ratios(hooks.read(), "relu")[0] is None


class After(nn.Module):
    """Gives to an activation, defined before its layer, what a function makes of the layer's."""

    def __init__(self, layer, between=None):
        super().__init__()
        self.act = nn.ReLU()
        self.other = nn.Conv2d(1, 5, 1) if isinstance(layer, nn.Linear) else nn.Linear(1, 5)
        self.layer = layer
        self.between = between

    def forward(self, values):
        values = self.layer(values)
        return self.act(values if self.between is None else self.between(values))


def make_dead(layer, units):
    with torch.no_grad():
        layer.weight.abs_()
        layer.bias[:] = 1.0
        layer.bias[:units] = -1000.0
    return layer


@pytest.mark.sampled
@pytest.mark.parametrize(
    "between",
    [
        None,
        lambda values: values + 0.01,
        lambda values: 0.5 * torch.rand_like(values) + values,
        lambda values: values * torch.ones(4, 6, 1, 1),
        lambda values: F.max_pool2d(values, 2),
        lambda values: F.interpolate(values, scale_factor=2),
        lambda values: values.flatten(2),
        lambda values: values.permute(0, 2, 3, 1),
        lambda values: values.permute(0, 2, 3, 1).contiguous(),
        lambda values: values.flatten(2).transpose(1, 2),
        lambda values: values.to(torch.bfloat16),
        lambda values: torch.cat([values, values], 1),
        lambda values: values[:, :, 1:],
        lambda values: F.pad(values, (1, 1)),
    ],
)
def test_units_are_followed_from_a_convolution(engine, between):
    model = After(make_dead(nn.Conv2d(3, 6, 1), 3), between)
    records = probe(engine, model, torch.rand(4, 3, 8, 8))
    assert find_ratios(records, "act") == [0.5]


@pytest.mark.parametrize("shape", [(4, 5), (4, 7, 5), (4, 7, 6, 5), (2, 3, 4, 7, 5)])
def test_units_of_a_linear_layer_are_last_in_any_number_of_dimensions(engine, shape):
    model = After(make_dead(nn.Linear(5, 6), 3))
    assert find_ratios(probe(engine, model, torch.rand(shape)), "act") == [0.5]


def test_units_that_a_view_takes_apart_are_none(engine):
    model = After(nn.Linear(5, 6), lambda values: values.view(4, 7, 2, 3))
    (record,) = [r for r in probe(engine, model, torch.rand(4, 7, 5)) if r.module_name == "act"]
    # Two heads of three: neither the heads nor the places in them are the layer's six units.
    assert record.dead_unit_ratio is None


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (nn.Conv2d(3, 4, 1), torch.rand(3, 6, 6)),
        (nn.Conv1d(3, 4, 1), torch.rand(3, 6)),
        (nn.MaxPool2d(2), torch.rand(3, 6, 6)),
    ],
)
def test_one_unbatched_image_says_nothing_of_units(engine, layer, given):
    model = nn.Sequential(layer, nn.ReLU())
    hooks = engine(model, capture_backward=False)
    with hooks.step(0):
        model(given)
    assert [record.dead_unit_ratio for record in hooks.read()] == [None, None]


def test_a_norm_over_whole_images_follows_what_is_given_to_it(engine):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm([8, 6, 6], elementwise_affine=False))
    model.append(nn.ReLU())
    hooks = engine(model)
    with hooks.step(0):
        model(torch.rand(4, 3, 6, 6)).sum().backward()
    records = hooks.read(summary_type="activation")
    assert [record.tensor_shape for record in records] == [(4, 8, 6, 6)] * 3
    assert all(ratio * 8 in range(9) for r in records if (ratio := r.dead_unit_ratio) is not None)


@pytest.mark.long
def test_a_compiled_model_has_the_units_of_its_layers(engine):
    model = Tutorial()
    compiled = torch.compile(model, backend="eager")
    records = probe(engine, compiled, torch.rand(4, 3, 10, 10))
    assert find_ratios(records, "relu")[0] == 0.875


def test_a_graph_that_cannot_be_followed_costs_no_record(engine, monkeypatch):
    def refuse(tensor):
        raise RuntimeError("planted")

    monkeypatch.setattr("quark_torch.layers.watched_module.trace_units", refuse)
    records = probe(engine, Tutorial(), torch.rand(4, 3, 10, 10))
    assert find_ratios(records, "relu")[0] == 0.875


@pytest.mark.long
def test_one_activation_twice_in_a_sequence_has_no_layout_of_its_own(engine):
    relu = nn.ReLU()
    model = nn.Sequential(make_dead(nn.Conv2d(3, 8, 1), 6), relu, nn.Linear(9, 4), relu)
    model.requires_grad_(False)
    hooks = engine(model)
    with hooks.step(0):
        model(torch.rand(5, 3, 9, 9))
    by_size = {record.tensor_shape[-1]: record for record in hooks.read(module_name="1")}
    assert by_size[9].dead_unit_ratio == 0.75
    assert by_size[4].dead_unit_ratio is None
