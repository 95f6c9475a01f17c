"""The share of the energy that differs between samples is that of the definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from statistics_reference import as_doubles
from tiers import count_examples

from quark_torch.measuring.measures import measure, measure_many
from quark_torch.measuring.tensor_statistics import Wanted

pytestmark = pytest.mark.usefixtures("way")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int32, torch.uint8, torch.bool, torch.float8_e5m2, torch.complex64]
quick = settings(
    deadline=None, max_examples=count_examples(80), suppress_health_check=list(HealthCheck)
)


def lay_out(tensor, dim):
    """Samples as rows: of memory without gaps in its order, else in the logical one."""
    units = tensor.shape[dim]
    values = as_doubles(tensor)
    if units == 1:
        return values.reshape(1, -1)
    strides = tensor.stride()
    places = np.sum(np.indices(tensor.shape).T * np.array(strides), axis=-1).T
    if len(np.unique(places)) == places.max() + 1 == places.size:
        in_memory = np.empty(places.size)
        in_memory[places] = values
        return in_memory.reshape(-1, units * strides[dim])
    return values.reshape(math.prod(tensor.shape[:dim]), -1)


def expect_variation(tensor, dim):
    rows = lay_out(tensor, dim % tensor.dim())
    count = min(len(rows), 6)
    if count < 2:
        return None
    taken = np.stack([rows[i * len(rows) // count][:1024] for i in range(count)])
    if not np.isfinite(taken).all() or not taken.any():
        return None
    taken = taken / np.abs(taken).max()
    return taken.var(axis=0).sum() / (taken**2).mean(axis=0).sum()


def check_variation(tensor, dim):
    found = measure(tensor, Wanted(0.0, None, dim)).sample_variation
    expected = expect_variation(tensor, dim)
    if expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-12)
        assert 0 <= found <= 1
    return found


@st.composite
def batches(draw, dtypes):
    """Outputs of layers, in several layouts, and the dimension of their units."""
    sizes = st.integers(1, 9)
    shape, dim = draw(
        st.one_of(
            st.tuples(st.tuples(st.integers(1, 40), st.integers(1, 1500)), st.just(-1)),
            st.tuples(st.tuples(sizes, sizes, st.integers(1, 300)), st.just(2)),
            st.tuples(st.tuples(sizes, sizes, sizes, st.integers(1, 20)), st.just(1)),
        )
    )
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    location = draw(st.sampled_from([0.0, 1.0, -300.0, 1e-20]))
    spread = draw(st.sampled_from([0.0, 1.0, 1e-3, 1e-20, 1e-30, 1e30]))
    values = location + spread * chance.standard_normal(shape)
    values += draw(st.sampled_from([0.0, 1.0])) * chance.standard_normal((1, *shape[1:]))
    if draw(st.booleans()):
        values *= chance.random(shape) < 0.5
    if draw(st.integers(0, 4)) == 0:
        special = draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 1e300, 1e-300]))
        values[tuple(draw(st.integers(0, size - 1)) for size in shape)] = special
    dtype = draw(st.sampled_from(dtypes))
    if not dtype.is_floating_point and not dtype.is_complex:
        values = np.nan_to_num(values).clip(0, 100)
    tensor = torch.from_numpy(values).to(dtype)
    layout = draw(st.sampled_from(["plain", "channels_last", "transposed", "sliced", "expanded"]))
    if layout == "channels_last" and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "sliced":
        tensor = tensor.repeat_interleave(2, 0)[::2]
    elif layout == "expanded":
        tensor = tensor[:1].expand(4, *shape[1:])
    return tensor, dim


@quick
@given(batches(FLOATS))
@example((torch.full((2, 3), 3e38), 1))
@example((torch.tensor([[1e-42, 0.0], [0.0, 2e-42]]), 1))
@example((torch.tensor([[1.7e308, -1.7e308], [5e-324, 0.0]], dtype=torch.float64), 1))
def test_it_is_that_of_the_definition(batch):
    check_variation(*batch)


@quick
@given(batches(OTHERS))
def test_other_dtypes(batch):
    check_variation(*batch)


SHAPES = [((32, 64), 1), ((4, 30, 48), 2), ((12, 16, 5, 7), 1), ((7, 3000), 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_it_tells_a_collapsed_batch_from_a_healthy_one(dtype, shape, dim):
    torch.manual_seed(0)
    healthy = torch.randn(shape).to(dtype)
    # The mean of six samples takes up a sixth of their energy.
    assert check_variation(healthy, dim) == pytest.approx(5 / 6, abs=0.1)
    one = torch.randn(shape[dim:]) if dim > 1 else torch.randn(shape[1:])
    collapsed = one.expand(shape).to(dtype).clone()
    assert collapsed.std() > 0.5
    assert check_variation(collapsed, dim) < 1e-6
    if dtype == torch.float32:
        nearly = collapsed + 1e-3 * torch.randn(shape)
        assert 1e-7 < check_variation(nearly, dim) < 1e-5


def test_samples_of_channels_last_are_its_pixels():
    pixels = torch.arange(1.0, 5.0).view(1, 1, 2, 2).expand(3, 8, 2, 2).clone()
    assert check_variation(pixels, 1) < 1e-12
    assert check_variation(pixels.contiguous(memory_format=torch.channels_last), 1) > 0.1


@pytest.mark.parametrize("dtype", FLOATS)
def test_where_it_is_not_known(dtype):
    values = torch.randn(6, 20).to(dtype)
    cases = [(values[:1], 1), (values[:, :1], 1), (values, 0), (torch.zeros(6, 20).to(dtype), 1)]
    cases += [(values[:0], 1)]
    for tensor, dim in cases:
        assert measure(tensor, Wanted(0.0, None, dim)).sample_variation is None
    assert measure(values, Wanted(0.0)).sample_variation is None
    for special in (math.nan, math.inf):
        broken = values.clone()
        broken[3, 7] = special
        assert measure(broken, Wanted(0.0, None, 1)).sample_variation is None


def test_what_is_not_sampled_does_not_matter():
    values = torch.randn(12, 2000)
    expected = check_variation(values, 1)
    values[1::2] = math.nan
    values[:, 1024:] = math.inf
    assert check_variation(values, 1) == expected


def test_several_at_once():
    tensors = [torch.randn(5, 3), torch.randn(1, 3), torch.randn(5, 3).double(), torch.ones(4, 2)]
    found = measure_many(tensors, Wanted(0.0, None, 1))
    expected = [expect_variation(tensor, 1) for tensor in tensors]
    assert expected[1] is None
    assert found[1].sample_variation is None
    for index in (0, 2, 3):
        assert found[index].sample_variation == pytest.approx(expected[index], abs=1e-6)
