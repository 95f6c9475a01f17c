"""Runs that several processes write at once: who writes one locks it, and writes in one go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from quark_backends.store.databases.connection import StoreConnection
from quark_core.backends.contract import Batch

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
