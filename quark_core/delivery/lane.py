"""One backend's lane: a thread that delivers batches in order, and never gives up on its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from quark_core.artifacts.payload_folder import PayloadFolder, PayloadSpool
from quark_core.backend import Backend, Batch, SupportsGroups
from quark_core.delivery.batch_log import Cursor
from quark_core.delivery.lane_files import LaneMark
from quark_core.delivery.payload_delivery import (
    list_payloads,
    send_payloads,
    set_payloads_aside,
)
from quark_core.delivery.quarantine import Quarantine
from quark_core.delivery.report import LaneReport
from quark_core.errors import BackendRejected, BackendUnauthorized, BackendUnavailable

__all__ = ["Lane", "RetryPolicy"]

_log = logging.getLogger("quark")
_GROUP_LIMIT = 64
# What comes meanwhile goes into the same transaction, which costs training a tenth of many small
# ones; nobody waits for it, since whoever does nudges the lane.
_LINGER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a lane tries again.

    Attributes:
        first_s: Bound of the first wait; each further one doubles it.
        cap_s: Bound of any wait. The wait itself is drawn evenly between 0
            and the bound (full jitter), so that many processes do not return
            at the same moment.
        failures_before_rest: Unexpected errors in a row after which the lane
            rests instead.
        rest_s: How long it rests before it probes.
        paused_s: How long it waits after its credentials were refused.
        asked_cap_s: Bound of a wait that the backend asks for.
    """

    first_s: float = 0.5
    cap_s: float = 60.0
    failures_before_rest: int = 5
    rest_s: float = 60.0
    paused_s: float = 300.0
    asked_cap_s: float = 600.0


class Lane:
    """Delivers a log's batches to one backend, on a daemon thread of its own.

    Whatever the backend does (raise, hang, call `sys.exit`) stays in here.
    `BackendUnavailable` is tried again for ever, `BackendRejected` goes to the
    quarantine, and anything else is tried again, then rested upon. Each
    reason is logged once.

    Args:
        name: Name of the backend.
        open_backend: Opens the backend, called on the lane's thread.
        cursor: The lane's place in the log.
        quarantine: Where refused batches go.
        primary: Whether the backend is the run's primary.
        idempotent: Whether a batch may be sent twice.
        mark: Where to keep on disk how far the lane is.
        payloads: Where the payloads of artifacts lie that the backend takes.
        retry: When to try again.
        on_failure: Called with each failure of a write or an open, from the
            lane's thread.
    """

    def __init__(
        self,
        name: str,
        open_backend: Callable[[], Backend],
        cursor: Cursor,
        quarantine: Quarantine,
        *,
        primary: bool = False,
        idempotent: bool = False,
        mark: LaneMark | None = None,
        payloads: PayloadFolder | None = None,
        retry: RetryPolicy | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.name = name
        self.primary = primary
        self._open_backend = open_backend
        self._cursor = cursor
        self._quarantine = quarantine
        self._idempotent = idempotent
        self._mark = mark
        self._payloads = payloads
        self._retry = retry or RetryPolicy()
        self._on_failure = on_failure
        self._backend: Backend | None = None
        self._state = "opening"
        self._delivered = 0
        self._quarantined: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._tries = 0
        self._unexpected = 0
        self._in_flight: list[Batch] = []
        self._given_up = False
        # Held while a batch moves from waiting to done, so that a report adds up.
        self._counting = threading.Lock()
        self._hurry = threading.Event()
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"quark-lane-{name}", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def nudge(self) -> None:
        """Try at once what waits for a later try."""
        self._hurry.set()

    def wait_passed(self, position: int, timeout_s: float) -> bool:
        """Wait until everything before a position of the log is done with; whether it is."""
        return self._cursor.wait_passed(position, timeout_s)

    def close(self, deadline: float) -> None:
        """Ask the lane to deliver what is left and to close its backend by a deadline.

        Args:
            deadline: On the clock of `time.monotonic`.
        """
        self._deadline = deadline
        self._hurry.set()
        self._cursor.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the lane after `close`; whether it has ended.

        A lane that has not ended hangs in its backend; it is given up, and
        what was in flight counts as unknown unless it can be sent twice.
        """
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        self._given_up = self._thread.is_alive()
        return not self._given_up

    @property
    def last_error(self) -> str | None:
        """Newest reason for a failure, or None while there was none."""
        return next(reversed(self._errors), None)

    def report(self, pending_records: int = 0, lost_records: int = 0) -> LaneReport:
        """What became of the records so far.

        Args:
            pending_records: Records accepted but not yet in the log.
            lost_records: Records accepted that never came to the log.
        """
        with self._counting:
            submitted, waiting, dropped = self._cursor.count_records()
            unknown = 0
            if self._given_up and not self._idempotent:
                unknown = sum(batch.count for batch in self._in_flight)
            return LaneReport(
                backend=self.name,
                primary=self.primary,
                state=self._state,
                submitted=submitted + pending_records + lost_records,
                delivered=self._delivered,
                waiting=waiting - unknown + pending_records,
                quarantined=dict(self._quarantined),
                dropped=dropped + lost_records,
                unknown=unknown,
                errors=dict(self._errors),
            )

    def _run(self) -> None:
        while True:
            batches = self._cursor.peek(_GROUP_LIMIT)
            if batches and self._may_linger(batches):
                self._hurry.wait(_LINGER_S)
                self._hurry.clear()
                batches = self._cursor.peek(_GROUP_LIMIT)
            if batches:
                if not self._deliver(batches) and self._expired():
                    break
            elif self._deadline is not None:
                break
            else:
                self._cursor.wait()
        self._close_backend()

    def _may_linger(self, batches: list[Batch]) -> bool:
        """Whether more batches may be waited for, so that they are written as one group."""
        return (
            len(batches) < _GROUP_LIMIT
            and self._deadline is None
            and self._state == "ready"
            and isinstance(self._backend, SupportsGroups)
        )

    def _expired(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _deliver(self, batches: list[Batch]) -> bool:
        """Try once to deliver; on failure wait as the policy says. Whether it went well."""
        try:
            if self._backend is None:
                self._backend = self._open_backend()
            if len(batches) > 1 and isinstance(self._backend, SupportsGroups):
                self._write_group(self._backend, batches)
            else:
                for batch in batches:
                    self._write_one(self._backend, batch)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: nothing may end the lane
            self._in_flight = []
            self._note_failure(error)
            self._pause(error)
            return False
        self._state = "ready"
        self._tries = self._unexpected = 0
        return True

    def _write_group(self, backend: SupportsGroups, batches: list[Batch]) -> None:
        try:
            self._send_payloads(backend, batches)
            self._begin(batches)
            backend.write_group(batches)
        except BackendRejected:
            # One of them is refused; which one shows when they go singly.
            for batch in batches:
                self._write_one(backend, batch)
            return
        self._acknowledge(batches)

    def _begin(self, batches: list[Batch]) -> None:
        self._in_flight = batches
        if self._mark is not None and not self._idempotent:
            # After a crash, what was begun and not finished may be there already.
            self._mark.begin(batches[-1].number + 1)

    def _write_one(self, backend: Backend, batch: Batch) -> None:
        try:
            # A payload may come twice, so nothing is begun by sending it.
            self._send_payloads(backend, [batch])
            self._begin([batch])
            backend.write(batch)
        except BackendRejected as error:
            reason = str(error)
            self._quarantine.put(batch, reason)
            if isinstance(self._payloads, PayloadSpool):
                set_payloads_aside([batch], self._payloads.find, self._quarantine.directory)
            if reason not in self._quarantined:
                _log.warning("backend %s refused records: %s", self.name, reason)
            with self._counting:
                self._quarantined[reason] += batch.count
                self._pass([batch])
            if self._on_failure is not None:
                self._on_failure(error)
            return
        self._acknowledge([batch])

    def _send_payloads(self, backend: Backend, batches: list[Batch]) -> None:
        if self._payloads is not None:
            send_payloads(backend, batches, [self._payloads.find])

    def _acknowledge(self, batches: list[Batch]) -> None:
        with self._counting:
            self._delivered += sum(batch.count for batch in batches)
            self._pass(batches)
        if self._payloads is not None:
            # Those of refused batches stay, as the batches do.
            for _, record in list_payloads(batches):
                self._payloads.pass_by(record.sha256)

    def _pass(self, batches: list[Batch]) -> None:
        self._in_flight = []
        if self._mark is not None:
            self._mark.finish(batches[-1].number + 1)
        self._cursor.advance(batches)

    def _note_failure(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if reason not in self._errors:
            _log.warning("backend %s does not take records now (%s); they wait", self.name, reason)
        self._errors[reason] += 1
        if self._on_failure is not None:
            self._on_failure(error)

    def _pause(self, error: BaseException) -> None:
        import random  # late: it takes milliseconds, and most lanes never fail

        policy = self._retry
        self._unexpected = 0 if isinstance(error, BackendUnavailable) else self._unexpected + 1
        if isinstance(error, BackendUnauthorized):
            self._state = "paused"
            wait_s = policy.paused_s
        elif self._unexpected >= policy.failures_before_rest:
            self._state = "resting"
            wait_s = policy.rest_s
        else:
            self._state = "retrying"
            bound_s = min(policy.cap_s, policy.first_s * 2.0 ** min(self._tries, 30))
            wait_s = random.uniform(0.0, bound_s)
        asked_s = getattr(error, "retry_after_s", None)
        if asked_s is not None:
            # Spread out: who was told the same must not come back at the same moment.
            wait_s = max(wait_s, min(asked_s, policy.asked_cap_s) * random.uniform(1.0, 1.1))
        self._tries += 1
        if self._deadline is not None:
            # The end is bounded: a few more tries, then the lane is left as it is.
            wait_s = min(wait_s, 0.2, max(0.0, self._deadline - time.monotonic()))
            time.sleep(wait_s)
        else:
            self._hurry.wait(wait_s)
            self._hurry.clear()

    def _close_backend(self) -> None:
        if self._backend is not None:
            try:
                self._backend.close()
            except BaseException as error:  # noqa: BLE001 - as in _deliver
                self._note_failure(error)
        if self._mark is not None:
            self._mark.close()
        self._state = "closed"
