"""The notifier: takes notices, and sends each once, on threads of its own, not too many."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from quark.notifications.ledger import Ledger
from quark.notifications.notices import Notice, NoticeChoice, describe_digest
from quark.notifications.targets import Target

_log = logging.getLogger("quark")

_MAX_WAITING = 1_000
_MAX_HELD = 1_000
_TICK_S = 0.5
_HOUR_S = 3600.0


class Pacing:
    """How often people are told, and how hard it is tried.

    Args:
        topic_s: Seconds between two notices of one rule of one run; what comes in between is
            held back.
        per_hour: Notices in an hour, besides one digest of what was held back.
        timeout_s: How long a target may take for one notice.
        pauses_s: Before which further tries, where a target has surely not taken it.
    """

    def __init__(
        self,
        *,
        topic_s: float = 600.0,
        per_hour: int = 20,
        timeout_s: float = 20.0,
        pauses_s: Sequence[float] = (2.0, 10.0, 60.0),
    ) -> None:
        self.topic_s = topic_s
        self.per_hour = per_hour
        self.timeout_s = timeout_s
        self.pauses_s = tuple(pauses_s)


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
                _log.warning("a notice could not be told", exc_info=True)
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
                self._warn("so much waits for it that a notice is not sent")
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
                self._warn(f"a notice could not be sent ({type(error).__name__})")

    def _send(self, notice: Notice) -> None:
        for pause_s in (*self._pacing.pauses_s, None):
            answer = self._target.send(notice, self._pacing.timeout_s)
            if answer.outcome == "taken":
                return
            if answer.outcome != "busy" or pause_s is None:
                said = f": {answer.said}" if answer.said else ""
                self._warn(f"a notice was not taken, or nobody knows whether it was{said}")
                return
            with self._woken:
                # At the end nobody waits for a target to come back.
                if self._ends or self._woken.wait_for(lambda: self._ends, pause_s):
                    self._warn(f"a notice was not taken by the end: {answer.said}")
                    return

    def _warn(self, message: str) -> None:
        """Log once what is wrong with the target."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("notifications by %s: %s. This is said once", self.name, message)
