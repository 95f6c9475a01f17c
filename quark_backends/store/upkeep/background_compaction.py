"""Compaction in the background of a process that writes."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quark_backends.store.databases.connection import StoreConnection
from quark_core.errors import SessionStoreError
from quark_core.system.process import importing

if TYPE_CHECKING:
    from quark_backends.store.upkeep.compaction import Compactor, Work

_log = logging.getLogger("quark")

# Reading one metric out of more batches than this takes longer than it should.
_ENOUGH_BATCHES = 128
# So does reading it out of batches that hold more records than this, however few they are.
_ENOUGH_RECORDS = 131_072
# Where more than this waits, a process of its own does it: a loop that logs without a pause leaves
# the threads beside it too little of the interpreter.
_MUCH_RECORDS = 393_216
# A curve out of this many records is still drawn at once: the lane waits rather than leave more.
_MOST_RECORDS = 1_048_576
# It waits no longer than compaction takes for about as many as it brings, whatever keeps that from
# its work: a run that ends must be delivered, compacted or not.
_ROOM_S_PER_RECORD = 2e-6
_HELPED_S = 0.1
# At the end of a run a helper is not waited for any more once no more than this waits.
_FEW_RECORDS = 131_072
# Fewer are not worth the chunks that they would become.
_FEW_BATCHES = 16
_BETWEEN_TURNS_S = 0.02
_AFTER_FAILURE_S = 5.0
_TURN_S = 1.0
# What so many turns in a row do nothing to is left.
_TURNS = 5
_SETTLE_S = 0.2
# Reading so many batches takes longer than the end of a run should wait.
_MANY_BATCHES = 512
_CALM_S = 0.002
_PATIENCE_S = 1.0


class WriteGate:
    """Lets compaction change the store only while no batch waits to be written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._written_at = 0.0

    @contextmanager
    def write(self) -> Iterator[None]:
        """For the lane: it comes first."""
        self._waiting += 1
        try:
            with self._lock:
                yield
        finally:
            self._waiting -= 1
            self._written_at = time.monotonic()

    @contextmanager
    def step_in(self) -> Iterator[None]:
        """For compaction: wait for a calm moment, though not for ever."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and (
            self._waiting or time.monotonic() - self._written_at < _CALM_S
        ):
            time.sleep(_CALM_S)
        with self._lock:
            yield


class BackgroundCompaction:
    """Compacts on a thread of its own, which is started once there is enough to do.

    Args:
        connect: Opens a connection for the thread.
        gate: The gate of the lane that writes in this process.
        find_helper: Returns whether a process of its own compacts this store now; it is
            asked to start one where its argument is True.
    """

    def __init__(
        self,
        connect: Callable[[], StoreConnection],
        gate: WriteGate,
        find_helper: Callable[[bool], bool] | None = None,
    ) -> None:
        self._connect = connect
        self._gate = gate
        self._find_helper = find_helper
        self._batches = self._records = 0
        # About how many records wait in batches of this process; guarded by the condition.
        self._waiting_records = 0
        self._turned = threading.Condition()
        self._is_unfinished = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._left = LeftWork()
        self._thread: threading.Thread | None = None

    def note(self, batches: int, records: int) -> None:
        """Take note of batches that were written, and of the records in them; by the lane."""
        self._batches += batches
        self._records += records
        with self._turned:
            self._waiting_records += records
        # The thread may be in a turn that takes long, for want of the interpreter.
        self._is_helped()
        if self._batches >= _ENOUGH_BATCHES or self._records >= _ENOUGH_RECORDS:
            self.resume()

    def resume(self) -> None:
        """Go on with what there is, whoever has left it."""
        self._batches = self._records = 0
        self._wake.set()
        if self._thread is None and not self._closing.is_set():
            thread = threading.Thread(target=self._run, name="quark-compaction", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.debug("compaction cannot start: %s", error)
                return
            self._thread = thread

    def wait_for_room(self, records: int) -> None:
        """Wait while too much waits for compaction to write more, though not for long; by the lane.

        What the lane has not written yet is safe in the journal, and readers
        of what it has written are not made to wait.

        Args:
            records: How many it is about to write.
        """
        most = max(_ENOUGH_RECORDS, _MOST_RECORDS - records)
        with self._turned:
            self._turned.wait_for(
                lambda: self._waiting_records <= most or not self._is_running,
                records * _ROOM_S_PER_RECORD,
            )

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self, timeout_s: float = 2.5) -> bool:
        """Do what still waits, or let a helper do most of it, for a time; end after a turn.

        Who reads a run right after its end reads what is left record by record.

        Returns:
            Whether nothing is left that is worth the work, as far as is known.
        """
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s + _TURN_S)
        return not self._is_unfinished and not self._is_running

    def _run(self) -> None:
        connection: StoreConnection | None = None
        closing = False
        while not closing:
            self._wake.wait()
            self._wake.clear()
            # A run that ends at once is not made to wait for numpy and the codecs.
            closing = self._closing.wait(_SETTLE_S)
            try:
                if connection is None:
                    connection = self._connect()
                # What a quick run leaves at its end is done then, if it is much.
                if not closing or self._left_much(connection):
                    self._is_unfinished = True
                    self._compact(connection)
            except Exception as error:  # noqa: BLE001 - the data is safe; the run must go on
                if not _is_passing(error, connection):
                    _log.exception("compaction failed; batches stay uncompacted")
                    break
                _log.debug("compaction waits: %s", error)
                self._closing.wait(_AFTER_FAILURE_S)
                if connection is not None:
                    # Another file may have taken the place of the one that it has open.
                    connection.close()
                    connection = None
            if connection is not None and connection.is_shared:
                # Others need it more while this thread waits.
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _compact(self, connection: StoreConnection) -> None:
        # numpy and the codecs are needed only now.
        with importing():
            import random

            from quark_backends.store.upkeep.compaction import Compactor

        compactor = Compactor(connection, self._gate.step_in)
        minimum = _ENOUGH_BATCHES // 2
        while work := self._find_work(compactor, minimum):
            if self._is_helped():
                if self._closing.is_set() and self._is_enough():
                    return
                time.sleep(_HELPED_S)
                self._note_waiting(compactor.count_recent_records())
                continue
            # Other processes may see the same work; few will begin with the same piece.
            random.shuffle(work)
            for item in work:
                if time.monotonic() >= self._deadline:
                    return
                done = compactor.compacted_records
                self._left.note(item, self._compact_one(compactor, item, connection))
                done = compactor.compacted_records - done
                # What another process wrote, or has compacted, was not counted the same here.
                self._note_waiting(max(0, self._waiting_records - done))
                if self._waiting_records <= _MUCH_RECORDS:
                    self._closing.wait(_BETWEEN_TURNS_S)
            minimum = _ENOUGH_BATCHES
        self._note_waiting(0)
        self._is_unfinished = False

    def _is_enough(self) -> bool:
        """Whether the end of the run may leave the rest to the helper."""
        return self._waiting_records <= _FEW_RECORDS or time.monotonic() >= self._deadline

    def _is_helped(self) -> bool:
        """Whether a process of its own does the work, which may just have been started for it."""
        much = self._waiting_records > _MUCH_RECORDS
        if self._find_helper is None or not (much or self._thread is not None):
            return False
        return self._find_helper(much)

    def _note_waiting(self, records: int) -> None:
        """Take note of how many records wait now."""
        with self._turned:
            self._waiting_records = records
            self._turned.notify_all()

    def _find_work(self, compactor: Compactor, minimum: int) -> list[Work]:
        return self._left.leave_out(find_work(compactor, minimum))

    def _left_much(self, connection: StoreConnection) -> bool:
        return self._waiting_records >= _ENOUGH_RECORDS or _count_most(connection) >= _MANY_BATCHES

    def _compact_one(
        self, compactor: Compactor, item: Work, connection: StoreConnection
    ) -> bool | None:
        """One turn; whether it did anything, None where it cannot be done."""
        try:
            return compactor.compact(item) > 0
        except Exception as error:
            if _is_passing(error, connection):
                raise
            _log.exception("compaction of %s records failed; they stay uncompacted", item.kind)
            return None


class LeftWork:
    """What is not tried again by this process; another one may."""

    def __init__(self) -> None:
        self._in_vain: dict[tuple[int, str], int] = {}

    def note(self, item: Work, did: bool | None) -> None:
        """Take note of a turn: whether it did anything, None where it cannot be done."""
        key = (item.writer_pk, item.kind)
        if did:
            self._in_vain.pop(key, None)
        else:
            # Another process may have been first: then there is something again the next time.
            self._in_vain[key] = _TURNS if did is None else self._in_vain.get(key, 0) + 1

    def leave_out(self, work: list[Work]) -> list[Work]:
        """The work without what is not tried again."""
        return [item for item in work if self._in_vain.get((item.writer_pk, item.kind), 0) < _TURNS]

    def __bool__(self) -> bool:
        return any(turns >= _TURNS for turns in self._in_vain.values())


def find_work(compactor: Compactor, minimum: int = _ENOUGH_BATCHES) -> list[Work]:
    """What is worth to be compacted now, by its batches or by what they hold.

    Args:
        compactor: It looks for it.
        minimum: How many batches of a run that goes on are worth it.
    """
    return (
        compactor.find_work(minimum=minimum)
        or compactor.find_heavy_work(_ENOUGH_RECORDS)
        or compactor.find_work(minimum=_FEW_BATCHES, ended_only=True)
    )


def _is_passing(error: Exception, connection: StoreConnection | None) -> bool:
    """Whether the store may be well again later."""
    if isinstance(error, SessionStoreError):
        return True
    return isinstance(error, sqlite3.Error if connection is None else connection.Error)


def _count_most(connection: StoreConnection) -> int:
    """How many batches the writer with the most of a kind has."""
    (found,) = connection.execute(
        "SELECT coalesce(max(batches), 0) FROM"
        " (SELECT count(*) AS batches FROM batch GROUP BY writer_pk, kind) AS waiting"
    ).fetchone()
    return int(found)
