"""FingerprintWriter: what data and outputs were, found out beside training."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from quark_core.config import settings
from quark_core.config.arguments import check_label, describe_argument
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.names import check_text
from quark_core.runs.open_run import OpenRun
from quark_core.runs.step_counters import read_step
from quark_core.sessions.session import PendingFingerprint
from quark_core.system.process import importing, list_members

if TYPE_CHECKING:
    from quark.provenance.fingerprints import DataFingerprint
    from quark_core.sessions.session import TrainingSession

_log = logging.getLogger("quark")

_MOST_WAITING = 64
_LOOK_S = 0.02
# What gets on is waited for at the run's end, but not for ever.
_END_WAIT_S = 30.0
_LEVELS = ("sample", "full")
_TOOLS = ("arrays", "fingerprints", "watched_data")


class _Cancelled(Exception):
    """The run has ended, and what is left is not waited for."""


class FingerprintWriter:
    """Writes fingerprints into a run; one for each run and process, made by `find_writer`.

    Whatever fails costs a warning once, never a step.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        # A signal handler may come in, for which no queue with a lock would do either.
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._pid = 0
        self._queue: queue.SimpleQueue[tuple[PendingFingerprint, Callable[[], None]]] = (
            queue.SimpleQueue()
        )
        self._waiting = 0
        self._progress = 0
        self._is_over = False
        self._dropped = 0
        self._warned: set[str] = set()
        # Weak, so that a pass that was left early ends where it is left.
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        _load_tools()
        run.writers.add(self)

    def bind(self) -> None:
        """Take up the run's stream, which was replaced: in a forked child nothing waits."""
        if self._owner == os.getpid():
            return
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._pid = self._waiting = self._dropped = 0
        self.streams = weakref.WeakSet()

    def settle(self) -> None:
        """Before the run ends: write what streams have seen, and wait for what gets on."""
        for stream in list_members(self.streams):
            stream.end()
        limit_s = settings.exit_timeout_s()
        begun = since = time.monotonic()
        seen = self._progress
        while self._waiting > 0 and self._pid == os.getpid():
            now = time.monotonic()
            if self._progress != seen:
                seen, since = self._progress, now
            if now - since > limit_s or now - begun > max(limit_s, _END_WAIT_S):
                self.warn(
                    "late",
                    f"{self._waiting} fingerprints are not ready at the end of the run and are "
                    'omitted. level="sample" takes less time',
                )
                break
            time.sleep(_LOOK_S)
        self._is_over = True
        if self._dropped:
            self.warn("dropped", f"{self._dropped} fingerprints came too fast and are omitted")

    def fingerprint(
        self, key: object, value: Any, step: int | None, level: str
    ) -> PendingFingerprint:
        """See `TrainingSession.fingerprint`."""
        name = check_label(key, "key")
        step = read_step(self._run, step)
        _check_level(level)
        if self._run.refusal is not None:
            self._run.refuse("fingerprint")
        pending = PendingFingerprint(name)
        if not self._run.stream.active:
            pending.settle(None, "this process stores no records")
            return pending
        step = self._run.step if step is None else step
        try:
            self._take_output(pending, value, step, level)
        except Exception as error:  # noqa: BLE001 - a step must not fail for this
            self._fail(pending, "output", error)
        return pending

    def _take_output(
        self, pending: PendingFingerprint, value: Any, step: int | None, level: Any
    ) -> None:
        with importing():  # another thread may fork this process meanwhile
            from quark.provenance.arrays import detach_device_values, has_device_values
            from quark.provenance.fingerprints import sketch_output

        if not has_device_values(value):
            # Hashing it costs what copying it would, and nobody can change it meanwhile.
            found = sketch_output(value, level=level)
            self._put(
                pending, "output", found.digest, found.level, step, found.sketch, found.unseen
            )
            return
        bring_over = detach_device_values(value)
        if bring_over is None:
            text = f"fingerprint {pending.key!r}: it is too large to be copied on its device"
            pending.settle(None, text)
            self.warn(f"large {pending.key}", text)
            return

        def work() -> None:
            found = sketch_output(bring_over(), level=level)
            self._put(
                pending, "output", found.digest, found.level, step, found.sketch, found.unseen
            )

        self._submit(pending, work)

    def fingerprint_data(self, key: object, source: object, level: str) -> PendingFingerprint:
        """See `TrainingSession.fingerprint_data`."""
        name = check_label(key, "key")
        _check_level(level)
        if self._run.refusal is not None:
            self._run.refuse("fingerprint_data")
        pending = PendingFingerprint(name)
        if not self._run.stream.active or not self._run.leads:
            pending.settle(None, "another process of the run computes it")
            return pending
        try:
            self._take_data(pending, source, level)
        except SchemaValidationError:
            raise
        except Exception as error:  # noqa: BLE001 - a step must not fail for this
            self._fail(pending, "data", error)
        return pending

    def _take_data(self, pending: PendingFingerprint, source: object, level: Any) -> None:
        with importing():
            from quark.provenance.fingerprints import plan_fingerprint

        find_out = plan_fingerprint(source, level, self._advance)

        def work() -> None:
            found: DataFingerprint = find_out()
            self._put_data(pending, found)

        self._submit(pending, work)

    def _put_data(self, pending: PendingFingerprint, found: DataFingerprint) -> None:
        record = self.write(
            "data", pending.key, found.digest, found.level, None, found.sketch, found.metadata
        )
        for trouble in ("unreadable", "changed", "not_the_same_twice", "failed"):
            if trouble in found.metadata:
                about = found.metadata.get("error") or found.metadata[trouble]
                words = trouble.replace("_", " ")
                self.warn(
                    f"{pending.key} {trouble}",
                    f"fingerprint of data {pending.key!r}: {words} ({about!s:.200}); "
                    f"its level is {found.level!r}",
                )
        pending.settle(record)

    def _put(
        self,
        pending: PendingFingerprint,
        subject: Literal["data", "output"],
        digest: str,
        level: str,
        step: int | None,
        sketch: Mapping[str, Any] | None,
        unseen: tuple[str, ...],
    ) -> None:
        metadata = {"unseen": list(unseen)} if unseen else None
        pending.settle(self.write(subject, pending.key, digest, level, step, sketch, metadata))

    def write(
        self,
        subject: str,
        key: str,
        digest: str,
        level: str,
        step: int | None = None,
        sketch: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> FingerprintRecord:
        """Put a fingerprint into the run's stream."""
        if self._is_over:
            raise _Cancelled
        return self._run.emit(
            FingerprintRecord,
            subject,
            key,
            # One text that is no Unicode would take all the records of its batch along.
            check_text(digest, "digest"),
            check_text(level, "level"),
            step,
            None if sketch is None else JsonObject(sketch),
            None if metadata is None else JsonObject(metadata),
        )

    def write_stream(self, key: str, digest: str, level: str, metadata: Mapping[str, Any]) -> None:
        """Put into the run what a pass through data has seen; nothing after the run's end."""
        if not self._is_over and not self._run.is_over:
            self.write("data", key, digest, level, self._run.step, None, metadata)

    def warn(self, about: str, text: str) -> None:
        """Say something once: on the log, and in the run."""
        if about in self._warned:
            return
        self._warned.add(about)
        _log.warning("%s", text)
        if not self._run.is_over:
            self._run.emit_event(
                "fingerprint_failed", "warning", payload=JsonObject({"message": text})
            )

    def _submit(self, pending: PendingFingerprint, work: Callable[[], None]) -> None:
        with self._lock:
            if self._pid != os.getpid():
                # The first one, or a forked child, which has none of its parent's threads.
                self._queue = queue.SimpleQueue()
                threading.Thread(
                    target=self._serve, args=(self._queue,), name="quark-fingerprints", daemon=True
                ).start()
                self._pid = os.getpid()
            if self._waiting >= _MOST_WAITING:
                self._dropped += 1
                pending.settle(None, f"{_MOST_WAITING} fingerprints are already waiting")
                return
            self._waiting += 1
        self._queue.put((pending, work))

    def _serve(
        self, works: queue.SimpleQueue[tuple[PendingFingerprint, Callable[[], None]]]
    ) -> None:
        while True:
            pending, work = works.get()
            try:
                self._advance()
                work()
            except _Cancelled:
                pending.settle(None, "the run ended before it was computed")
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                self._fail(pending, "data", error)
            finally:
                if not pending.done:
                    pending.settle(None, "it could not be computed")
                with self._lock:
                    self._waiting -= 1
            del pending, work

    def _advance(self) -> None:
        self._progress += 1
        if self._is_over:
            raise _Cancelled

    def _fail(self, pending: PendingFingerprint, subject: str, error: BaseException) -> None:
        text = f"fingerprint {pending.key!r} failed: {type(error).__name__}: {error!s:.300}"
        self.warn(f"{subject} {pending.key}", text)
        pending.settle(None, text)


def _check_level(level: object) -> None:
    if not isinstance(level, str) or level not in _LEVELS:
        raise SchemaValidationError(
            f"level must be one of {', '.join(map(repr, _LEVELS))}, got {describe_argument(level)}"
        )


def _load_tools() -> None:
    """Import what calls need, once: a fork waits for it, and no later call imports anything."""
    with contextlib.suppress(Exception), importing():
        for name in _TOOLS:
            import_module(f"quark.provenance.{name}")


def find_writer(run: OpenRun) -> FingerprintWriter:
    """The writer of a run in this process; made at the first call."""
    found = run.extensions.get(FingerprintWriter)
    if isinstance(found, FingerprintWriter):
        return found
    # The run's lock: a signal handler may come in, and a forked child has one of its own.
    with run.lock:
        found = run.extensions.get(FingerprintWriter)
        if isinstance(found, FingerprintWriter):
            return found
        made = FingerprintWriter(run)
        found = run.extensions.setdefault(FingerprintWriter, made)
        return found if isinstance(found, FingerprintWriter) else made


def fingerprint(
    session: TrainingSession, key: str, value: object, step: int | None, level: str
) -> PendingFingerprint:
    """See `TrainingSession.fingerprint`."""
    return find_writer(session.open_run).fingerprint(key, value, step, level)


def fingerprint_data(
    session: TrainingSession, key: str, source: object, level: str
) -> PendingFingerprint:
    """See `TrainingSession.fingerprint_data`."""
    return find_writer(session.open_run).fingerprint_data(key, source, level)
