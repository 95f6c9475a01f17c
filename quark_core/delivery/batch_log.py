"""The batches that wait for at least one lane, each lane at its own cursor."""

from __future__ import annotations

import threading
from collections import deque

from quark_core.backend import Batch

__all__ = ["BatchLog", "Cursor"]

DEFAULT_CAPACITY_BYTES = 64 * 1024 * 1024


class BatchLog:
    """An ordered log of batches in memory, bounded in bytes.

    Any thread may append; each cursor belongs to one reader. A batch is
    released when all cursors have passed it. Beyond the capacity the oldest
    batches go, and each cursor that had not passed them counts their records
    as dropped.
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._base = 0
        self._base_records = 0
        self._end_records = 0
        self._size_bytes = 0
        self._cursors: list[Cursor] = []

    def open_cursor(self) -> Cursor:
        """A new reader, placed at the oldest batch that is still here."""
        with self._changed:
            cursor = Cursor(self, self._base, self._base_records)
            self._cursors.append(cursor)
            return cursor

    def append(self, batch: Batch) -> None:
        """Add a batch and wake the readers."""
        with self._changed:
            if not self._cursors:
                return
            self._batches.append(batch)
            self._end_records += batch.count
            self._size_bytes += len(batch.body)
            while self._size_bytes > self._capacity_bytes and len(self._batches) > 1:
                self._drop_first()
            self._changed.notify_all()

    @property
    def end(self) -> int:
        """Position after the newest batch."""
        with self._changed:
            return self._base + len(self._batches)

    def _drop_first(self) -> None:
        batch = self._batches.popleft()
        self._base += 1
        self._base_records += batch.count
        self._size_bytes -= len(batch.body)

    def _release(self) -> None:
        passed = min(cursor.position for cursor in self._cursors)
        while self._base < passed:
            self._drop_first()


class Cursor:
    """One reader's place in a `BatchLog`.

    Attributes:
        position: Number of the batch that comes next.
        dropped_records: Records that went before this reader had them.
    """

    def __init__(self, log: BatchLog, position: int, records: int) -> None:
        self._log = log
        self._opened_at = records
        self._records = records
        self._woken = False
        self.position = position
        self.dropped_records = 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a batch is there or `wake` was called; whether one is there."""
        log = self._log
        with log._changed:
            log._changed.wait_for(
                lambda: self._woken or log._base + len(log._batches) > self.position, timeout_s
            )
            return log._base + len(log._batches) > self.position

    def wake(self) -> None:
        """End this reader's `wait` now, and every later one."""
        with self._log._changed:
            self._woken = True
            self._log._changed.notify_all()

    def peek(self, limit: int = 1) -> list[Batch]:
        """The next batches, oldest first, without passing them."""
        log = self._log
        with log._changed:
            self._skip_dropped()
            start = self.position - log._base
            stop = min(start + limit, len(log._batches))
            return [log._batches[index] for index in range(start, stop)]

    def advance(self, batches: list[Batch]) -> None:
        """Pass batches that `peek` returned and that are done with."""
        log = self._log
        with log._changed:
            self.position += len(batches)
            self._records += sum(batch.count for batch in batches)
            # A batch that was dropped while it was being delivered counts as delivered.
            if self.position >= log._base:
                log._release()
            log._changed.notify_all()

    def wait_passed(self, position: int, timeout_s: float) -> bool:
        """Wait until this reader has passed a position; whether it has."""
        with self._log._changed:
            return self._log._changed.wait_for(lambda: self.position >= position, timeout_s)

    def count_records(self) -> tuple[int, int, int]:
        """Records submitted since this reader was opened, waiting for it, and dropped."""
        with self._log._changed:
            self._skip_dropped()
            end = self._log._end_records
            return end - self._opened_at, end - self._records, self.dropped_records

    def _skip_dropped(self) -> None:
        log = self._log
        if self.position < log._base:
            self.dropped_records += log._base_records - self._records
            self.position = log._base
            self._records = log._base_records
