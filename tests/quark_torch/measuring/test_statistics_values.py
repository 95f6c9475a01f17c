"""Statistics of any elements, dtype, size and shape are those of the definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from statistics_reference import check
from tiers import count_examples

from quark_torch.measuring.measures import measure, measure_many, measure_update, measure_updates
from quark_torch.measuring.tensor_statistics import Wanted

pytestmark = pytest.mark.usefixtures("way")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
WHOLE += [torch.uint16, torch.uint32]
COMPLEX = [torch.complex64, torch.complex128]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-8, 1e-30, 1e-42, 1e30, 65504.0, 1000.0]
SPECIAL += [1e300, -1e300, 1e-300, 5e-324, 1.7e308, 3.4e38, -3.4e38, 0.95, -0.95, 1.0]

wanteds = st.builds(
    Wanted,
    st.sampled_from([None, 0.0, 1e-8, 0.1, 0.95, 1e-320, 1e39, math.inf]),
    st.sampled_from([None, (-0.95, 0.95), (0.05, 0.95), (-math.inf, 6.0), (-1e300, 1e300)]),
    st.none(),
)
quick = settings(
    deadline=None, max_examples=count_examples(70), suppress_health_check=list(HealthCheck)
)


@st.composite
def tensors(draw, dtypes=FLOATS, largest=3000):
    """Normal elements of some location and scale, zeros and special ones among them."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(0, largest)),
            st.tuples(st.integers(1, 60), st.integers(1, 50)),
            st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40)),
            st.just(()),
        )
    )
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    location = draw(st.sampled_from([0.0, 0.0, 1.0, -1000.0, 1e-20]))
    scale = draw(st.sampled_from([0.0, 1.0, 1e-3, 1e-12, 1e-30, 1e10]))
    values = location + scale * chance.standard_normal(shape)
    if draw(st.booleans()):
        values = values * (chance.random(shape) < 0.5)
    for special in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
        values = np.where(chance.random(shape) < 3 / max(1, values.size), special, values)
    dtype = draw(st.sampled_from(dtypes))
    return convert(torch.from_numpy(np.asarray(values)), dtype)


def convert(values, dtype):
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if values.dim() else values).to(dtype)
    if not dtype.is_floating_point:
        values = values.nan_to_num(0, 9, -9).clamp(-100, 100) if dtype.is_signed else values.abs()
        values = values.nan_to_num(0, 9, 9).clamp(-100, 100)
    return values.to(dtype)


@quick
@given(tensors(), wanteds)
@example(torch.full((4,), 1e30), Wanted())
@example(torch.full((4,), 1e-30), Wanted())
@example(torch.tensor([1e38, -1e38, 3e38]), Wanted())
@example(torch.tensor([1.7e308, -1.7e308], dtype=torch.float64), Wanted(0.0))
@example(torch.tensor([5e-324, math.nan], dtype=torch.float64), Wanted())
@example(torch.tensor([math.nan, math.inf]), Wanted(1.0, (-1.0, 1.0)))
@example(torch.zeros(0), Wanted(1.0, (-1.0, 1.0), 0))
def test_floats(tensor, wanted):
    check(measure(tensor, wanted), tensor, wanted)


@quick
@given(tensors(NARROW + WHOLE + COMPLEX, 300), wanteds)
def test_other_dtypes(tensor, wanted):
    statistics = measure(tensor, wanted)
    check(statistics, tensor, wanted)
    notes = ("complex: of the magnitudes",) if tensor.dtype.is_complex else ()
    assert statistics.notes == notes


@quick
@given(tensors(FLOATS + COMPLEX + [torch.int32, torch.float8_e5m2]), st.data())
def test_units(tensor, data):
    if not tensor.dim():
        return
    dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1))
    epsilon = data.draw(st.sampled_from([None, 0.0, 1e-8, 0.3, -1.0, 1e300]))
    kills = data.draw(st.lists(st.integers(0, max(0, tensor.shape[dim] - 1)), max_size=5))
    if tensor.numel() and tensor.dtype.itemsize > 1:
        tensor.index_fill_(dim, torch.tensor(kills, dtype=torch.int64), 0)
    wanted = Wanted(epsilon, None, dim)
    check(measure(tensor, wanted), tensor, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_dead_units_that_come_late(dtype, memory_format, dim):
    images = torch.zeros(70, 40, 6, 5).to(dtype=dtype, memory_format=memory_format)
    images[-1, 3, -1, -1] = 1.0
    images[20, 7, 2, 2] = math.nan
    images[30, 8] = 1e-3
    for epsilon in (0.0, 1e-2):
        wanted = Wanted(epsilon, None, dim)
        check(measure(images, wanted), images, wanted)


def test_a_unit_that_is_no_dimension_gives_no_units():
    statistics = measure(torch.ones(3), Wanted(units=1))
    assert (statistics.unit_count, statistics.dead_unit_count, statistics.mean) == (None, None, 1)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_million(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(1 << 20).to(dtype)
    wanted = Wanted(0.01, (-2.0, 2.0))
    check(measure(tensor, wanted), tensor, wanted)
    tensor[12345] = math.nan
    tensor[-1] = -math.inf
    check(measure(tensor, wanted), tensor, wanted)


@pytest.mark.long
def test_a_mean_far_from_zero_costs_no_digits_of_the_variance():
    torch.manual_seed(0)
    for tensor in (
        torch.randn(1 << 18) + 1000,
        torch.cat([torch.zeros(4096), torch.randn(1 << 18) + 1e4]),
        torch.cat([torch.randn(5000) * 10**scale + 10**scale for scale in range(-6, 7)]),
        torch.full((1 << 18,), 0.1),
        torch.arange(1 << 18, dtype=torch.float32),
    ):
        check(measure(tensor), tensor)


def test_large_numbers_of_half_precision():
    tensor = torch.full((1 << 20,), 300.0, dtype=torch.float16)
    statistics = measure(tensor)
    assert statistics.norm == pytest.approx(300 * 1024)
    assert (statistics.mean, statistics.variance) == (300.0, 0.0)


def test_every_number_of_half_precision():
    for dtype in (torch.float16, torch.bfloat16):
        for number in torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).split(4096):
            check(measure(number, Wanted(1e-6)), number, Wanted(1e-6))
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        for piece in (every[:7], every[-9:], every[1024:1037]):
            check(measure(piece), piece)


def test_limits_are_compared_as_exactly_as_in_float64():
    for dtype in FLOATS:
        step = torch.tensor([0.1, 0.1, 0.1]).to(dtype)
        around = torch.stack([step[0], step[1].nextafter(dtype_like(0.0, dtype)), -step[2]])
        for epsilon in (0.1, float(step[0]), math.nextafter(float(step[0]), 0)):
            wanted = Wanted(epsilon, (-epsilon, epsilon), 0)
            check(measure(around, wanted), around, wanted)


def dtype_like(value, dtype):
    return torch.tensor(value, dtype=dtype)


@quick
@given(st.lists(tensors([*FLOATS, torch.int32], 300), max_size=6), wanteds)
def test_many_are_as_each(several, wanted):
    assert measure_many(several, wanted) == [measure(tensor, wanted) for tensor in several]


def test_many_updates_are_each_by_itself(way):
    torch.manual_seed(0)
    shape = (8, 3, 5, 5)
    afters = [torch.randn(shape).to(dtype) for dtype in FLOATS]
    afters += [
        torch.nn.Parameter(torch.randn(40)),
        torch.randn(shape).to(memory_format=torch.channels_last),
        torch.randn(9, 8)[:, ::2],
        torch.tensor([math.nan, math.inf, 1.0]),
        torch.randn(1 << 19),
        torch.arange(4),
        torch.empty(0),
        torch.ones(3, device="meta"),
    ]
    befores = [after.detach().clone() for after in afters]
    for before in befores[:-3]:
        before.add_(0.25)
    befores[1] = befores[1].float()
    befores[5] = befores[5].contiguous()
    befores.append(torch.ones(2, 3))
    afters.append(torch.ones(3, 2))
    wanted = Wanted(0.01)
    many = measure_updates(befores, afters, wanted)
    each = [measure_update(*pair, wanted) for pair in zip(befores, afters, strict=True)]
    assert [repr(found) for found in many] == [repr(found) for found in each]
    assert [found is None for found in many[-2:]] == [True, True]
    assert measure_updates([], [], wanted) == []
