"""Points of metrics in the batches that are not compacted yet, for several metrics at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quark_backends.store.encoding.bodies import number_texts
from quark_backends.store.reading.stored_rows import StoredRows, WriterRow
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.codec import DecodedBody
from quark_core.records.columns import Array, Columns

_KIND = MetricRecord.KIND
_COLUMNS = ("sequence", "step", "epoch", "time_us", "value")
# A tail of no more points is kept decoded, 44 bytes a point, as long as there is room.
_KEPT_ROWS = 200_000
# Of a longer one so many points of the wanted metrics are given at once.
_PART_ROWS = 65_536
# What a process that compacts while it writes leaves no more of.
_BACKLOG_ROWS = 262_144
_BACKLOG_BATCHES = 1024


@dataclass(slots=True)
class _Points:
    """Points of several metrics in the order of the batches.

    Attributes:
        known: Code of each metric.
        codes, arrays: The metric of each point, and its columns, in parts.
    """

    known: dict[str, int] = field(default_factory=dict)
    codes: list[Array] = field(default_factory=list)
    arrays: dict[str, list[Array]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    count: int = 0
    order: Array | None = None

    def add(self, body: DecodedBody, wanted: int | None = None) -> None:
        """Add a batch's points, or those whose code is below `wanted`.

        Raises:
            SchemaValidationError, ValueError, TypeError, KeyError, IndexError: It is malformed;
                nothing was added.
        """
        codes = number_texts(body, "metric_key", self.known)
        rows = None if wanted is None else np.flatnonzero(codes < wanted)
        if rows is not None and not len(rows):
            return
        columns = [body.to_array(name, rows) for name in _COLUMNS]
        if rows is not None:
            codes = codes[rows]
        if any(len(column) != len(codes) for column in columns):
            raise SchemaValidationError("its columns are of different lengths")
        self.codes.append(codes)
        for name, column in zip(_COLUMNS, columns, strict=True):
            self.arrays[name].append(column)
        self.count += len(codes)
        self.order = None

    def split(self, keys: Sequence[str]) -> dict[str, Columns]:
        """The points of each of these metrics that has any."""
        if self.order is None:
            self.codes = [np.concatenate(self.codes or [np.empty(0, dtype=np.int64)])]
            for name, parts in self.arrays.items():
                self.arrays[name] = [np.concatenate(parts)] if len(parts) > 1 else parts
            self.order = np.argsort(self.codes[0], kind="stable")
        codes = self.codes[0][self.order]
        found: dict[str, Columns] = {}
        for key in keys:
            code = self.known.get(key)
            if code is None:
                continue
            low, high = np.searchsorted(codes, [code, code + 1]).tolist()
            if low < high:
                rows = self.order[low:high]
                arrays = {name: parts[0][rows] for name, parts in self.arrays.items()}
                found[key] = Columns(_KIND, high - low, arrays)
        return found


@dataclass(slots=True)
class _Kept:
    """The tail of one writer as it was read: its first batch and the newest of them."""

    first: int
    newest: int = -1
    points: _Points = field(default_factory=_Points)


class MetricTails:
    """Reads the tails of writers; what is short is kept, so that only what came since is decoded.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def read(
        self, rows: StoredRows, writer: WriterRow, keys: Sequence[str]
    ) -> Iterator[dict[str, Columns]]:
        """The points of metrics in a writer's tail, in order, in parts of bounded size.

        Points of other metrics than these are decoded of a short tail only.
        """
        (first,) = rows.connection.execute(
            "SELECT min(number) FROM batch WHERE writer_pk = ? AND kind = ?", (writer.pk, _KIND)
        ).fetchone()
        kept = self._kept.pop(writer.pk, None)
        if first is None:
            return
        if kept is None or kept.first != first:
            kept = _Kept(first)
        if not self._is_short(rows, writer, kept):
            yield from _stream(rows, writer, keys)
            return
        for number, count, body in rows.open_batches(writer, _KIND, kept.newest):
            kept.newest = number
            _add(rows, writer, number, count, body, kept.points)
        self._kept[writer.pk] = kept
        while len(self._kept) > 1 and self._count_rows() > _KEPT_ROWS:
            self._kept.popitem(last=False)
        yield kept.points.split(keys)

    def _count_rows(self) -> int:
        return sum(kept.points.count for kept in self._kept.values())

    def _is_short(self, rows: StoredRows, writer: WriterRow, kept: _Kept) -> bool:
        """Whether the tail, with what came since it was kept, may be kept."""
        counts = rows.connection.execute(
            "SELECT count FROM batch WHERE writer_pk = ? AND kind = ? AND number > ? LIMIT ?",
            (writer.pk, _KIND, kept.newest, _BACKLOG_BATCHES + 1),
        ).fetchall()
        new = sum(count for (count,) in counts)
        return len(counts) <= _BACKLOG_BATCHES and kept.points.count + new <= _KEPT_ROWS


def _stream(
    rows: StoredRows, writer: WriterRow, keys: Sequence[str]
) -> Iterator[dict[str, Columns]]:
    known = {key: code for code, key in enumerate(keys)}
    points = _Points(dict(known))
    batches = records = 0
    for number, count, body in rows.open_batches(writer, _KIND, -1):
        batches += 1
        records += count
        _add(rows, writer, number, count, body, points, len(keys))
        if points.count >= _PART_ROWS:
            yield points.split(keys)
            points = _Points(dict(known))
    rows.met_backlog |= records > _BACKLOG_ROWS or batches > _BACKLOG_BATCHES
    if points.count:
        yield points.split(keys)


def _add(
    rows: StoredRows,
    writer: WriterRow,
    number: int,
    count: int,
    body: DecodedBody | None,
    points: _Points,
    wanted: int | None = None,
) -> None:
    if body is None:
        return
    try:
        points.add(body, wanted)
    except (SchemaValidationError, ValueError, TypeError, KeyError, IndexError) as error:
        rows.warn_of_batch(writer, number, count, error)
