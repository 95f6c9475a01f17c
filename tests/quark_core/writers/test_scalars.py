"""Scalars: real numbers of any library become floats, everything else is refused by name."""

import math
import struct
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_core.errors import SchemaValidationError
from quark_core.writers.metrics import MetricsLogger
from quark_core.writers.scalars import to_float

torch = pytest.importorskip("torch")


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0, 0.0),
        (-3, -3.0),
        (2**53 + 1, 2.0**53),
        (0.1, 0.1),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (Level.HIGH, 3.0),
        *((dtype(3), 3.0) for dtype in (np.int8, np.uint8, np.int64, np.uint64)),
        *((dtype(0.5), 0.5) for dtype in (np.float16, np.float32, np.float64, np.longdouble)),
        (np.array(0.5), 0.5),
        (np.zeros(3)[1], 0.0),
        (torch.tensor(3), 3.0),
        (torch.tensor(0.5), 0.5),
        *((torch.tensor(0.5, dtype=dtype), 0.5) for dtype in (torch.float16, torch.bfloat16)),
        (torch.tensor(0.5, dtype=torch.float64, requires_grad=True), 0.5),
        (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
        (torch.ones(2, 2).sum(), 4.0),
        (True, 1.0),
        (False, 0.0),
        *((kind(True), 1.0) for kind in (np.bool_, np.array, torch.tensor)),
        *((kind([0.5]), 0.5) for kind in (np.array, torch.tensor)),
        *((kind([[0.5]]), 0.5) for kind in (np.array, torch.tensor)),
        (torch.tensor([0.5], requires_grad=True), 0.5),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_a_real_number_becomes_a_float(value, number):
    found = to_float(value, "value", "metrics.log")

    assert type(found) is float
    assert found == number


@given(st.floats())
def test_floats_of_every_library_keep_their_bits(value):
    sources = [value, np.float64(value), torch.tensor(value, dtype=torch.float64)]

    assert {struct.pack("<d", to_float(source, "value", "metrics.log")) for source in sources} == {
        struct.pack("<d", value)
    }


@pytest.mark.parametrize("library", [float, np.float32, np.float64, torch.tensor])
def test_non_finite_numbers_pass(library):
    assert math.isnan(to_float(library(math.nan), "value", "metrics.log"))
    assert to_float(library(-math.inf), "value", "metrics.log") == -math.inf


@pytest.mark.parametrize(
    "value",
    [
        None,
        "0.5",
        b"1",
        1j,
        [1.0],
        (1.0,),
        {"a": 1.0},
        object(),
        float,
        np.str_("1"),
        np.complex64(1),
        np.array("5"),
        np.zeros((2, 2)),
        np.zeros((1, 0)),
        np.array(["5"]),
        np.array([1j]),
        np.array([np.timedelta64(5, "s")]),
        torch.ones(1, 2),
        np.datetime64(5, "ns"),
        np.timedelta64(5, "s"),
        np.timedelta64(5, "ns"),
        torch.zeros(0),
        torch.tensor(1j),
        torch.tensor(1.0, device="meta"),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_whatever_is_no_real_number_is_refused_by_name(value):
    with pytest.raises(SchemaValidationError) as caught:
        to_float(value, "metrics['loss']", "metrics.log_many")

    assert str(caught.value).startswith("metrics['loss'] must be a number")
    assert type(value).__name__ in str(caught.value)


def test_a_refused_array_is_told_with_its_shape():
    with pytest.raises(SchemaValidationError, match=r"ndarray of shape \(2, 3\)"):
        to_float(np.zeros((2, 3)), "value", "metrics.log")


@pytest.mark.parametrize(
    "value", [10**400, Fraction(10**400), Decimal("1e400"), np.longdouble("1e4000")], ids=repr
)
def test_a_number_beyond_float64_becomes_an_infinity(value):
    assert to_float(value, "value", "metrics.log") == math.inf
    assert to_float(-value, "value", "metrics.log") == -math.inf


def test_a_tensor_keeps_its_graph():
    loss = (torch.tensor([1.0, 2.0], requires_grad=True) ** 2).sum()
    to_float(loss, "loss", "metrics.log")
    loss.backward()

    assert loss.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_first_value_on_a_gpu_is_warned_of_once_for_each_call():
    loss = torch.tensor(0.5, device="cuda")
    for call in ("this_test.log", "this_test.log_many"):
        with pytest.warns(
            RuntimeWarning, match=rf"^loss is a CUDA tensor, so each {call}\(\) waits"
        ):
            assert to_float(loss, "loss", call) == 0.5

        assert to_float(loss, "loss", call) == 0.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(0.25, requires_grad=True), 0.25),
    ],
    ids=repr,
)
def test_a_tensor_is_logged_as_its_number(session, value, expected):
    assert MetricsLogger(session).log("m", value, step=0).value == expected


def test_a_tensor_of_several_elements_is_not_logged(session):
    with pytest.raises(SchemaValidationError, match=r"Tensor of shape \(2,\)"):
        MetricsLogger(session).log(metric="m", value=torch.ones(2), step=0)
