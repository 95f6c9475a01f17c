"""Values that no one should pass to a logger, and that someone will."""

import datetime
import enum
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath

import numpy as np
import torch

HUGE = 10**5_000  # more digits than Python spells out


class Odd:
    """Every way of looking at it raises."""

    def __init__(self, error):
        self._error = error

    def _raise(self, *_args):
        raise self._error

    __float__ = __int__ = __index__ = __str__ = __repr__ = __len__ = __iter__ = _raise
    __hash__ = __eq__ = __bool__ = __getattr__ = _raise


class OddMapping(dict):
    """A mapping whose parts do not agree, or raise."""

    def __init__(self, items, error=None):
        super().__init__(items)
        self._error = error

    def items(self):
        if self._error:
            raise self._error
        return [("a", 1.0)]

    def values(self):
        return [1.0, 2.0, 3.0]


class OddFloat(float):
    def __float__(self):
        raise ZeroDivisionError


class OddText(str):
    __slots__ = ()

    def __str__(self):
        raise ZeroDivisionError


class Colour(enum.Enum):
    RED = object()


def nest(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


LOOP = {}
LOOP["again"] = LOOP

ODDITIES = [
    HUGE,
    -HUGE,
    2**63,
    -(2**63) - 1,
    math.nan,
    -math.inf,
    5e-324,
    True,
    None,
    "",
    "\ud800",
    "\x00",
    "a" * 1_000_000,
    b"bytes",
    "Grüße/两行@1",
    complex(1, 2),
    Decimal("1e999"),
    Decimal("sNaN"),
    Fraction(1, 3),
    Fraction(HUGE, 3),
    [],
    [LOOP],
    {},
    LOOP,
    {1, 2},
    {HUGE: 1},
    {"x": HUGE},
    {b"x": 1},
    {None: 1},
    {(1, 2): 1},
    {math.nan: math.nan},
    {"\ud800": "\ud800"},
    nest(63),
    nest(65),
    nest(5_000),
    np.float16("inf"),
    np.longdouble("1e4000"),
    np.array([1.0, 2.0]),
    np.array(3.0),
    np.array("text"),
    np.array(object(), dtype=object),
    np.datetime64("2026-01-01"),
    np.ma.masked,
    np.int64(-1),
    torch.tensor(1.0, requires_grad=True),
    torch.tensor([1.0, 2.0]),
    torch.empty((), device="meta"),
    torch.tensor(1 + 2j),
    PurePosixPath("/a"),
    datetime.datetime(2026, 1, 1),
    datetime.datetime.max,
    datetime.date(2026, 1, 1),
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "2026-01-01T00:00:00Z",
    Colour.RED,
    OddFloat(1.0),
    OddText("text"),
    OddMapping({"a": 1.0}),
    OddMapping({"a": 1.0}, ZeroDivisionError()),
    Odd(ValueError("planted")),
    Odd(ZeroDivisionError("planted")),
    Odd(AttributeError("planted")),
    Odd(RuntimeError("planted")),
    object(),
    object,
    len,
    iter([1.0]),
]


def is_tame(value):
    """Whether hypothesis can show it, and give it twice."""
    try:
        repr(value)
    except Exception:
        return False
    return not isinstance(value, type(iter([])))
