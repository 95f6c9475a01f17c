"""The notifier: takes notices, and sends each once, on threads of its own, not too many."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quark.notifications.notices import (
    Notice,
    NoticeChoice,
    describe_alert,
    describe_digest,
    describe_end,
    parse_choice,
)
from quark.notifications.targets import NotifyArgument, Target, parse_targets
from quark_core.config import settings
from quark_core.errors import QuarkError
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.runs.open_run import OpenRun, RunExtension
from quark_core.system.folders import read_plain_file

_MAX_BYTES = 4 * 1024 * 1024


class Ledger(Protocol):
    """Notes of what was told."""

    def note(self, key: str) -> bool:
        """Note that this is told now; False where it was noted before, by whomever.

        It is noted before it is sent: who dies in between tells it never, rather than twice.
        A ledger that cannot be written says True, and the notice is told.
        """


class FileLedger:
    """Notes in a file, a line of JSON each; from any thread.

    Args:
        path: The file; its folder is made where needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] | None = None
        self._lock = threading.Lock()

    def note(self, key: str) -> bool:
        """See `Ledger`."""
        with self._lock:
            if self._known is None:
                self._known = self._load()
            if key in self._known:
                return False
            self._known.add(key)
            self._keep(key)
        return True

    def take_up(self, keys: set[str]) -> None:
        """Take what another machine has noted for known."""
        with self._lock:
            self._known = (self._known if self._known is not None else self._load()) | keys

    def _load(self) -> set[str]:
        try:
            lines = read_plain_file(self._path)[:_MAX_BYTES].splitlines()
        except OSError:
            return set()
        found = set()
        for line in lines:
            try:
                key = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed
            if isinstance(key, str):
                found.add(key)
        return found

    def _keep(self, key: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # Begins with the end of a line, which a line that was cut off has not.
                os.write(descriptor, b"\n" + json.dumps(key).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:
            pass  # for this process it is known in any case


_log = logging.getLogger("quark")

_MAX_WAITING = 1_000
_MAX_HELD = 1_000
_TICK_S = 0.5
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How often people are told, and how hard it is tried.

    Attributes:
        topic_s: Seconds between two notices of one rule of one run; what comes in between is
            held back.
        per_hour: Notices in an hour, besides one digest of what was held back.
        timeout_s: How long a target may take for one notice.
        pauses_s: Before which further tries, where a target has surely not taken it.
    """

    topic_s: float = 600.0
    per_hour: int = 20
    timeout_s: float = 20.0
    pauses_s: Sequence[float] = (2.0, 10.0, 60.0)


class Notifier:
    """Tells targets; `tell` returns at once and never raises, from any thread.

    A notice is told at most once: it is noted in the ledger before it is sent, and tried again
    only where the target has surely not taken it. What targets do costs their own thread.

    Args:
        targets: Where notices go.
        choice: Which are told.
        ledger: What was told before.
        pacing: How often.
        on_told: Called with the key of what is told, on a thread of this.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        choice: NoticeChoice,
        ledger: Ledger,
        pacing: Pacing | None = None,
        on_told: Callable[[str], None] | None = None,
    ) -> None:
        self._choice = choice
        self._ledger = ledger
        self._pacing = pacing or Pacing()
        self._on_told = on_told
        self._waiting: deque[Notice] = deque()
        self._woken = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None
        self._idle = True
        self._held: list[Notice] = []
        self._held_keys: set[str] = set()
        self._topics: dict[tuple[str | None, str], float] = {}
        self._sent: deque[float] = deque()
        self._digest_due = 0.0
        self._lanes = [_Lane(target, self._pacing) for target in targets]
        self.dropped = 0
        """Notices that found no room."""

    def __repr__(self) -> str:
        return f"Notifier({', '.join(lane.name for lane in self._lanes)})"

    def tell(self, notice: Notice) -> None:
        """Tell of something, where it is chosen and was not told before."""
        if not self._choice.takes(notice):
            return
        with self._woken:
            if self._ends:
                return
            if len(self._waiting) >= _MAX_WAITING:
                self.dropped += 1
                return
            self._waiting.append(notice)
            self._idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quark-notify", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
                    self._waiting.clear()
                    self._idle = True
            self._woken.notify_all()

    def settle(self, wait_s: float) -> None:
        """Wait, so long at most, until what was told so far is noted; not until it is sent."""
        with self._woken:
            self._woken.wait_for(lambda: self._idle, wait_s)

    def close(self, wait_s: float) -> None:
        """Take no more, send a digest of what was held back, and wait so long at most."""
        deadline = time.monotonic() + wait_s
        with self._woken:
            self._ends = True
            self._woken.notify_all()
            thread = self._thread
        if thread is None:
            return
        thread.join(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        """The thread."""
        while True:
            with self._woken:
                if not self._waiting:
                    self._idle = True
                    self._woken.notify_all()
                if not self._waiting and not self._ends:
                    self._woken.wait(_TICK_S if self._held else None)
                notice = self._waiting.popleft() if self._waiting else None
                ends = self._ends
            try:
                if notice is not None:
                    self._take(notice, time.monotonic())
                    continue
                if self._held and (ends or self._is_digest_due(time.monotonic())):
                    self._send_digest(time.monotonic())
            except Exception:  # noqa: BLE001 - a bug of ours must not end this
                _log.warning("a notification could not be sent", exc_info=True)
            if ends:
                return

    def _take(self, notice: Notice, now: float) -> None:
        if notice.key in self._held_keys:
            return
        last = self._topics.get(notice.topic)
        too_soon = last is not None and now - last < self._pacing.topic_s
        if too_soon or self._count_hour(now) >= self._pacing.per_hour:
            if len(self._held) < _MAX_HELD:
                self._held.append(notice)
                self._held_keys.add(notice.key)
            else:
                self.dropped += 1
            if len(self._held) == 1:
                wait_s = self._pacing.topic_s if too_soon else self._free_again_in(now)
                self._digest_due = now + wait_s
            return
        if not self._note(notice):
            return
        if len(self._topics) > _MAX_HELD:
            self._topics = {k: t for k, t in self._topics.items() if now - t < self._pacing.topic_s}
        self._topics[notice.topic] = now
        self._sent.append(now)
        self._send(notice)

    def _count_hour(self, now: float) -> int:
        while self._sent and now - self._sent[0] >= _HOUR_S:
            self._sent.popleft()
        return len(self._sent)

    def _free_again_in(self, now: float) -> float:
        return max(0.0, self._sent[0] + _HOUR_S - now) if self._sent else 0.0

    def _is_digest_due(self, now: float) -> bool:
        return now >= self._digest_due

    def _send_digest(self, now: float) -> None:
        held, self._held, self._held_keys = self._held, [], set()
        told = [notice for notice in held if self._note(notice)]
        if not told:
            return
        self._sent.append(now)
        # One that was held back alone is told as it is.
        self._send(told[0] if len(told) == 1 else describe_digest(told))

    def _note(self, notice: Notice) -> bool:
        if not self._ledger.note(notice.key):
            return False
        if self._on_told is not None:
            self._on_told(notice.key)
        return True

    def _send(self, notice: Notice) -> None:
        for lane in self._lanes:
            lane.put(notice)


class _Lane:
    """One target, with a thread of its own."""

    def __init__(self, target: Target, pacing: Pacing) -> None:
        self.name = target.name
        self._target = target
        self._pacing = pacing
        self._waiting: deque[Notice] = deque()
        self._woken = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def put(self, notice: Notice) -> None:
        with self._woken:
            if len(self._waiting) >= _MAX_WAITING:
                self._warn("too many notifications wait, so this one is not sent")
                return
            self._waiting.append(notice)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="quark-notify-target", daemon=True
                )
                self._thread.start()
            self._woken.notify_all()

    def end(self) -> None:
        with self._woken:
            self._ends = True
            self._woken.notify_all()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._woken:
                while not self._waiting and not self._ends:
                    self._woken.wait()
                if not self._waiting:
                    return
                notice = self._waiting.popleft()
            try:
                self._send(notice)
            except Exception as error:  # noqa: BLE001 - a bug of ours must not end this
                self._warn(f"a notification could not be sent ({type(error).__name__})")

    def _send(self, notice: Notice) -> None:
        for pause_s in (*self._pacing.pauses_s, None):
            answer = self._target.send(notice, self._pacing.timeout_s)
            if answer.outcome == "taken":
                return
            if answer.outcome != "busy" or pause_s is None:
                said = f": {answer.said}" if answer.said else ""
                self._warn(f"a notification was not accepted, or its delivery is unknown{said}")
                return
            with self._woken:
                # At the end nobody waits for a target to come back.
                if self._ends or self._woken.wait_for(lambda: self._ends, pause_s):
                    self._warn(f"a notification was not accepted before the end: {answer.said}")
                    return

    def _warn(self, message: str) -> None:
        """Log once what is wrong with the target."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("notifications by %s: %s. This is logged once", self.name, message)


NOTIFIED = "notified"
"""The type of the event that says that people were told, and of what."""

_END_WAIT_S = 3.0
_NOTE_WAIT_S = 1.0
_FOLDER = "notified"


class RunNotifier(RunExtension):
    """Notifies people of the alerts and the end of one run.

    Args:
        run: The run.
        notifier: Sends the notices.
    """

    def __init__(self, run: OpenRun, notifier: Notifier) -> None:
        self._run = run
        self._notifier = notifier

    def __repr__(self) -> str:
        return repr(self._notifier)

    def notify_alert(self, event: EventRecord) -> None:
        """Send an alert that the run has recorded."""
        notice = describe_alert(self._run.context.run, event.payload or {}, event.severity)
        self._notifier.tell(notice)

    def settle(self) -> None:
        """Wait for a moment until the run has the events of what was told."""
        self._notifier.settle(_NOTE_WAIT_S)

    def notify_end(self, status: str) -> None:
        """Send how the run has ended, and wait for a moment until it is sent."""
        run = self._run
        reason = None if run.ending is None else run.ending.describe()
        self._notifier.tell(describe_end(run.context.run, status, reason))
        self.close(min(_END_WAIT_S, settings.exit_timeout_s()))

    def close(self, wait_s: float) -> None:
        """Send nothing more, after waiting so long at most for what is on its way."""
        self._notifier.close(wait_s)


def attach_notifier(
    run: OpenRun,
    notify: NotifyArgument,
    notify_on: str | Iterable[str] | None,
    argument: str = "notify",
) -> None:
    """Have people told of a run that this process leads; in place of whoever was told before.

    Args:
        run: The run.
        notify: Where: a URL, a function of one notice, or several of both.
        notify_on: What; QUARK_NOTIFY_ON by default.
        argument: What errors call `notify`.

    Raises:
        SchemaValidationError: A bad argument; the message holds nothing of a URL.
    """
    targets = parse_targets(notify, argument)
    chosen, name = notify_on, "notify_on"
    if chosen is None:
        chosen, name = os.environ.get(settings.NOTIFY_ON, "").strip() or None, settings.NOTIFY_ON
    choice = parse_choice(chosen, name)
    if not targets or not run.leads or run.forked or not run.stream.active:
        return
    ledger = FileLedger(_find_ledger(run))
    if run.context.run.attempt and not run.begun_offline:
        _take_up(run, ledger)
    before = run.extensions.get(RunNotifier)
    notifier = Notifier(targets, choice, ledger, on_told=lambda key: _note(run, key))
    run.extensions[RunNotifier] = RunNotifier(run, notifier)
    if isinstance(before, RunNotifier):
        before.close(0.0)


def _find_ledger(run: OpenRun) -> Path:
    """On this machine, also of a run that a service keeps."""
    place = run.context.storage_dir / ".quark" / _FOLDER
    return place / f"{run.context.run_id}.jsonl"


def _take_up(run: OpenRun, ledger: FileLedger) -> None:
    """What the attempts before have told, of another machine too."""
    try:
        told = run.read(EventRecord.KIND, Query(equals={"event_type": NOTIFIED})).to_records()
    except QuarkError as error:
        _log.warning("run %s: its earlier notifications cannot be read: %s",
                     run.context.run_id, error)  # fmt: skip
        return
    payloads: list[Any] = [getattr(each, "payload", None) or {} for each in told]
    ledger.take_up({str(payload["key"]) for payload in payloads if "key" in payload})


def _note(run: OpenRun, key: str) -> None:
    if not run.is_over:
        run.emit_event(NOTIFIED, "debug", payload=JsonObject({"key": key}))
