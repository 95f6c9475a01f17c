"""Stores batches, each exactly once, also of runs that several processes write at once."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from quark_backends.store.batch_bodies import digest_body
from quark_backends.store.databases.connection import PutBack, StoreConnection
from quark_backends.store.writing.lifecycle import (
    GivenAttempt,
    PreparedRecord,
    apply_lifecycle,
    check_attempt,
    make_attempt_event,
    prepare,
)
from quark_backends.store.writing.metrics import MetricFold, NameTable, Overlaps, place_writer
from quark_backends.store.writing.summaries import apply_fingerprints, rebuild_metrics
from quark_core.backends.contract import Batch
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import RECORD_TYPES, LifecycleRecord, MetricRecord
from quark_core.records.attempts import HiddenRows, can_be_hidden
from quark_core.records.codec import MALFORMED
from quark_core.records.kinds.provenance import FingerprintRecord

INSERT_BATCH = (
    "INSERT INTO batch (pk, writer_pk, kind, number, count, digest, body)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
"""Stores a batch."""

ADVANCE_HEAD = "UPDATE writer SET head = ? WHERE pk = ?"
"""Says what a writer's newest batch is."""

_INT64_MAX = 2**63 - 1
# Bound parameters of one statement.
_MANY = 500


@dataclass(slots=True)
class StoredWriter:
    """A writer as the store has it; see the table. `is_trashed` says it of its run."""

    pk: int
    run_pk: int
    head: int
    started_us: int
    hidden_step: int | None
    attempt: int
    is_trashed: bool = False


class SharedRuns:
    """What one transaction holds of a shared database; belongs to its thread.

    Args:
        connection: The store.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._held: set[str] = set()
        self._writers: dict[tuple[str, str], StoredWriter] = {}
        # What waits to be written together.
        self._rows: list[tuple[object, ...]] = []
        self._moved: dict[int, StoredWriter] = {}

    def clear(self) -> None:
        """The transaction has ended."""
        self._held.clear()
        self._writers.clear()
        self._rows.clear()
        self._moved.clear()

    def hold(self, batches: Sequence[Batch]) -> None:
        """Lock the runs of batches until the transaction ends, and find their writers."""
        execute = self._connection.execute
        for run_ids in _cut({batch.run_id for batch in batches}):
            # In one order everywhere: who writes the same runs waits, and does not deadlock.
            rows = execute(
                f"SELECT pk, id, trashed_us FROM run WHERE id IN ({_marks(run_ids)}) ORDER BY id"
                f"{self._connection.for_update}",
                run_ids,
            )
            found = rows.fetchall()
            held = {run_pk: run_id for run_pk, run_id, _ in found}
            trashed = {run_pk for run_pk, _, trashed_us in found if trashed_us is not None}
            self._held.update(held.values())
            for writer_ids in _cut({batch.writer_id for batch in batches}) if held else ():
                # A statement of its own: one that waited for the lock would see old heads.
                rows = execute(
                    "SELECT id, pk, run_pk, head, started_us, hidden_step, attempt FROM writer"
                    f" WHERE run_pk IN ({_marks(held)}) AND id IN ({_marks(writer_ids)})",
                    (*held, *writer_ids),
                )
                for writer_id, *row in rows:
                    writer = StoredWriter(*row)
                    writer.is_trashed = writer.run_pk in trashed
                    self._writers[held[writer.run_pk], writer_id] = writer

    def hold_run(self, run_id: str) -> bool:
        """Lock a run that may not have been there a moment ago; whether it is there now."""
        if run_id not in self._held:
            found = self._connection.execute(
                f"SELECT pk FROM run WHERE id = ?{self._connection.for_update}", (run_id,)
            ).fetchone()
            if found is None:
                return False
            self._held.add(run_id)
        return True

    def find(self, batch: Batch) -> StoredWriter | None:
        """The writer of a batch, if it is known."""
        return self._writers.get((batch.run_id, batch.writer_id))

    def know(self, batch: Batch, writer: StoredWriter) -> None:
        """Take note of the writer of a batch."""
        self._writers[batch.run_id, batch.writer_id] = writer

    def forget_writers(self) -> None:
        """What was known of them may have changed."""
        self._writers.clear()

    def add(self, writer: StoredWriter, batch: Batch, digest: bytes) -> None:
        """Store a batch and advance its writer's head, by the time of `flush`.

        Raises:
            ValueError: It can never be stored.
            OverflowError: As well.
        """
        # Now, since the statement that stores many would not say which of them it was.
        batch.kind.encode()
        if max(batch.number, batch.count) > _INT64_MAX:
            raise OverflowError("a number of the batch is too large")
        self._rows.append(
            (
                self._connection.new_key(),
                writer.pk,
                batch.kind,
                batch.number,
                batch.count,
                digest,
                batch.body,
            )
        )
        self._moved[writer.pk] = writer

    def flush(self) -> None:
        """Write what waits to be written together."""
        if self._rows:
            self._connection.executemany(INSERT_BATCH, self._rows)
            self._rows.clear()
        if self._moved:
            heads = [(writer.head, pk) for pk, writer in self._moved.items()]
            self._connection.executemany(ADVANCE_HEAD, heads)
            self._moved.clear()


def _cut(values: set[str]) -> Iterator[list[str]]:
    """Values in order, in parts that one statement takes."""
    ordered = sorted(values)
    for start in range(0, len(ordered), _MANY):
        yield ordered[start : start + _MANY]


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


_log = logging.getLogger("quark")

_NO_HEAD = -1
# Without a key: SQLite then need not look whether there is such a row.
_INSERT_LAST = (
    "INSERT INTO batch (writer_pk, kind, number, count, digest, body) VALUES (?, ?, ?, ?, ?, ?)"
)


class BatchIngest:
    """Writes batches over one connection; belongs to one thread.

    The writer's head advances in the same transaction as the data, so a batch
    that is delivered again, after a lost reply or a crash, is recognised by
    its number and acknowledged without being stored again. What is known of a
    run without reading it (its metrics' figures, tags, configuration, newest
    step) changes in that transaction too.

    Several processes may write one run of a shared database at once: each
    locks the run first, so that they take turns.

    Args:
        connection: The store.
        known_names: Committed names of metrics, which other threads may know too.
        let_go: Filled with removed runs whose late batches are acknowledged, and not stored.
        heads: Run and writer -> number of the newest batch that is known to be committed.
    """

    def __init__(
        self,
        connection: StoreConnection,
        known_names: dict[str, int] | None = None,
        let_go: set[str] | None = None,
        heads: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self._connection = connection
        self._heads = {} if heads is None else heads
        self._names = NameTable(connection, known_names)
        # Of the transaction that is open: figures of runs, and runs whose figures must be remade.
        self._folds: dict[int, MetricFold] = {}
        self._stale: set[int] = set()
        self._overlaps = Overlaps(connection)
        self._prepared: dict[int, list[PreparedRecord]] = {}
        self._shared = SharedRuns(connection) if connection.is_shared else None
        self.let_go = set[str]() if let_go is None else let_go

    def write(self, batches: Sequence[Batch]) -> None:
        """Store batches in one transaction.

        Raises:
            BackendRejected: One of them can never be stored; none was.
            BackendUnavailable: The database is busy, full or out of reach; none was.
        """
        try:
            self.write_once(batches)
        except self._connection.Error as error:
            raise BackendUnavailable(f"{self._connection.product}: {error}") from error
        except SessionStoreError as error:
            # What is stored already cannot be read here now, and may be later.
            raise BackendUnavailable(str(error)) from error

    def write_once(self, batches: Sequence[Batch]) -> None:
        """As `write`, with the errors of the database as they are.

        Raises:
            BackendRejected: One of them can never be stored; none was.
            SessionStoreError: What is stored already cannot be read; none was.
        """
        try:
            self._prepared = prepare(batches)
        except MALFORMED:
            # Its batch is found again, and refused by its name, when its turn comes.
            self._prepared = {}
        self.write_made(lambda: batches)

    def write_made(self, make: Callable[[], Sequence[Batch]]) -> None:
        """As `write_once`, of batches that are made inside of the transaction.

        Args:
            make: Makes them, out of what it reads and locks over the connection. What it
                raises ends the transaction.
        """
        connection = self._connection
        try:
            connection.begin_write()
            batches = make()
            if self._shared is not None:
                self._shared.hold(batches)
            for batch in batches:
                self._store_checked(batch)
            self._finish(batches)
            connection.commit()
            self._names.keep()
        except BaseException:
            self._names.forget()
            self._overlaps.forget()
            connection.rollback()
            raise
        finally:
            self._folds.clear()
            self._stale.clear()
            self._prepared = {}
            if self._shared is not None:
                self._shared.clear()

    def _finish(self, batches: Sequence[Batch]) -> None:
        """Write what waits for the end.

        Raises:
            BackendRejected: Something in it is malformed; nobody can tell in which batch.
        """
        try:
            self._flush()
            self._write_figures()
        except (*MALFORMED, self._connection.Error) as error:
            if not isinstance(error, MALFORMED) and not self._connection.is_malformed(error):
                raise
            if len(batches) == 1:
                raise _reject(batches[0], error) from error
            raise BackendRejected(
                f"one of {len(batches)} batches is malformed: {error!r}"
            ) from error

    def _store_checked(self, batch: Batch) -> None:
        """Store a batch, or find that it never can be.

        Raises:
            BackendRejected: Its content is malformed.
        """
        try:
            self._store(batch)
        except MALFORMED as error:
            raise _reject(batch, error) from error
        except self._connection.Error as error:
            if not self._connection.is_malformed(error):
                raise
            raise _reject(batch, error) from error

    def _flush(self) -> None:
        if self._shared is not None:
            self._shared.flush()

    def _write_figures(self) -> None:
        """Add what the batches say of metrics to what is known of their runs."""
        made = self._names.find_all(
            key for fold in self._folds.values() for key in fold.list_keys()
        )
        for run_pk in self._stale:
            began_s = time.monotonic()
            rebuild_metrics(self._connection, run_pk, self._names.find)
            self._overlaps.rest(run_pk, time.monotonic() - began_s)
        for run_pk, fold in self._folds.items():
            if run_pk not in self._stale:
                fold.write(self._connection, run_pk, self._names.find, goes_on=not made)
        self._folds.clear()
        self._stale.clear()

    def _store(self, batch: Batch) -> None:
        digest = digest_body(batch.body)
        writer = self._find_writer(batch)
        if writer is not None and batch.number <= writer.head:
            self._recognise(writer.pk, batch, digest)
            return
        if (writer is None or writer.is_trashed) and self._is_removed(batch):
            self._note_let_go(batch.run_id)
            return
        head = _NO_HEAD if writer is None else writer.head
        if head < self._heads.get((batch.run_id, batch.writer_id), _NO_HEAD):
            raise PutBack(f"writer {batch.writer_id} ends at {head}")
        attempt = batch.attempt if writer is None else writer.attempt
        given: GivenAttempt | None = None
        if batch.kind == LifecycleRecord.KIND:
            # A resumed run's figures are made again of what is stored, the last batch included.
            self._flush()
            self._write_figures()
            try:
                # A start makes the run that its writer belongs to.
                given = self._apply(batch, attempt)
            except BackendRejected:
                # Another process may have stored this very batch since the run was looked for.
                writer = self._find_writer(batch) if writer is None else None
                if self._shared is None or writer is None or batch.number > writer.head:
                    raise
                self._recognise(writer.pk, batch, digest)
                return
        if given is not None:
            attempt = given.number
        if writer is None:
            writer = self._add_writer(batch, attempt)
        elif writer.attempt != attempt:
            self._move_writer(writer, attempt)
        self._add_batch(writer, batch, digest)
        hidden = None
        if writer.hidden_step is not None and can_be_hidden(batch.kind):
            hidden = self._note_hidden(writer, batch)
        self._sum_up(writer, batch, hidden)
        if given is not None:
            self._store(make_attempt_event(batch, given))

    def _sum_up(self, writer: StoredWriter, batch: Batch, hidden: HiddenRows | None) -> None:
        """Have what is known of the run without reading it say what the batch says."""
        if batch.kind == MetricRecord.KIND:
            fold = self._folds.get(writer.run_pk)
            if fold is None:
                fold = self._folds[writer.run_pk] = MetricFold()
            place = place_writer(writer.attempt, batch.rank)
            fold.add_body(batch.decoded, place, writer.started_us, hidden)
            if not self._overlaps.knows(writer.run_pk, writer.attempt):
                self._flush()
            if self._overlaps.note(writer.run_pk, writer.attempt, batch.decoded):
                self._stale.add(writer.run_pk)
        elif batch.kind == FingerprintRecord.KIND:
            rows = batch.decoded
            apply_fingerprints(
                self._connection, writer.run_pk, writer.attempt, batch.rank, rows, hidden
            )
        elif batch.kind in RECORD_TYPES and batch.decoded.count != batch.count:
            raise SchemaValidationError(f"it holds {batch.decoded.count} records")
        elif batch.kind == LifecycleRecord.KIND and self._turns(batch):
            self._flush()
            if self._overlaps.settle(writer.run_pk, writer.attempt):
                self._stale.add(writer.run_pk)

    def _turns(self, batch: Batch) -> bool:
        """Whether an attempt begins or ends."""
        return not {"start", "status"}.isdisjoint(batch.decoded.to_list("action"))

    def _add_batch(self, writer: StoredWriter, batch: Batch, digest: bytes) -> None:
        writer.head = batch.number
        if self._shared is not None:
            self._shared.add(writer, batch, digest)
            return
        execute = self._connection.execute
        row = (writer.pk, batch.kind, batch.number, batch.count, digest, batch.body)
        execute(_INSERT_LAST, row)
        execute(ADVANCE_HEAD, (batch.number, writer.pk))

    def _find_writer(self, batch: Batch) -> StoredWriter | None:
        if self._shared is not None:
            found = self._shared.find(batch)
            if found is not None or not self._shared.hold_run(batch.run_id):
                return found
        row = self._connection.execute(
            "SELECT writer.pk, run_pk, head, started_us, hidden_step, writer.attempt,"
            " trashed_us IS NOT NULL FROM writer JOIN run ON run.pk = run_pk"
            " WHERE run.id = ? AND writer.id = ?",
            (batch.run_id, batch.writer_id),
        ).fetchone()
        if row is None:
            return None
        writer = StoredWriter(*row)
        if self._shared is not None:
            self._shared.know(batch, writer)
        return writer

    def _is_removed(self, batch: Batch) -> bool:
        """Whether the batch is a late one of a run that was removed for good.

        Raises:
            BackendRejected: It begins a new run under the old id.
        """
        row = self._connection.execute(
            "SELECT removed_us FROM removed WHERE run_id = ?", (batch.run_id,)
        ).fetchone()
        if row is None:
            return False
        if batch.kind == LifecycleRecord.KIND and _begins_after(batch, row[0]):
            raise BackendRejected(
                f"run {batch.run_id} was removed from this store. Choose another ID"
            )
        return True

    def _note_let_go(self, run_id: str) -> None:
        if run_id not in self.let_go:
            self.let_go.add(run_id)
            _log.warning(
                "run %s was permanently deleted from this store; its new records are dropped",
                run_id,
            )

    def _add_writer(self, batch: Batch, attempt: int) -> StoredWriter:
        execute = self._connection.execute
        run = execute(
            f"SELECT pk, attempt FROM run WHERE id = ?{self._connection.for_update}",
            (batch.run_id,),
        ).fetchone()
        if run is None:
            raise BackendRejected(f"run {batch.run_id} was never started in this store")
        check_attempt(batch.run_id, attempt, run[1])
        # An attempt that began before this writer's first batch came hides what it says too.
        (hidden_step,) = execute(
            "SELECT min(from_step) FROM attempt WHERE run_pk = ? AND number > ?",
            (run[0], attempt),
        ).fetchone()
        started_us = self._find_start(batch)
        pk = self._connection.insert(
            "INSERT INTO writer (pk, run_pk, id, attempt, rank, started_us, head, hidden_step)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run[0],
                batch.writer_id,
                attempt,
                batch.rank,
                started_us,
                _NO_HEAD,
                hidden_step,
            ),
        )
        writer = StoredWriter(pk, run[0], _NO_HEAD, started_us, hidden_step, attempt)
        if self._shared is not None:
            self._shared.know(batch, writer)
        return writer

    def _move_writer(self, writer: StoredWriter, attempt: int) -> None:
        """Put a writer whose start came after other batches of it under its attempt."""
        self._connection.execute("UPDATE writer SET attempt = ? WHERE pk = ?", (attempt, writer.pk))
        writer.attempt = attempt
        self._stale.add(writer.run_pk)

    def _find_start(self, batch: Batch) -> int:
        try:
            return int(min(batch.decoded.to_list("time_us")))
        except SchemaValidationError:
            return time.time_ns() // 1000  # a kind that only a newer Quark knows

    def _note_hidden(self, writer: StoredWriter, batch: Batch) -> HiddenRows:
        """Which of a late batch's rows a later attempt has hidden."""
        assert writer.hidden_step is not None
        execute = self._connection.execute
        steps, sequences = batch.decoded.to_list("step"), batch.decoded.to_list("sequence")
        beyond = [
            sequence
            for step, sequence in zip(steps, sequences, strict=True)
            if step is not None and step >= writer.hidden_step
        ]
        row = execute(
            "SELECT sequence FROM hidden WHERE writer_pk = ? AND kind = ?", (writer.pk, batch.kind)
        ).fetchone()
        first = None if row is None else row[0]
        if beyond and (first is None or min(beyond) < first):
            if batch.kind == MetricRecord.KIND:
                # Points without a step that were counted may be hidden from now on.
                self._stale.add(writer.run_pk)
            first = min(beyond)
            execute(
                "INSERT INTO hidden (writer_pk, kind, sequence) VALUES (?, ?, ?)"
                " ON CONFLICT (writer_pk, kind) DO UPDATE SET sequence = excluded.sequence"
                " WHERE excluded.sequence < hidden.sequence",
                (writer.pk, batch.kind, first),
            )
        return HiddenRows(writer.hidden_step, first)

    def _recognise(self, writer_pk: int, batch: Batch, digest: bytes) -> None:
        self._flush()
        row = self._connection.execute(
            "SELECT digest FROM batch WHERE writer_pk = ? AND kind = ? AND number = ?",
            (writer_pk, batch.kind, batch.number),
        ).fetchone()
        if row is not None and row[0] != digest:
            raise BackendRejected(
                f"batch {batch.number} of writer {batch.writer_id} came again with other content"
            )

    def _apply(self, batch: Batch, attempt: int) -> GivenAttempt | None:
        """Apply the records of a batch; returns the attempt that its start is given, if it is.

        Args:
            batch: The batch.
            attempt: Attempt of its writer, as the store has it.
        """
        given: GivenAttempt | None = None
        for prepared in self._prepared.get(id(batch)) or prepare([batch])[id(batch)]:
            record = prepared.record
            if record.attempt != attempt:
                record = msgspec.structs.replace(record, attempt=attempt)
                prepared = dataclasses.replace(prepared, record=record)
            found = apply_lifecycle(self._connection, prepared, self._names)
            if found is not None:
                given, attempt = found, found.number
            if record.action == "start" and self._shared is not None:
                # It may have hidden what other writers say from some step on.
                self._shared.forget_writers()
        return given


def _reject(batch: Batch, error: Exception) -> BackendRejected:
    return BackendRejected(
        f"batch {batch.number} of writer {batch.writer_id} is malformed: {error!r}"
    )


def _begins_after(batch: Batch, removed_us: int) -> bool:
    """Whether a batch begins an attempt that no removal can have been meant for."""
    for record in batch.to_records():
        if isinstance(record, LifecycleRecord) and record.action == "start":
            # What was begun without the store may be older, but nobody has ever seen it there.
            unseen = record.data is not None and record.data.get("offline") is not None
            return unseen or record.time_us > removed_us
    return False
