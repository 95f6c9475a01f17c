"""How far a run has come, and what came into it since a cursor."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.encoding.bodies import has_json
from quark_backends.store.encoding.chunks import BatchSpan, decode_spans
from quark_backends.store.reading.stored_rows import StoredRows, WriterRow, hide_rows
from quark_core.backends.curves import Cursor, RunChanges, RunHeads
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import can_be_hidden
from quark_core.records.codec import BODY_HEAD_BYTES, measure_body
from quark_core.records.columns import Columns
from quark_core.records.query import Query

_ALL = Query(all_attempts=True)
# Records that hold JSON values are read up to so many bytes of bodies at once, of which memory
# may take fifty times as many. Records of chunks are counted as of so many bytes each.
_MOST_BYTES = 2 * 2**20
_ROW_BYTES = 256
_SHAPE = ""
"""Under this name a cursor has what tells whether earlier reads still hold; no writer has it."""
_WITHIN = "\x01"
"""Before a writer's name: how many rows of its next batch were read already."""


def read_heads(rows: StoredRows, run_pk: int) -> RunHeads:
    """How far a run has come."""
    return RunHeads(
        cursor=_Writers.find(rows, run_pk).make_cursor(),
        outputs=_count_outputs(rows.connection, run_pk),
    )


def read_changes(
    rows: StoredRows,
    run_pk: int,
    writers: Sequence[WriterRow],
    cursor: Cursor,
    *,
    kinds: Sequence[str],
    keys: Sequence[str] | None,
    all_attempts: bool,
    max_rows: int,
) -> RunChanges:
    """What came since a cursor; see `SupportsChanges`.

    Args:
        rows: Loads rows.
        run_pk: The run.
        writers: Its writers, in persistence order.
        cursor: Up to where the run was read.
        kinds: Kinds of records that are wanted.
        keys: Stored keys of the metrics that are wanted; None for all.
        all_attempts: Also what a later attempt hides.
        max_rows: How many records are given at most.
    """
    found = _Writers.find(rows, run_pk)
    outputs = _count_outputs(rows.connection, run_pk)
    if found.is_stale(cursor, kinds):
        return RunChanges(cursor=cursor, stale=True, outputs=outputs)
    following = found.make_cursor()
    parts: dict[str, list[Columns]] = {}
    left, bytes_left, more = max_rows, _MOST_BYTES, False
    for writer in writers:
        start, end = cursor.get(writer.writer_id, 0), following[writer.writer_id]
        if start >= end:
            continue
        within = cursor.get(f"{_WITHIN}{writer.writer_id}", 0)
        if left <= 0 or bytes_left <= 0:
            following[writer.writer_id], more = start, True
            if within:
                following[f"{_WITHIN}{writer.writer_id}"] = within
            continue
        new = _find_new(rows.connection, writer, start, kinds, left, within, bytes_left)
        left -= new.count
        bytes_left -= new.size_bytes
        if new.end is not None:
            following[writer.writer_id], more = new.end, True
            if new.within:
                following[f"{_WITHIN}{writer.writer_id}"] = new.within
        for kind in kinds:
            its = _load(rows, writer, kind, new, keys)
            if not all_attempts:
                its = hide_rows(its, rows.find_hidden(writer, kind, keys))
            if its.count:
                parts.setdefault(kind, []).append(its)
    records = {kind: Columns.concatenate(kind, its) for kind, its in parts.items()}
    return RunChanges(cursor=following, records=records, more=more, outputs=outputs)


@dataclass(frozen=True, slots=True)
class _Writers:
    """The writers of a run: of each its next number, and what its points look like to readers."""

    ends: Mapping[str, int]
    looks: Mapping[str, str]

    @classmethod
    def find(cls, rows: StoredRows, run_pk: int) -> _Writers:
        """Those of a run."""
        connection = rows.connection
        found = connection.execute(
            "SELECT pk, id, head, attempt, hidden_step FROM writer WHERE run_pk = ? ORDER BY pk",
            (run_pk,),
        ).fetchall()
        hidden: dict[int, list[str]] = {}
        if any(row[4] is not None for row in found):
            noted = connection.execute(
                "SELECT writer_pk, kind, sequence FROM hidden WHERE writer_pk IN"
                " (SELECT pk FROM writer WHERE run_pk = ?) ORDER BY writer_pk, kind",
                (run_pk,),
            )
            for writer_pk, kind, sequence in noted:
                hidden.setdefault(writer_pk, []).append(f"{kind}:{sequence}")
        if len({row[3] for row in found}) > 1:
            for writer_pk, looks in rows.list_replaced(run_pk).items():
                hidden.setdefault(writer_pk, []).extend(looks)
        return cls(
            {writer_id: head + 1 for _, writer_id, head, _, _ in found},
            {
                writer_id: f"{writer_id}/{attempt}/{step}/{','.join(hidden.get(pk, ()))}"
                for pk, writer_id, _, attempt, step in found
            },
        )

    def make_cursor(self) -> dict[str, int]:
        """The cursor of this moment."""
        return {**self.ends, _SHAPE: self._take_shape(self.ends)}

    def is_stale(self, cursor: Cursor, kinds: Sequence[str]) -> bool:
        """Whether a cursor's reader has seen what is not there any more, or not like that.

        What a later attempt hides is nothing to who reads only what cannot be hidden.
        """
        known = [name for name in cursor if name != _SHAPE and not name.startswith(_WITHIN)]
        if any(name not in self.ends or cursor[name] > self.ends[name] for name in known):
            return True
        if not known or not any(map(can_be_hidden, kinds)):
            return False
        return cursor.get(_SHAPE) != self._take_shape(known)

    def _take_shape(self, names: Sequence[str] | Mapping[str, int]) -> int:
        """A number that tells apart how these writers look."""
        return zlib.crc32("\n".join(sorted(self.looks[name] for name in names)).encode())


@dataclass(slots=True)
class _New:
    """Batches of one writer that a reader has not seen.

    Attributes:
        numbers: Those that are batches still, by kind.
        cuts: Of those of them that are not wanted whole: which of their rows, by number.
        sequences: Sequences of those that were compacted, by kind.
        count: How many records they hold, at least.
        size_bytes: How many bytes those have that hold JSON values.
        end: The number to go on with, where there are more; None where these are all.
        within: How many rows of that one were found already.
    """

    numbers: dict[str, list[int]] = field(default_factory=dict)
    cuts: dict[int, slice] = field(default_factory=dict)
    sequences: dict[str, list[int]] = field(default_factory=dict)
    count: int = 0
    size_bytes: int = 0
    end: int | None = None
    within: int = 0


class _Waiting(NamedTuple):
    """A batch that was not compacted: its records, and its body."""

    rows: int
    head: bytes
    stored_bytes: int

    @property
    def size_bytes(self) -> int:
        """How large the body is once it is decompressed."""
        return measure_body(bytes(self.head), self.stored_bytes)


def _find_new(
    connection: StoreConnection,
    writer: WriterRow,
    start: int,
    kinds: Sequence[str],
    limit: int,
    within: int,
    limit_bytes: int,
) -> _New:
    """A writer's batches of these kinds from a number on, the oldest rows of them up to limits.

    A batch may hold more than the limit, and its rows be long: then it is given in parts. Its
    rows count in the order of their sequences, which compacting does not change.
    """
    marks = ", ".join("?" * len(kinds))
    waiting = connection.execute(
        f"SELECT number, kind, count, substr(body, 1, {BODY_HEAD_BYTES}), length(body) FROM batch"
        f" WHERE writer_pk = ? AND kind IN ({marks})"
        " AND number >= ? ORDER BY number",
        (writer.pk, *kinds, start),
    )
    new = _New()
    for number, kind, found in _merge(
        ((number, kind, _Waiting(*its)) for number, kind, *its in waiting),
        _iterate_spans(connection, writer, start, kinds),
    ):
        if new.count >= limit or new.size_bytes >= limit_bytes:
            new.end = number
            break
        count = len(found.sequences) if isinstance(found, BatchSpan) else found.rows
        if has_json(kind):
            size = count * _ROW_BYTES if isinstance(found, BatchSpan) else found.size_bytes
            if new.count and new.size_bytes + size > limit_bytes:
                new.end = number
                break
            new.size_bytes += size
        first = min(within, count) if number == start else 0
        last = min(count, first + limit - new.count)
        if isinstance(found, BatchSpan):
            sequences = sorted(found.sequences)[first:last]
            new.sequences.setdefault(kind, []).extend(sequences)
        else:
            new.numbers.setdefault(kind, []).append(number)
            if (first, last) != (0, count):
                new.cuts[number] = slice(first, last)
        new.count += last - first
        if last < count:
            new.end, new.within = number, last
            break
    waiting.close()
    return new


def _merge(
    waiting: Iterator[tuple[int, str, _Waiting]], spans: Iterator[tuple[int, str, BatchSpan]]
) -> Iterator[tuple[int, str, _Waiting | BatchSpan]]:
    """Both by their numbers, no two of which are the same."""
    from heapq import merge

    yield from merge(waiting, spans, key=lambda item: item[0])  # type: ignore[misc]


def _iterate_spans(
    connection: StoreConnection, writer: WriterRow, start: int, kinds: Sequence[str]
) -> Iterator[tuple[int, str, BatchSpan]]:
    """What was compacted of a writer from a number on, by number."""
    frames = connection.execute(
        "SELECT first_number, body FROM frame WHERE writer_pk = ? AND last_number >= ?"
        " ORDER BY first_number",
        (writer.pk, start),
    )
    held: list[tuple[int, str, BatchSpan]] = []
    for first, body in frames:
        # Frames of several kinds overlap, so that only what is before the next one is in order.
        held.sort(key=lambda item: item[0])
        while held and held[0][0] < first:
            yield held.pop(0)
        try:
            kind, spans = decode_spans(body)
        except SchemaValidationError:
            continue  # told of where batches are given back
        if kind in kinds:
            held += [(span.number, kind, span) for span in spans if span.number >= start]
    frames.close()
    yield from sorted(held, key=lambda item: item[0])


def _load(
    rows: StoredRows, writer: WriterRow, kind: str, new: _New, keys: Sequence[str] | None
) -> Columns:
    """Rows of one kind that are new, in order; of metrics only these."""
    by_key = kind == MetricRecord.KIND and keys is not None
    parts: list[Columns] = []
    sequences = new.sequences.get(kind)
    if sequences:
        parts.append(_load_compacted(rows, writer, kind, sequences, keys if by_key else None))
    numbers = new.numbers.get(kind, ())
    whole = [number for number in numbers if number not in new.cuts]
    parts += rows.load_batches(writer, kind, whole, {})
    for number in numbers:
        if number in new.cuts:
            for part in rows.load_batches(writer, kind, [number], {}):
                parts.append(part.order_by_sequence().take(new.cuts[number]))
    wanted = []
    for part in parts:
        chosen = part
        if by_key and part.count:
            names = frozenset(keys or ())
            chosen = part.take(np.array([name in names for name in part["metric_key"].tolist()]))
        if chosen.count:
            wanted.append(chosen)
    found = Columns.concatenate(kind, wanted)
    return found.order_by_sequence() if can_be_hidden(kind) or len(wanted) > 1 else found


def _load_compacted(
    rows: StoredRows,
    writer: WriterRow,
    kind: str,
    sequences: Sequence[int],
    keys: Sequence[str] | None,
) -> Columns:
    wanted = np.unique(np.array(sequences, dtype=np.int64))
    names = None if keys is None else rows.find_keys(keys)
    if names is None:
        chunks = rows.find_chunks(writer, kind, _ALL)
    else:
        by_name = rows.find_series_chunks(writer, list(names.values()))
        chunks = [entry for its in by_name.values() for entry in its]
    low, high = int(wanted[0]), int(wanted[-1])
    near = [
        entry for entry in chunks if entry.last_sequence >= low and entry.first_sequence <= high
    ]
    found = rows.read_chunks(writer, kind, near)
    return found.take(np.isin(found["sequence"], wanted))


def _count_outputs(connection: StoreConnection, run_pk: int) -> int:
    """How many generations of outputs a run has."""
    (found,) = connection.execute(
        "SELECT count(*) FROM generation WHERE run_pk = ?", (run_pk,)
    ).fetchone()
    return int(found)
