"""What waits between `MetricsLogger` and the delivery thread.

A channel of metrics holds records and rows. A row is what `log_many` leaves:
a plain tuple, because making one takes a twentieth of the time of the records
it stands for, which nobody may ever ask for:

    (sequence of the first value, time_us, step, epoch, keys, values)

where `keys` is a tuple of `MetricKey`, shared between rows, and `values` a
list of floats of the same length. The values' sequences follow each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from quark_core.records import MetricRecord
from quark_core.records.codec import (
    Column,
    encode_columns,
    encode_floats,
    encode_repeated,
    encode_spread,
)
from quark_core.records.fields import column_types


class MetricKey(NamedTuple):
    """A stored metric key and its two parts."""

    metric_key: str
    namespace: str | None
    metric_name: str


MetricRow: TypeAlias = tuple[int, int, int | None, int | None, tuple[MetricKey, ...], list[float]]
MetricItem: TypeAlias = MetricRecord | MetricRow


def count_items(item: MetricItem) -> int:
    """How many records an item stands for."""
    return len(item[5]) if type(item) is tuple else 1


def expand_row(
    row: MetricRow, *, run_id: str | None, writer_id: str, attempt: int, rank: int
) -> list[MetricRecord]:
    """The records that a row stands for."""
    sequence, time_us, step, epoch, keys, values = row
    return [
        MetricRecord(
            run_id, writer_id, attempt, rank, sequence + index, time_us, *key, value, step, epoch
        )
        for index, (key, value) in enumerate(zip(keys, values, strict=True))
    ]


def encode_items(items: Sequence[MetricItem]) -> tuple[int, bytes]:
    """Number of records and body of a batch of metrics."""
    names = list(column_types(MetricRecord.KIND))
    if not any(type(item) is tuple for item in items):
        columns: dict[str, list[Any]] = {
            name: [getattr(item, name) for item in items] for name in names
        }
        return len(items), encode_columns(MetricRecord.KIND, len(items), columns)
    rows: list[MetricRow] = [item for item in items if type(item) is tuple]
    if len(rows) == len(items) and all(row[4] is rows[0][4] for row in rows):
        return _encode_rows(rows)
    columns = {name: [] for name in names}
    for item in items:
        if type(item) is tuple:
            sequence, time_us, step, epoch, keys, values = item
            count = len(values)
            columns["sequence"].extend(range(sequence, sequence + count))
            columns["time_us"].extend([time_us] * count)
            columns["step"].extend([step] * count)
            columns["epoch"].extend([epoch] * count)
            columns["metric_key"].extend([key[0] for key in keys])
            columns["namespace"].extend([key[1] for key in keys])
            columns["metric_name"].extend([key[2] for key in keys])
            columns["value"].extend(values)
            columns["description"].extend([None] * count)
            columns["metadata"].extend([None] * count)
        else:
            for name in names:
                columns[name].append(getattr(item, name))
    count = len(columns["value"])
    return count, encode_columns(MetricRecord.KIND, count, columns)


def _encode_rows(rows: Sequence[MetricRow]) -> tuple[int, bytes]:
    """Rows of the very same keys, as a training loop leaves them: their names are encoded once."""
    keys: tuple[MetricKey, ...] = rows[0][4]
    width, count = len(keys), len(keys) * len(rows)
    firsts = [row[0] for row in rows]
    columns: dict[str, Any] = {}
    if count > 1 and firsts == list(range(firsts[0], firsts[0] + count, width)):
        columns["sequence"] = Column("sequence", "i", [firsts[0], 1], b"", _count_up(count))
    else:
        columns["sequence"] = [n for first in firsts for n in range(first, first + width)]
    for place, name in ((1, "time_us"), (2, "step"), (3, "epoch")):
        values: list[Any] = [row[place] for row in rows]
        if None in values:
            columns[name] = [value for value in values for _ in range(width)]
        else:
            columns[name] = encode_spread(name, values, width)
    for place, name in enumerate(MetricKey._fields):
        columns[name] = encode_repeated(name, tuple(key[place] for key in keys), len(rows))
    floats = array("d", chain.from_iterable(row[5] for row in rows))
    columns["value"] = encode_floats("value", floats)
    return count, encode_columns(MetricRecord.KIND, count, columns)


def _count_up(count: int) -> bytes:
    """Differences of so many numbers that follow each other; the first is 0."""
    return b"\x00" + b"\x01" * (count - 1)
