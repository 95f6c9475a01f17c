"""Makes the index of a journal's segment out of the segment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from quark_backends.embedded.segment_index import (
    ChunkHead,
    IndexHead,
    JournalLook,
    KeptBatch,
    Part,
    SegmentIndex,
    SegmentState,
    digest_segment,
    encode_index,
    find_index,
    find_state,
    load_index,
    name_index,
    write_index,
)
from quark_backends.store.batch_bodies import digest_body
from quark_backends.store.databases.connection import SqliteConnection
from quark_backends.store.databases.sqlite import connect_memory
from quark_backends.store.upkeep.compaction import Compactor, Work
from quark_backends.store.writing.ingest import INSERT_BATCH
from quark_backends.store.writing.metrics import MetricFold
from quark_core.backends.contract import Batch
from quark_core.delivery.journal_folder import find_folders
from quark_core.delivery.segments import DamagedSegment, parse_segment
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, LifecycleRecord, MetricRecord
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.system.folders import read_plain_file

_log = logging.getLogger("quark")

# What is less stays as it came.
_FEW_BATCHES = 16
_FEW_BYTES = 64 * 1024
# A chunk for each few points is larger and slower than the batches that they came in.
_LEAST_POINTS = 16
_WRITER = 1
_POLL_S = 0.2
_REST = 4
# Kinds that say something of the run itself: they are played as they came.
_APPLIED = (FingerprintRecord.KIND, LifecycleRecord.KIND)
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def build_index(segment: Path, *, keep: bool = True) -> SegmentIndex | None:
    """Make the index of a segment that nobody writes to any more.

    Args:
        segment: The segment.
        keep: Whether to keep it beside the segment, where that can be written.

    Returns:
        The index, None where there can be none: the segment is damaged, holds what this
        Quark does not know, or too many metrics of too few points.
    """
    try:
        state = find_state(segment)
        data = read_plain_file(segment)
        parsed = parse_segment(data)
        if len(data) != state.size_bytes or find_state(segment) != state:
            return None
    except (OSError, DamagedSegment) as error:
        _log.debug("no index of %s: %s", segment, error)
        return None
    digest = digest_segment(data)
    del data
    if not parsed.is_contiguous:
        return None
    connection = connect_memory()
    try:
        fold = _take_batches(connection, parsed.batches)
        first, last = parsed.batches[0], parsed.batches[-1]
        parsed.batches.clear()
        if fold is None:
            return None
        _compact(connection)
        head, parts = _Layout(connection).read()
        encoded = encode_index(
            IndexHead(
                state=state,
                digest=digest,
                run_id=first.run_id,
                writer_id=first.writer_id,
                attempt=first.attempt,
                rank=first.rank,
                first=first.number,
                end=last.number + 1,
                started_us=min(first.decoded.to_list("time_us")),
                newest_step=fold.newest_step,
                figures=fold.list_figures(),
                batches=_list_batches(connection, first),
                frames=connection.execute(
                    "SELECT first_number, last_number, body FROM frame ORDER BY first_number"
                ).fetchall(),
                chunks=head,
            ),
            parts,
        )
    except (SchemaValidationError, *_MALFORMED, connection.Error) as error:
        # Whoever reads the batches one by one leaves out just those that are malformed.
        _log.debug("no index of %s: %s", segment, error)
        return None
    finally:
        connection.close()
    if keep and write_index(segment, encoded):
        return find_index(segment)
    return load_index(name_index(segment), encoded)


def index_root(storage_dir: Path, beat: Callable[[], object], *, idle_s: float = 0.0) -> None:
    """Make the indexes that the journals of a root lack.

    Args:
        storage_dir: The storage root.
        beat: Called now and then, as long as there is something to do.
        idle_s: How long to wait for more where a journal is being written.
    """
    known: dict[Path, SegmentState] = {}
    worked_at = time.monotonic()
    while True:
        begun_at = time.monotonic()
        beat()
        is_written = False
        for folder in find_folders(storage_dir):
            manifest = folder.read_manifest()
            if manifest is None or manifest.generation:
                continue
            look = JournalLook.take(folder, manifest)
            is_written |= look.is_written and not look.is_closed
            for name in look.sealed:
                segment = folder.path / name
                if known.get(segment) == look.states[name]:
                    continue
                known[segment] = look.states[name]
                if find_index(segment) is None:
                    build_index(segment)
                    beat()
                    worked_at = time.monotonic()
        now = time.monotonic()
        if not is_written or now - worked_at >= idle_s:
            return
        # Where looking takes long, others want the file system as well.
        time.sleep(max(_POLL_S, _REST * (now - begun_at)))


def _take_batches(connection: SqliteConnection, batches: Sequence[Batch]) -> MetricFold | None:
    """Put batches into the store's table; the figures of their metrics.

    None where an index would not be worth it.

    Raises:
        SchemaValidationError: One of them is malformed.
    """
    fold = MetricFold()
    points = 0
    connection.begin_write()
    for batch in batches:
        body = batch.decoded
        if body.kind != batch.kind or body.count != batch.count:
            raise SchemaValidationError(f"batch {batch.number} is malformed")
        if batch.kind == MetricRecord.KIND:
            fold.add_body(body, 0, 0, None)
            points += batch.count
        row = (batch.kind, batch.number, batch.count, digest_body(batch.body), batch.body)
        connection.execute(INSERT_BATCH, (None, _WRITER, *row))
    connection.commit()
    return fold if points >= _LEAST_POINTS * len(list(fold.list_keys())) else None


def _compact(connection: SqliteConnection) -> None:
    """Turn batches into chunks, but for few of a kind, and for what says something of the run."""
    compactor = Compactor(connection)
    waiting = connection.execute(
        "SELECT kind, count(*) FROM batch GROUP BY kind HAVING count(*) >= ?"
        " OR sum(length(body)) > ?",
        (_FEW_BATCHES, _FEW_BYTES),
    ).fetchall()
    for kind, count in waiting:
        if kind in RECORD_TYPES and kind not in _APPLIED:
            while compactor.compact(Work(_WRITER, kind, count)):
                pass
    (left,) = connection.execute(
        "SELECT count(*) FROM batch WHERE kind = ?", (MetricRecord.KIND,)
    ).fetchone()
    if left > _FEW_BATCHES or connection.execute("SELECT 1 FROM damaged").fetchone():
        raise SchemaValidationError("parts of it cannot be compacted")


def _list_batches(connection: SqliteConnection, first: Batch) -> list[KeptBatch]:
    """What is in no chunk, in order."""
    rows = connection.execute("SELECT number, kind, count, body FROM batch ORDER BY number")
    kept = [KeptBatch(number, kind, count, False, body) for number, kind, count, body in rows]
    beats = [
        place
        for place, batch in enumerate(kept)
        if batch.kind == LifecycleRecord.KIND and _is_beat(first, batch)
    ]
    passed = set(beats[:-1])
    return [
        KeptBatch(
            batch.number,
            batch.kind,
            batch.count,
            batch.kind in _APPLIED and place not in passed,
            batch.body,
        )
        for place, batch in enumerate(kept)
    ]


def _is_beat(first: Batch, kept: KeptBatch) -> bool:
    """Whether a batch says no more than that the process lives."""
    batch = Batch(
        first.run_id,
        first.writer_id,
        first.attempt,
        first.rank,
        kept.number,
        kept.kind,
        kept.count,
        kept.body,
    )
    return set(batch.decoded.to_list("action")) == {"heartbeat"}


class _Layout:
    """Lays chunks out in the parts of an index."""

    def __init__(self, connection: SqliteConnection) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def read(self) -> tuple[list[ChunkHead], list[bytes]]:
        """What the index's head says of the chunks, and the parts: roll-ups first."""
        rows = self._connection.execute(
            "SELECT kind, text, first_sequence, last_sequence, step_low, step_high, count, codec,"
            " rollup, chunk.pk FROM chunk LEFT JOIN name ON name.pk = name_pk ORDER BY chunk.pk"
        ).fetchall()
        rollups = [None if row[-2] is None else self._add(row[-2]) for row in rows]
        bodies = self._connection.execute("SELECT body FROM chunk ORDER BY pk")
        heads = [
            ChunkHead(kind, key, first, last, low, high, count, codec, rollup, self._add(body))
            for (kind, key, first, last, low, high, count, codec, *_), rollup, (body,) in zip(
                rows, rollups, bodies, strict=True
            )
        ]
        return heads, self._parts

    def _add(self, data: bytes) -> Part:
        part = Part(self._size_bytes, len(data), xxhash.xxh3_64_intdigest(data))
        self._parts.append(data)
        self._size_bytes += len(data)
        return part
