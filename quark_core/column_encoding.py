"""Encodes what a read returned as the body of a batch, without a Python object per value."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from quark_core.codec import MISSING_INDEX, Column, encode_columns
from quark_core.columns import Array, Columns
from quark_core.fields import column_types, optional_fields

__all__ = ["encode_rows", "split_by_origin"]

_ORIGIN = ("run_id", "writer_id", "attempt", "rank")
_WIDTHS = (1, 2, 4, 8)


def encode_rows(columns: Columns, *, compress: bool = True) -> bytes:
    """The rows as `quark_core.codec.decode_body` reads them, without their origin."""
    types, optional = column_types(columns.kind), optional_fields(columns.kind)
    encoded: dict[str, Any] = {}
    for name, encoding in types.items():
        constant = columns.find_constant(name)
        if constant is not None and (encoding != "j" or constant[0] is None):
            encoded[name] = _encode_constant(name, encoding, constant[0], name in optional)
        elif encoding == "i" and columns[name].dtype == np.int64:
            encoded[name] = _encode_integers(name, columns[name], name in optional)
        elif encoding == "f":
            encoded[name] = _encode_floats(name, columns[name], columns.is_null(name))
        else:
            encoded[name] = columns[name].tolist()
    if not columns.count:
        encoded = {}
    return encode_columns(columns.kind, columns.count, encoded, compress)


def split_by_origin(columns: Columns) -> list[Columns]:
    """The rows in parts whose rows have one origin each, in order."""
    if columns.count < 2 or all(columns.find_constant(name) is not None for name in _ORIGIN):
        return [columns] if columns.count else []
    changes = np.zeros(columns.count - 1, dtype=np.bool_)
    for name in _ORIGIN:
        if columns.find_constant(name) is None:
            values = columns[name]
            changes |= values[1:] != values[:-1]
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), columns.count]
    return [columns.take(slice(a, b)) for a, b in pairwise(edges)]


def _encode_constant(name: str, encoding: str, value: Any, optional: bool) -> Column:
    if encoding == "i" and value is not None:
        value = None if optional and value == MISSING_INDEX else int(value)
    return Column(name, "c", value)


def _encode_integers(name: str, values: Array, optional: bool) -> Column:
    first = int(values[0])
    if first == values[-1] and bool((values == first).all()):
        return _encode_constant(name, "i", first, optional)
    nulls = b""
    if optional:
        missing = values == MISSING_INDEX
        if missing.any():
            nulls = missing.tobytes()
    steps = np.empty(len(values), dtype=np.int64)
    steps[0] = 0
    # Wraps round where it leaves 64 bits, and so does the sum that takes it back.
    np.subtract(values[1:], values[:-1], out=steps[1:])
    low, high = int(steps.min()), int(steps.max())
    width = next(w for w in _WIDTHS if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    return Column(name, "i", [first, width], nulls, steps.astype(f"<i{width}").tobytes())


def _encode_floats(name: str, values: Array, nulls: Array) -> Column:
    if nulls.any():
        if nulls.all():
            return Column(name, "c", None)
        return Column(name, "f", None, nulls.tobytes(), values.astype("<f8").tobytes())
    return Column(name, "f", None, b"", values.astype("<f8", copy=False).tobytes())
