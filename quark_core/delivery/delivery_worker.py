"""One backend's lane: a thread that delivers batches in order, and never gives up on its own.

A store refuses records of a run that was never started in it. Which rank's
records come first is chance, so the lane of a rank that joins a run waits until
it is there (`wait_for_run`), with the records in memory and in the journal like
in any outage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from quark_core.artifacts.payload_folder import PayloadFolder, PayloadSpool
from quark_core.backends.contract import (
    Backend,
    BackendDelivery,
    Batch,
    SupportsGroups,
    SupportsRead,
)
from quark_core.config.settings import list_credentials
from quark_core.delivery.batch_log import Cursor
from quark_core.delivery.delivery_state import LaneMark
from quark_core.delivery.sending import (
    GROUP_BATCHES,
    GROUP_RECORDS,
    Quarantine,
    StartWatch,
    cut_groups,
    list_payloads,
    send_payloads,
    set_payloads_aside,
)
from quark_core.errors import (
    BackendOutcomeUnknown,
    BackendRejected,
    BackendUnavailable,
    BackendUnusable,
    RunNotFoundError,
    SessionStoreError,
    describe_error,
)

_log = logging.getLogger("quark")
# What comes meanwhile goes into the same transaction, which costs training a tenth of many small
# ones; nobody waits for it, since whoever does nudges the lane.
_LINGER_S = 0.5
# How often a lane that was refused looks whether its credentials are other ones by now.
_LOOK_EVERY_S = 2.0


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
        paused_s: How long it waits where a person must mend something, such as the
            credentials.
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
    quarantine, what `BackendOutcomeUnknown` is said of is never sent twice
    where that could store it twice, and anything else is tried again, then
    rested upon. Each reason is logged once.

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
        self._unknown = 0
        self._quarantined: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._tries = 0
        self._unexpected = 0
        self._in_flight: list[Batch] = []
        self._last_stored: Batch | None = None
        self._given_up = False
        self._forgotten = False
        self._start_watch = StartWatch() if primary else None
        # Held while a batch moves from waiting to done, so that a report adds up.
        self._counting = threading.Lock()
        self._hurry = threading.Event()
        self._deadline: float | None = None
        self._patience_s = 0.0
        self._last_moment = 0.0
        self._unusable = False
        self._refused: frozenset[tuple[str, str]] = frozenset()
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

    def close(
        self, deadline: float, *, patience_s: float = 0.0, last_moment: float | None = None
    ) -> None:
        """Ask the lane to deliver what is left and to close its backend by a deadline.

        A mirror that cannot work before a person has mended something is not tried again.

        Args:
            deadline: On the clock of `time.monotonic`.
            patience_s: Whenever the lane gets on, the deadline is this far away again.
            last_moment: Where the deadline is never beyond; itself by default.
        """
        self._patience_s = patience_s
        self._last_moment = deadline if last_moment is None else last_moment
        self._deadline = deadline
        self._hurry.set()
        self._cursor.wake()

    @property
    def position(self) -> int:
        """Number of the batch that comes next; asked without a lock."""
        return self._cursor.position

    @property
    def has_closed(self) -> bool:
        """Whether the lane has come to its end; asked without a lock."""
        return self._state == "closed"

    @property
    def ends_by(self) -> float | None:
        """When the lane is given up after `close`; None where it has ended."""
        return self._deadline if self._thread.is_alive() else None

    @property
    def is_at_it(self) -> bool:
        """Whether the backend is opening or has taken what it was given last."""
        return self._state in ("opening", "ready")

    def get_on(self) -> None:
        """Put the end off, since something was done."""
        if self._deadline is not None and self._patience_s:
            later = min(time.monotonic() + self._patience_s, self._last_moment)
            self._deadline = max(self._deadline, later)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the lane, without giving it up."""
        self._thread.join(max(0.0, timeout_s))

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the lane after `close`; whether it has ended.

        A lane that has not ended hangs in its backend; it is given up, and
        what was in flight counts as unknown unless it can be sent twice.
        """
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        self._given_up = self._thread.is_alive()
        return not self._given_up

    def forget(self) -> None:
        """Keep nothing that the backend may yet refuse: what it was is given up."""
        self._forgotten = True

    @property
    def needs_a_person(self) -> bool:
        """Whether its backend takes nothing before a person gives it something."""
        return self._unusable

    @property
    def last_error(self) -> str | None:
        """Newest reason for a failure, or None while there was none."""
        return next(reversed(self._errors), None)

    def report(self, pending_records: int = 0, lost_records: int = 0) -> BackendDelivery:
        """What became of the records so far.

        Args:
            pending_records: Records accepted but not yet in the log.
            lost_records: Records accepted that never came to the log.
        """
        with self._counting:
            submitted, waiting, dropped = self._cursor.count_records()
            in_flight = 0
            if self._given_up and not self._idempotent:
                in_flight = sum(batch.count for batch in self._in_flight)
            return BackendDelivery(
                backend=self.name,
                primary=self.primary,
                state=self._state,
                submitted=submitted + pending_records + lost_records,
                delivered=self._delivered,
                waiting=waiting - in_flight + pending_records,
                quarantined=dict(self._quarantined),
                dropped=dropped + lost_records,
                unknown=self._unknown + in_flight,
                errors=dict(self._errors),
            )

    def _run(self) -> None:
        while True:
            batches = self._cursor.peek(GROUP_BATCHES)
            if batches and self._may_linger(batches):
                self._hurry.wait(_LINGER_S)
                self._hurry.clear()
                batches = self._cursor.peek(GROUP_BATCHES)
            batches = next(cut_groups(batches), [])
            if batches and self._is_hopeless():
                break
            if batches:
                delivered = self._deliver(batches)
                if self._expired() and not (delivered and self.primary):
                    break
            elif self._deadline is not None:
                break
            else:
                self._cursor.wait()
        self._close_backend()

    def _may_linger(self, batches: list[Batch]) -> bool:
        """Whether more batches may be waited for, so that they are written as one group."""
        return (
            len(batches) < GROUP_BATCHES
            and sum(batch.count for batch in batches) < GROUP_RECORDS
            and self._deadline is None
            and self._state == "ready"
            and isinstance(self._backend, SupportsGroups)
        )

    def _is_hopeless(self) -> bool:
        """Whether the run ends, and what is left needs a person first."""
        if self._deadline is None or not self._unusable or self.primary:
            return False
        return self._refused == list_credentials()

    def _expired(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _deliver(self, batches: list[Batch]) -> bool:
        """Try once to deliver; on failure wait as the policy says. Whether it went well."""
        try:
            if self._backend is None:
                self._backend = self._open_backend()
            try:
                self._write(self._backend, batches)
            except BackendUnavailable as error:
                if error.lacks_from is None or not self._idempotent:
                    raise
                self._fill_again(self._backend, error.lacks_from, str(error))
                self._write(self._backend, batches)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: nothing may end the lane
            if isinstance(error, BackendOutcomeUnknown) and not self._idempotent:
                # Sending them again could store them twice.
                with self._counting:
                    self._unknown += sum(batch.count for batch in self._in_flight)
                    self._pass(self._in_flight)
            self._in_flight = []
            self._note_failure(error)
            self._pause(error)
            return False
        self._state = "ready"
        self._unusable = False
        self._tries = self._unexpected = 0
        return True

    def _write(self, backend: Backend, batches: list[Batch]) -> None:
        if len(batches) > 1 and isinstance(backend, SupportsGroups):
            self._write_group(backend, batches)
        else:
            for batch in batches:
                self._write_one(backend, batch)

    def _fill_again(self, backend: Backend, start: int, reason: str) -> None:
        """Give a mirror what it had before and has lost; what nobody has any more is told."""
        _log.warning(
            "backend %s: %s. Quark writes the records of this process again. For those of other "
            "processes, run: quark mirror replay",
            self.name,
            reason,
        )
        wanted = start
        for batches in self._cursor.read_again(start):
            for batch in batches:
                if batch.number > wanted:
                    _log.warning(
                        "backend %s: batches %d to %d are lost", self.name, wanted, batch.number - 1
                    )
                self._send_payloads(backend, [batch])
                with suppress(BackendRejected):  # it is in quarantine since the first time
                    backend.write(batch)
                wanted = batch.number + 1

    def _write_group(self, backend: SupportsGroups, batches: list[Batch]) -> None:
        try:
            if self._start_watch is not None and self._start_watch.refusal is not None:
                raise BackendRejected(self._start_watch.refusal)
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
        if self._start_watch is not None and self._start_watch.refusal is not None:
            self._set_aside(batch, self._start_watch.refusal)
            return
        try:
            # A payload may come twice, so nothing is begun by sending it.
            self._send_payloads(backend, [batch])
            self._begin([batch])
            backend.write(batch)
        except BackendRejected as error:
            if self._forgotten:
                return
            reason = str(error)
            if self._start_watch is not None:
                self._start_watch.note_refused(batch, reason)
            self._set_aside(batch, reason)
            if self._on_failure is not None:
                self._on_failure(error)
            return
        self._acknowledge([batch])

    def _set_aside(self, batch: Batch, reason: str) -> None:
        self._quarantine.put(batch, reason)
        if isinstance(self._payloads, PayloadSpool):
            set_payloads_aside([batch], self._payloads.find, self._quarantine.directory)
        if reason not in self._quarantined:
            _log.warning("backend %s rejected records: %s", self.name, reason)
        with self._counting:
            self._quarantined[reason] += batch.count
            self._pass([batch])

    def _send_payloads(self, backend: Backend, batches: list[Batch]) -> None:
        if self._payloads is not None:
            send_payloads(backend, batches, [self._payloads.find])

    def _acknowledge(self, batches: list[Batch]) -> None:
        with self._counting:
            self._delivered += sum(batch.count for batch in batches)
            self._last_stored = batches[-1]
            self._pass(batches)
        if self._start_watch is not None and self._backend is not None:
            self._start_watch.note_stored(self._backend, batches)
        if self._payloads is not None:
            # Those of refused batches stay, as the batches do.
            for _, record in list_payloads(batches):
                self._payloads.pass_by(record.sha256)

    def _settle(self) -> None:
        """Learn how much of it a backend has for good that keeps some aside for a while."""
        find_end = getattr(self._backend, "settled_end", None)
        last = self._last_stored
        if find_end is not None and last is not None:
            end = find_end(last.run_id, last.writer_id)
            # What came after the last one that was stored was refused, and is kept elsewhere.
            self._cursor.settle(None if end > last.number else end)

    def _pass(self, batches: list[Batch]) -> None:
        self._in_flight = []
        if not batches:
            return
        if self._mark is not None:
            self._mark.finish(batches[-1].number + 1)
        self._cursor.advance(batches)
        self._settle()
        self.get_on()

    def _note_failure(self, error: BaseException) -> None:
        reason = describe_error(error)
        if reason not in self._errors and not self._given_up:
            _log.warning("backend %s accepts no records now (%s); they wait", self.name, reason)
        self._errors[reason] += 1
        if self._on_failure is not None:
            self._on_failure(error)

    def _pause(self, error: BaseException) -> None:
        import random  # late: it takes milliseconds, and most lanes never fail

        policy = self._retry
        self._unexpected = 0 if isinstance(error, BackendUnavailable) else self._unexpected + 1
        self._unusable = isinstance(error, BackendUnusable)
        if self._unusable:
            self._state = "paused"
            wait_s = policy.paused_s
            self._refused = list_credentials()
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
            self._wait(wait_s)
            self._hurry.clear()

    def _wait(self, wait_s: float) -> None:
        """Wait until the next try; one that a refreshed credential may help comes soon."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0.0:
            if self._hurry.wait(min(left_s, _LOOK_EVERY_S) if self._unusable else left_s):
                return
            if self._unusable and self._refused != list_credentials():
                return

    def _close_backend(self) -> None:
        if self._backend is not None:
            try:
                self._backend.close()
                self._settle()
            except BaseException as error:  # noqa: BLE001 - as in _deliver
                self._note_failure(error)
        if self._mark is not None:
            self._mark.close()
        self._state = "closed"


AWAIT_CAP_S = 15.0
"""Bound of the wait between two tries of such a lane."""

_QUIET_S = 1.0
_POLL_S = 0.05


def wait_for_run(
    open_backend: Callable[[], Backend], run_id: str | None, opened: object
) -> Callable[[], Backend]:
    """Open a backend only once it has a run; for a lane, on its own thread.

    Args:
        open_backend: Opens it.
        run_id: The run.
        opened: The backend, where it was open before and outlives a failure.
    """

    def open_when_there() -> Backend:
        backend = open_backend()
        deadline = time.monotonic() + _QUIET_S
        poll_s = _POLL_S
        while True:
            try:
                check_run_is_there(backend, run_id, closes=False)
            except BackendUnavailable:
                if time.monotonic() < deadline:
                    time.sleep(poll_s)
                    poll_s *= 1.5
                    continue
                if opened is None:
                    backend.close()
                raise
            return backend

    return open_when_there


def check_run_is_there(backend: Backend, run_id: str | None, *, closes: bool = True) -> None:
    """See that a backend has a run.

    Args:
        backend: It; one that cannot be asked, or has no store but the journal, passes.
        run_id: The run.
        closes: Whether the backend is closed where it has not.

    Raises:
        BackendUnavailable: It has not, so far.
    """
    asked: object = backend
    if run_id is None or getattr(backend, "keeps_journal", False):
        return
    if not isinstance(asked, SupportsRead):
        return
    try:
        asked.load_run(run_id)
    except SessionStoreError as error:
        if closes:
            backend.close()
        if not isinstance(error, RunNotFoundError):
            raise BackendUnavailable(str(error)) from error
        raise BackendUnavailable(
            f"run {run_id} is not in the store yet; its lead rank creates it there"
        ) from None
