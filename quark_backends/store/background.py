"""Compaction in the background of a process that writes."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quark_backends.store.connection import StoreConnection
from quark_core.errors import SessionStoreError
from quark_core.forking import importing

if TYPE_CHECKING:
    from quark_backends.store.compaction import Compactor, Work

__all__ = ["BackgroundCompaction", "WriteGate"]

_log = logging.getLogger("quark")

# Reading one metric out of more batches than this takes longer than it should.
_ENOUGH_BATCHES = 128
# Fewer are not worth the chunks that they would become.
_FEW_BATCHES = 16
_BETWEEN_TURNS_S = 0.02
_AFTER_FAILURE_S = 5.0
_TURN_S = 1.0
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
    """

    def __init__(self, connect: Callable[[], StoreConnection], gate: WriteGate) -> None:
        self._connect = connect
        self._gate = gate
        self._batches = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._deadline = float("inf")
        # What could not be compacted; another process may try again.
        self._left: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None

    def note(self, batches: int) -> None:
        """Take note of batches that were written; by the lane."""
        self._batches += batches
        if self._batches < _ENOUGH_BATCHES:
            return
        self._batches = 0
        self._wake.set()
        if self._thread is None and not self._closing.is_set():
            thread = threading.Thread(target=self._run, name="quark-compaction", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.debug("compaction does not start: %s", error)
                return
            self._thread = thread

    def close(self, timeout_s: float = 1.0) -> None:
        """Do what still waits, for a time, and end the thread after its turn."""
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s + _TURN_S)

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
                if not closing or _count_most(connection) >= _MANY_BATCHES:
                    self._compact(connection)
            except Exception as error:  # noqa: BLE001 - the data is safe; the run must go on
                if not _is_passing(error, connection):
                    _log.exception("compaction failed; batches stay as they are")
                    break
                _log.debug("compaction waits: %s", error)
                self._closing.wait(_AFTER_FAILURE_S)
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

            from quark_backends.store.compaction import Compactor

        compactor = Compactor(connection, self._gate.step_in)
        minimum = _ENOUGH_BATCHES // 2
        while work := self._find_work(compactor, minimum):
            # Other processes may see the same work; few will begin with the same piece.
            random.shuffle(work)
            for item in work:
                if time.monotonic() >= self._deadline:
                    return
                if not self._compact_one(compactor, item, connection):
                    self._left.add((item.writer_pk, item.kind))
                self._closing.wait(_BETWEEN_TURNS_S)
            minimum = _ENOUGH_BATCHES

    def _find_work(self, compactor: Compactor, minimum: int) -> list[Work]:
        found = compactor.find_work(minimum=minimum)
        found = found or compactor.find_work(minimum=_FEW_BATCHES, ended_only=True)
        return [item for item in found if (item.writer_pk, item.kind) not in self._left]

    def _compact_one(self, compactor: Compactor, item: Work, connection: StoreConnection) -> bool:
        """One turn; whether it did anything."""
        try:
            return compactor.compact(item) > 0
        except Exception as error:
            if _is_passing(error, connection):
                raise
            _log.exception("compaction of %s records failed; they stay as they are", item.kind)
            return False


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
