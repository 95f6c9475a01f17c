"""A curve as it comes over the wire."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from quark_backends.service.protocol import SeriesReply
from quark_core.errors import SchemaValidationError
from quark_core.series import Series

__all__ = ["to_series"]

_FLOATS = frozenset({"low", "high", "mean", "last"})
_COLUMNS = tuple(f.name for f in fields(Series) if f.name not in ("key", "exact"))


def to_series(reply: SeriesReply) -> Series:
    """The curve that a reply in msgpack is.

    Raises:
        SchemaValidationError: A column is missing, or they are of different lengths.
    """
    columns = {}
    for name in _COLUMNS:
        data = reply.columns.get(name)
        if not isinstance(data, bytes) or len(data) % 8:
            raise SchemaValidationError(f"series: the column {name!r} is missing or damaged")
        columns[name] = np.frombuffer(data, dtype="<f8" if name in _FLOATS else "<i8")
    if len({len(column) for column in columns.values()}) != 1:
        raise SchemaValidationError("series: the columns are of different lengths")
    return Series(key=reply.key, exact=reply.exact, **columns)
