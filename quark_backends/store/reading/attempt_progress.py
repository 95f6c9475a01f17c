"""Progress of a run's attempts in each series, which determines the replaced steps.

Of chunks the index tells the highest step, and one chunk of each series the first. What is not
compacted yet is read, and remembered, so that it is read once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from quark_backends.store.batch_bodies import number_texts, open_body
from quark_backends.store.databases.connection import StoreConnection
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.attempts import (
    REPLACED_KINDS,
    HiddenRows,
    Reach,
    ReachesByAttempt,
    join_ranks,
    list_later_reaches,
)
from quark_core.records.codec import DecodedBody
from quark_core.records.schema import column_types

_log = logging.getLogger("quark")

_KEPT_CHUNKS = 100_000
_KEPT_TAILS = 1_000
_MANY = 500
# Below so many rows plain Python is as quick as numpy is to set up.
_FEW_ROWS = 64
_MALFORMED = (SchemaValidationError, ValueError, TypeError, KeyError, IndexError)


class AttemptWriter(NamedTuple):
    """A writer, of an attempt that does not say from which step it goes on or of one that does.

    Attributes:
        pk: Its number in the store.
        attempt, rank: Of its records.
        has_from_step: Whether its attempt was resumed from a step.
    """

    pk: int
    attempt: int
    rank: int
    has_from_step: bool


class _Stretch(NamedTuple):
    """Steps, or epochs, of some points of a series.

    Attributes:
        sequence: Of the point that was logged first.
        first: Its step.
        last: The highest step.
    """

    sequence: int
    first: int
    last: int

    def join(self, other: _Stretch | None) -> _Stretch:
        if other is None:
            return self
        first = min(self, other)
        return _Stretch(first.sequence, first.first, max(self.last, other.last))


class _Seen(NamedTuple):
    """What is known of a series in some rows of one writer."""

    steps: _Stretch | None = None
    epochs: _Stretch | None = None

    def join(self, other: _Seen | None) -> _Seen:
        if other is None:
            return self
        return _Seen(_join(self.steps, other.steps), _join(self.epochs, other.epochs))

    def to_reach(self) -> Reach | None:
        if self.steps is not None:
            return Reach(self.steps.first, self.steps.last)
        if self.epochs is not None:
            return Reach(self.epochs.first, self.epochs.last, on_epochs=True)
        return None


def _join(one: _Stretch | None, other: _Stretch | None) -> _Stretch | None:
    return other if one is None else one.join(other)


@dataclass(slots=True)
class _Tail:
    """What was read of a writer's batches: the first and the last of them, and its series."""

    first: int
    newest: int = -1
    series: dict[str, _Seen] = field(default_factory=dict)


class _Chunk(NamedTuple):
    name_pk: int
    pk: int
    first_sequence: int
    step_high: int


class AttemptReaches:
    """Finds how far attempts have come, of one store; not for several threads at once."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Seen] = {}
        self._tails: dict[tuple[int, str], _Tail] = {}
        self._names: dict[int, str] = {0: ""}

    def find_hidden(
        self,
        connection: StoreConnection,
        writers: Sequence[AttemptWriter],
        pk: int,
        kind: str,
        keys: Collection[str] | None = None,
    ) -> dict[str, tuple[Reach, ...]]:
        """Series -> the stretches that later attempts have replaced of a writer's rows.

        A stretch ends where the writer itself had come to, at the latest.

        Args:
            connection: The store.
            writers: All writers of the run.
            pk: Whose rows may be hidden.
            kind: Of which kind.
            keys: Only of these metrics.
        """
        if kind not in REPLACED_KINDS:
            return {}
        attempt = next((each.attempt for each in writers if each.pk == pk), -1)
        later = [each for each in writers if each.attempt > attempt and not each.has_from_step]
        if not later or attempt < 0:
            return {}
        own = self._read(connection, pk, kind, keys, needs_first=False)
        if not own:
            return {}
        reaches = self.find(connection, later, kind, keys)
        found: dict[str, tuple[Reach, ...]] = {}
        for series, its in list_later_reaches(attempt, reaches).items():
            seen = own.get(series, _Seen())
            bounded = [_bound(reach, seen) for reach in its]
            some = tuple(reach for reach in bounded if reach is not None)
            if some:
                found[series] = some
        return found

    def list_replaced(self, connection: StoreConnection, run_pk: int) -> dict[int, list[str]]:
        """Writer -> what later attempts have replaced of its rows, as texts to compare."""
        writers = load_attempt_writers(connection, run_pk)
        found: dict[int, list[str]] = {}
        for kind in sorted(REPLACED_KINDS):
            for writer in writers:
                for series, reaches in self.find_hidden(
                    connection, writers, writer.pk, kind
                ).items():
                    found.setdefault(writer.pk, []).extend(
                        f"{kind}:{series}:{reach.first}:{reach.last}" for reach in reaches
                    )
        return found

    def find(
        self,
        connection: StoreConnection,
        writers: Iterable[AttemptWriter],
        kind: str,
        keys: Collection[str] | None = None,
        *,
        needs_first: bool = True,
    ) -> ReachesByAttempt:
        """How far the attempts of these writers have come with each series of a kind.

        Args:
            connection: The store.
            writers: Whose points count, in persistence order.
            kind: Which kind.
            keys: Only of these metrics.
            needs_first: Whether the first step is needed, and not the last one alone.
        """
        found: dict[int, dict[str, dict[int, Reach]]] = {}
        for writer in writers:
            its = self._read(connection, writer.pk, kind, keys, needs_first=needs_first)
            for series, seen in its.items():
                reach = seen.to_reach()
                if reach is None:
                    continue
                by_rank = found.setdefault(writer.attempt, {}).setdefault(series, {})
                known = by_rank.get(writer.rank)
                by_rank[writer.rank] = reach if known is None else _go_on(known, reach)
        return {
            attempt: {series: join_ranks(by_rank.values()) for series, by_rank in its.items()}
            for attempt, its in found.items()
        }

    def _read(
        self,
        connection: StoreConnection,
        writer_pk: int,
        kind: str,
        keys: Collection[str] | None,
        *,
        needs_first: bool,
    ) -> Mapping[str, _Seen]:
        if kind != MetricRecord.KIND:
            keys = None
        tail = self._read_tail(connection, writer_pk, kind)
        found = self._read_chunks(connection, writer_pk, kind, keys, needs_first=needs_first)
        for series, seen in tail.items():
            if keys is None or series in keys:
                found[series] = seen.join(found.get(series))
        return found

    def _read_chunks(
        self,
        connection: StoreConnection,
        writer_pk: int,
        kind: str,
        keys: Collection[str] | None,
        *,
        needs_first: bool,
    ) -> dict[str, _Seen]:
        condition, names = "", list[int]()
        if keys is not None:
            names = _find_names(connection, keys)
            if not names:
                return {}
            if len(names) > _MANY:
                names = []  # all are read, and those that nobody asked for are no harm
            else:
                condition = f"AND name_pk IN ({', '.join('?' * len(names))})"
        rows = connection.execute(
            "SELECT name_pk, pk, first_sequence, step_high FROM chunk"
            f" WHERE writer_pk = ? AND kind = ? {condition} ORDER BY name_pk, first_sequence, pk",
            (writer_pk, kind, *names),
        ).fetchall()
        found: dict[str, _Seen] = {}
        for name_pk, group in groupby((_Chunk(*row) for row in rows), key=lambda c: c.name_pk):
            chunks = list(group)
            stepped = [chunk for chunk in chunks if chunk.step_high >= 0]
            seen = _Seen()
            # Where points have steps, it is not asked which epochs they are of.
            for chunk in (stepped[:1] if needs_first else ()) if stepped else chunks:
                seen = seen.join(self._read_chunk(connection, kind, chunk.pk))
            if stepped:
                begun, highest = stepped[0], max(chunk.step_high for chunk in stepped)
                steps = seen.steps or _Stretch(begun.first_sequence, begun.step_high, highest)
                seen = _Seen(steps._replace(last=max(steps.last, highest)), seen.epochs)
            found[self._find_name(connection, name_pk)] = seen
        return found

    def _read_chunk(self, connection: StoreConnection, kind: str, pk: int) -> _Seen:
        known = self._chunks.get(pk)
        if known is not None:
            return known
        from quark_backends.store.chunks import decode_chunk

        (body,) = connection.execute("SELECT body FROM chunk WHERE pk = ?", (pk,)).fetchone()
        try:
            chunk = decode_chunk(kind, body)
            steps, sequences = chunk.array("step"), chunk.array("sequence")
            epochs = chunk.array("epoch") if "epoch" in column_types(kind) else steps
        except SchemaValidationError as error:
            _log.debug("the steps of chunk %d cannot be read: %s", pk, error)
            return _Seen()
        found: list[_Stretch | None] = []
        for places, counts in ((steps, steps >= 0), (epochs, (steps < 0) & (epochs >= 0))):
            rows = counts.nonzero()[0]
            found.append(
                _Stretch(int(sequences[rows[0]]), int(places[rows[0]]), int(places[rows].max()))
                if len(rows)
                else None
            )
        if len(self._chunks) >= _KEPT_CHUNKS:
            self._chunks.clear()
        seen = self._chunks[pk] = _Seen(*found)
        return seen

    def _read_tail(
        self, connection: StoreConnection, writer_pk: int, kind: str
    ) -> Mapping[str, _Seen]:
        (first,) = connection.execute(
            "SELECT min(number) FROM batch WHERE writer_pk = ? AND kind = ?", (writer_pk, kind)
        ).fetchone()
        tail = self._tails.pop((writer_pk, kind), None)
        if first is None:
            return {}
        if tail is None or tail.first != first:
            tail = _Tail(first)
        rows = connection.execute(
            "SELECT number, digest, body FROM batch"
            " WHERE writer_pk = ? AND kind = ? AND number > ? ORDER BY number",
            (writer_pk, kind, tail.newest),
        )
        for number, digest, body in rows:
            try:
                _add_body(tail.series, open_body(body, digest), kind)
            except _MALFORMED as error:
                _log.debug("the steps of batch %d cannot be read: %s", number, error)
            tail.newest = number
        while len(self._tails) >= _KEPT_TAILS:
            del self._tails[next(iter(self._tails))]
        self._tails[writer_pk, kind] = tail
        return tail.series

    def _find_name(self, connection: StoreConnection, name_pk: int) -> str:
        if name_pk not in self._names:
            row = connection.execute("SELECT text FROM name WHERE pk = ?", (name_pk,)).fetchone()
            self._names[name_pk] = "" if row is None else row[0]
        return self._names[name_pk]


def load_attempt_writers(connection: StoreConnection, run_pk: int) -> list[AttemptWriter]:
    """The writers of a run in persistence order; none where no attempt followed another."""
    rows = connection.execute(
        "SELECT writer.pk, writer.attempt, rank, from_step IS NOT NULL FROM writer"
        " LEFT JOIN attempt ON attempt.run_pk = writer.run_pk AND number = writer.attempt"
        " WHERE writer.run_pk = ? ORDER BY writer.attempt, rank, writer.started_us, id",
        (run_pk,),
    ).fetchall()
    if len({row[1] for row in rows}) < 2:
        return []
    return [AttemptWriter(pk, attempt, rank, bool(known)) for pk, attempt, rank, known in rows]


def find_hidden_metrics(
    connection: StoreConnection,
    reaches: AttemptReaches,
    writers: Sequence[AttemptWriter],
    pk: int,
    hidden_step: int | None,
    sequence: int | None,
) -> HiddenRows | None:
    """Which metrics of a writer later attempts have hidden; None where none.

    Args:
        connection: The store.
        reaches: Finds how far attempts have come.
        writers: All writers of the run.
        pk: The writer.
        hidden_step, sequence: What a resume from a step has hidden; see the tables.
    """
    replaced = reaches.find_hidden(connection, writers, pk, MetricRecord.KIND)
    if hidden_step is None and not replaced:
        return None
    return HiddenRows(hidden_step, sequence, replaced)


def _bound(reach: Reach, own: _Seen) -> Reach | None:
    """The part of a stretch to which a writer had come; None where it had not come to it."""
    if reach.on_epochs and own.steps is not None:
        return reach  # of a series with steps it is not asked which epochs its points are of
    seen = own.epochs if reach.on_epochs else own.steps
    if seen is None or reach.first > seen.last:
        return None
    return reach._replace(last=min(reach.last, seen.last))


def _go_on(known: Reach, reach: Reach) -> Reach:
    """What two writers of one rank have reached, the first of them first."""
    if known.on_epochs != reach.on_epochs:
        return reach if known.on_epochs else known
    return known._replace(last=max(known.last, reach.last))


def _find_names(connection: StoreConnection, keys: Collection[str]) -> list[int]:
    wanted, found = list(keys), list[int]()
    for start in range(0, len(wanted), _MANY):
        part = wanted[start : start + _MANY]
        marks = ", ".join("?" * len(part))
        rows = connection.execute(f"SELECT pk FROM name WHERE text IN ({marks})", part)
        found += [pk for (pk,) in rows.fetchall()]
    return found


def _add_body(series: dict[str, _Seen], body: DecodedBody, kind: str) -> None:
    """Take note of a batch's rows.

    Raises:
        SchemaValidationError, ValueError, TypeError, KeyError, IndexError: It is malformed.
    """
    if body.count > _FEW_ROWS:
        _add_arrays(series, body, kind)
        return
    steps, sequences = body.to_list("step"), body.to_list("sequence")
    epochs = body.to_list("epoch") if "epoch" in column_types(kind) else [None] * body.count
    keys = body.to_list("metric_key") if kind == MetricRecord.KIND else [""] * body.count
    for key, step, epoch, sequence in zip(keys, steps, epochs, sequences, strict=True):
        if step is not None and step >= 0:
            seen = _Seen(steps=_Stretch(sequence, step, step))
        elif epoch is not None and epoch >= 0:
            seen = _Seen(epochs=_Stretch(sequence, epoch, epoch))
        else:
            continue
        series[key] = seen.join(series.get(key))


def _add_arrays(series: dict[str, _Seen], body: DecodedBody, kind: str) -> None:
    """As `_add_body`, of many rows at once."""
    import numpy as np

    steps, sequences = body.to_array("step"), body.to_array("sequence")
    epochs = body.to_array("epoch") if "epoch" in column_types(kind) else np.full_like(steps, -1)
    names: dict[str, int] = {"": 0}
    codes = np.zeros(body.count, dtype=np.int64)
    if kind == MetricRecord.KIND:
        codes = number_texts(body, "metric_key", names)
    if {len(sequences), len(epochs), len(codes)} != {len(steps)}:
        raise SchemaValidationError("its columns are of different lengths")
    texts = list(names)
    order = np.lexsort((sequences, codes))
    for places, counts in ((steps, steps >= 0), (epochs, (steps < 0) & (epochs >= 0))):
        rows = order[counts[order]]
        if not len(rows):
            continue
        starts = np.flatnonzero(np.diff(codes[rows], prepend=-1))
        lasts = np.maximum.reduceat(places[rows], starts).tolist()
        begun = rows[starts]
        for code, sequence, first, last in zip(
            codes[begun].tolist(),
            sequences[begun].tolist(),
            places[begun].tolist(),
            lasts,
            strict=True,
        ):
            stretch = _Stretch(sequence, first, last)
            seen = _Seen(stretch) if places is steps else _Seen(None, stretch)
            series[texts[code]] = seen.join(series.get(texts[code]))
