"""One process's stream into one run: channels, the delivery thread and the lanes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import BackendDelivery, DeliveryReport
from quark_core.config import settings
from quark_core.delivery.batch_log import BatchLog, Framer
from quark_core.delivery.channel import ITEM_BYTES, Channel, MemoryBound, choose_capacity
from quark_core.delivery.crash_buffer import BlackBox
from quark_core.delivery.delivery_state import Lease
from quark_core.delivery.delivery_worker import Lane
from quark_core.delivery.journal_folder import JournalFolder
from quark_core.delivery.segments import Origin
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import RECORD_TYPES, LifecycleRecord

_log = logging.getLogger("quark")

FlushLevel = Literal["journaled", "durable", "stored"]

TICK_S = 0.02
# Where a black box holds what is not journaled yet, a longer tick risks nothing and costs less.
COVERED_TICK_S = 0.05
HEARTBEAT_S = 10.0
SYNC_S = 1.0
# A call of a backend may take so long.
_THREADS_S = 600.0
_LAST_TRY_S = 2.0
PATIENCE_TIMES = 12
"""How many times its patience the end of a run may last, while lanes get on."""

# After a signal the backends are tried again and again; nobody waits longer for them.
_HURRIES_S = 15.0
_HURRY_EVERY_S = 0.2

# How often the end looks whether something gets on, and which part of a core a helper process
# uses that does, on a machine with much else to do: one that only waits is below.
_LOOK_EVERY_S = 1.0
# Where no time is left, lanes that get on are waited for all the same, and not by spinning.
_LEAST_LOOK_S = 0.05
_WORKING_SHARE = 0.02


class RunStream:
    """Moves records from the channels into batches and hands them to the lanes.

    The delivery thread alone numbers batches; every tick it closes one frame
    per kind, or several where a frame is full, and writes them to the journal.
    Without lanes nothing is kept and no thread is started: that is the stream
    of a rank that only listens.

    Args:
        origin: What all records have in common.
        log: The log that the lanes read.
        lanes: One lane per backend, the primary's first where there is one.
        folder: The journal's folder, removed when every lane has everything;
            without lanes another process delivers it.
        leases: Leases of the lanes, given up at the end.
        black_box: Where accepted records outlive the process until they are
            journaled.
        measure_work: Processor time in s that helper processes have used so far. At the
            end it counts as progress of backends that have not failed, as where one
            imports its library or is at a large group.
        on_patience: Called where an end has to wait for lanes.
        payloads: Where this process puts the payloads of artifacts; None where
            no backend takes any.
        retain: The journal is the store: it is synced at a flush, and stays.
        on_second: Called by the delivery thread every second.
        on_beat: Called by it every 10 s.
        on_gap: Called by it with the number of records, by kind, that went
            because memory ran out.
        tick_s: Time between two ticks; by default 50 ms with a black box, 20 ms without.
        capacity_bytes: Bound of what waits in the channels; by default a
            sixteenth of the machine's memory, from 64 MiB to 1 GiB.
    """

    def __init__(
        self,
        origin: Origin,
        log: BatchLog | None = None,
        lanes: Sequence[Lane] = (),
        *,
        folder: JournalFolder | None = None,
        leases: Sequence[Lease] = (),
        retain: bool = False,
        black_box: BlackBox | None = None,
        payloads: PayloadFolder | None = None,
        measure_work: Callable[[], float] | None = None,
        on_patience: Callable[[], None] | None = None,
        on_second: Callable[[], None] | None = None,
        on_beat: Callable[[], None] | None = None,
        on_gap: Callable[[Mapping[str, int]], None] | None = None,
        tick_s: float | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self.origin = origin
        self._log = log or BatchLog()
        # Set by who sums up what comes too often for records; see `writers.aggregates`.
        self.collect: Callable[..., None] | None = None
        self._lanes = tuple(lanes)
        self._primary = next((lane for lane in lanes if lane.primary), None)
        self._folder = folder
        self._leases = tuple(leases)
        self._retain = retain
        self._payloads = payloads
        self._measure_work = measure_work
        self._on_patience = on_patience
        if capacity_bytes is None:
            capacity_bytes = choose_capacity()
        capacity_items = capacity_bytes // ITEM_BYTES if self.active else 0
        # Lifecycle comes last in a tick: a status must not overtake what was logged before it.
        kinds = sorted(RECORD_TYPES, key=lambda kind: kind == LifecycleRecord.KIND)
        self._channels = {kind: Channel(kind, capacity_items=capacity_items) for kind in kinds}
        self._black_box = black_box
        if black_box is not None:
            for channel in self._channels.values():
                channel.append = black_box.wrap_append(
                    channel.append, partial(_may_overflow, channel)
                )
        self._framer = Framer(origin, self._channels, self._log)
        self._on_second = on_second
        self._on_beat = on_beat
        self._on_gap = on_gap
        self._memory = MemoryBound(
            self._channels,
            capacity_bytes,
            None if on_gap is None else self._tell_gap,
            None if black_box is None else black_box.note_filling,
        )
        if tick_s is None:
            tick_s = TICK_S if black_box is None else COVERED_TICK_S
        self._tick_s = tick_s
        self._wake = threading.Event()
        self._ticked = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._sync_asked = 0
        self._journaled_end = 0
        self._durable_end = 0
        # Plain numbers, so that a signal handler can ask without any lock.
        self._signal_asked = 0
        self._signal_answered = 0
        self._signal_end = 0
        self._signal_call: Callable[[], None] | None = None
        self._hurries_until = 0.0
        self._hurries_at = 0.0
        self._closing = False
        self._ended = False
        self._closed_report: DeliveryReport | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the lanes and the delivery thread; nothing where nothing is kept."""
        if not self.active:
            return
        thread = threading.Thread(target=self._run, name="quark-delivery", daemon=True)
        try:
            for lane in self._lanes:
                lane.start()
            thread.start()
        except RuntimeError as error:
            self.close(0.5)
            self.discard()
            raise SessionStoreError(
                f"no thread can be started for delivery: {error}. Raise this user's limit of "
                "threads or processes (ulimit -u), or end processes that use them."
            ) from error
        self._thread = thread

    def channel(self, kind: str) -> Channel:
        """The channel of a kind of record.

        Raises:
            SchemaValidationError: Its type was not known when the run was started.
        """
        try:
            return self._channels[kind]
        except KeyError:
            raise SchemaValidationError(
                f"records of kind {kind!r} cannot be written to this run, because their type "
                "was defined after its start. Import its module first, or name the module in "
                "the hook quark_register_record_kinds of a plugin."
            ) from None

    @property
    def payloads(self) -> PayloadFolder | None:
        """Where this process puts the payloads of artifacts, if anybody takes them."""
        return self._payloads

    def open(self) -> None:
        """See that what comes here is on its way to somewhere."""

    @property
    def active(self) -> bool:
        """Whether anything is kept at all."""
        return bool(self._lanes) or self._folder is not None

    def hand_over(self, timeout_s: float, *, patience_s: float = 0.0) -> int | None:
        """Wait until everything accepted so far is framed, and journaled if that is possible.

        Args:
            timeout_s: How long.
            patience_s: Whenever fewer records wait than before, it is this long from then on,
                `PATIENCE_TIMES` times as much in all.

        Returns:
            The position in the log after it, or None where that took longer.
        """
        now = time.monotonic()
        deadline, last_moment = now + timeout_s, now + timeout_s + PATIENCE_TIMES * patience_s
        fewest = self._count_items()
        while True:
            position = self._ask(min(_LOOK_EVERY_S, max(0.0, deadline - now)), sync=False)
            now = time.monotonic()
            waiting = self._count_items()
            if waiting < fewest and patience_s:
                fewest, deadline = waiting, min(last_moment, max(deadline, now + patience_s))
            if position is not None or now >= deadline:
                return position

    def _count_items(self) -> int:
        return sum(len(channel.items) for channel in self._channels.values())

    def flush(self, timeout_s: float, level: FlushLevel = "stored", *, sync: bool = True) -> None:
        """Wait until everything accepted before this call is as safe as `level` says.

        Args:
            timeout_s: How long.
            level: "journaled" survives the process, "durable" the machine,
                "stored" has been acknowledged by the primary.
            sync: At "stored", bring the journal to the disk as well, for the
                backends that are behind the primary.

        Raises:
            SessionStoreError: It took longer; the records stay queued and are
                delivered later.
        """
        if self._thread is None or self._closed_report is not None:
            return
        if not self._lanes and level == "stored":
            level = "journaled"  # another process delivers what this one journals
        elif self._retain and level == "stored":
            level = "durable"
        deadline = time.monotonic() + timeout_s
        position = self._ask(timeout_s, sync=sync and level != "journaled")
        if self._retain and self._primary is not None:
            self._primary.nudge()  # so that what is reported is what is there
        if level == "stored":
            self._flush_primary(position, deadline, timeout_s)
            return
        while position is None or self._safe_end(level) < position:
            if time.monotonic() >= deadline:
                raise SessionStoreError(
                    f"the records did not reach the journal within {timeout_s:g} s "
                    f"({self._log.journal_error or 'the journal is missing or its disk is slow'}). "
                    "Nothing is lost: the records wait in memory."
                )
            time.sleep(min(0.02, timeout_s))
            remaining_s = max(0.0, deadline - time.monotonic())
            asked = self._ask(remaining_s, sync=level == "durable")
            position = asked if position is None else position

    def wait_for_primary(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Wait until the primary has what was accepted so far, or something else has happened.

        Args:
            timeout_s: How long at most.
            until: Asked now and then; True ends the wait.
        """
        if self._primary is None or self._thread is None:
            return
        deadline = time.monotonic() + timeout_s
        position = self._log.end
        self._primary.nudge()
        while not until() and time.monotonic() < deadline:
            if self._primary.wait_passed(position, 0.02):
                return

    def close(
        self,
        timeout_s: float,
        *,
        patience_s: float = 0.0,
        on_overtime: Callable[[DeliveryReport], None] | None = None,
        mirror_timeout_s: float | None = None,
        gives_up: bool = False,
    ) -> DeliveryReport:
        """Deliver what is left within a time, close the lanes, and say what became of it all.

        A second call returns the first one's report.

        Args:
            timeout_s: The time.
            patience_s: A lane that gets on has this time again from each such moment on,
                `PATIENCE_TIMES` times as much in all.
            on_overtime: Called where lanes that get on make the end last longer than
                `timeout_s`, with what is delivered so far.
            mirror_timeout_s: All the time that mirrors have; None gives them that of the primary.
            gives_up: Whether a primary that has taken nothing yet is tried for 2 s at most.
        """
        if self._closed_report is not None:
            return self._closed_report
        deadline = time.monotonic() + timeout_s
        last_moment = deadline + patience_s * (PATIENCE_TIMES - 1)
        # A heartbeat after this would find the quick lanes closed.
        self._on_beat = self._on_second = None
        # Even where nobody waits for delivery, what was accepted must come into the journal.
        journal_s = settings.journal_timeout_s()
        self.hand_over(journal_s, patience_s=patience_s)
        for lane in self._lanes:
            if gives_up and lane.primary and not lane.report().delivered:
                lane.close(min(deadline, time.monotonic() + _LAST_TRY_S))
            elif mirror_timeout_s is not None and not lane.primary:
                lane.close(min(deadline, time.monotonic() + mirror_timeout_s))
            else:
                lane.close(deadline, patience_s=patience_s, last_moment=last_moment)
        self._wait_for_lanes(deadline, on_overtime)
        for lane in self._lanes:
            lane.join(0.0)
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(max(journal_s, deadline - time.monotonic()))
        for lease in self._leases:
            lease.release()
        ended = self._thread is None or not self._thread.is_alive()
        if self._folder is not None and ended:
            # A thread that hangs in its disk may write yet; a later process finds what it leaves.
            if self._log.all_settled and not self._retain and not self._framer.count_pending():
                unknown = {lane.name: lane.report().unknown for lane in self._lanes}
                if self._folder.read_damage() is None:
                    self._folder.remove(unknown=unknown)
                else:
                    self._folder.set_aside(unknown=unknown)
                if self._black_box is not None:
                    self._black_box.remove()  # it is there still where the journal failed
            else:
                self._folder.close()
        self._closed_report = self.report()
        return self._closed_report

    def _wait_for_lanes(
        self, deadline: float, on_overtime: Callable[[DeliveryReport], None] | None
    ) -> None:
        """Wait until each lane has ended or is to be given up."""
        quarter_s = (deadline - time.monotonic()) / 4
        look_s = min(_LOOK_EVERY_S, max(_LEAST_LOOK_S, quarter_s))
        work_s: float | None = None
        looks = 0
        while True:
            now = time.monotonic()
            ends = [(lane, lane.ends_by) for lane in self._lanes]
            waiting = [(lane, end) for lane, end in ends if end is not None and end > now]
            if not waiting:
                return
            if now >= deadline and on_overtime is not None:
                on_overtime(self.report())
                on_overtime = None
            waiting[0][0].wait(min(look_s, max(end for _, end in waiting) - now))
            if looks == 1 and self._on_patience is not None:
                self._on_patience()
            looks += 1
            at_it = [lane for lane, _ in waiting if lane.is_at_it]
            if at_it and self._measure_work is not None:
                was_s, work_s = work_s, self._measure_work()
                if was_s is not None and work_s - was_s >= _WORKING_SHARE * look_s:
                    for lane in at_it:
                        lane.get_on()

    def wait_for_threads(self) -> None:
        """Wait until no lane of this process delivers any more; after `close`."""
        for lane in self._lanes:
            lane.join(_THREADS_S)

    def ask_from_signal(self) -> int:
        """Ask, without any lock, that everything accepted so far be brought to the disk."""
        self._signal_asked += 1
        return self._signal_asked

    def is_answered(self, ticket: int) -> bool:
        """Whether what `ask_from_signal` asked for is done, or there is nobody to do it."""
        return self._thread is None or self._ended or self._signal_answered >= ticket

    def count_unstored_from_signal(self) -> int:
        """How many batches the primary lacks of what was asked for, once that is answered."""
        return self._count_behind(self._primary)

    def is_behind_from_signal(self) -> bool:
        """Whether any backend lacks something of what was asked for, once that is answered."""
        return any(map(self._count_behind, self._lanes))

    def call_from_signal(self, function: Callable[[], None]) -> None:
        """Have the delivery thread call a function in its next tick; takes no lock."""
        self._signal_call = function

    def _count_behind(self, lane: Lane | None) -> int:
        if lane is None or lane.has_closed:
            return 0
        return max(0, self._signal_end - lane.position)

    def report(self) -> DeliveryReport:
        """What each lane has delivered so far, and what not."""
        if self._closed_report is not None:
            return self._closed_report
        channels = self._channels.values()
        pending = self._framer.count_pending()
        lost = self._framer.unencodable + sum(channel.lost for channel in channels)
        box = self._black_box
        return DeliveryReport(
            tuple(lane.report(pending, lost) for lane in self._lanes),
            uncovered=0 if box is None else box.uncovered,
        )

    def report_primary(self) -> BackendDelivery | None:
        """The primary's lane, or None where there is none."""
        return None if self._primary is None else self._primary.report()

    @property
    def left_behind(self) -> JournalFolder | None:
        """The journal, where it holds what some lane has not got; after `close`."""
        return None if self._log.all_passed else self._folder

    @property
    def is_deliverable(self) -> bool:
        """Whether something waits for a backend that needs nothing from a person first."""
        return any(lane.report().waiting and not lane.needs_a_person for lane in self._lanes)

    def list_gaps(self) -> list[str]:
        """What of this process's batches is in no place any more, for people."""
        note = None if self._folder is None else self._folder.read_damage()
        return [] if note is None else [f"{lost.lane}: {lost.describe()}" for lost in note.lost]

    def discard(self) -> None:
        """Delete the journal and what is left in it; after `close`, of a run that never began."""
        for lane in self._lanes:
            lane.forget()
        if self._folder is not None:
            self._folder.remove(note=False)

    def abandon(self) -> None:
        """Forget everything without touching a file: this is a forked child."""
        self._thread = None
        for lease in self._leases:
            lease.forget()

    def _flush_primary(self, position: int | None, deadline: float, timeout_s: float) -> None:
        if self._primary is None:
            return
        self._primary.nudge()
        remaining_s = max(0.0, deadline - time.monotonic())
        if position is None or not self._primary.wait_passed(position, remaining_s):
            reason = self._primary.last_error
            raise SessionStoreError(
                f"the primary store ({self._primary.name}) did not acknowledge within "
                f"{timeout_s:g} s{f'; last error: {reason}' if reason else ''}. Nothing is "
                "lost: the records are kept and delivered when it answers."
            )

    def _safe_end(self, level: FlushLevel) -> int:
        return self._durable_end if level == "durable" else self._journaled_end

    def _ask(self, timeout_s: float, *, sync: bool) -> int | None:
        thread = self._thread
        if thread is None or not thread.is_alive():
            return self._log.end
        with self._ticked:
            self._asked += 1
            ticket = self._asked
            if sync:
                self._sync_asked = ticket
            self._wake.set()
            answered = self._ticked.wait_for(
                lambda: self._answered >= ticket or self._ended, timeout_s
            )
            if not answered:
                return None
        return self._log.end

    def _run(self) -> None:
        next_beat = time.monotonic() + HEARTBEAT_S
        next_sync = time.monotonic() + SYNC_S
        last_tick = time.monotonic()
        while not self._closing:
            last_tick, elapsed_s = (now := time.monotonic()), now - last_tick
            wait_s = self._framer.choose_wait(self._tick_s, elapsed_s)
            if self._black_box is not None:
                wait_s = self._black_box.choose_wait(wait_s, elapsed_s)
            self._wake.wait(wait_s)
            self._wake.clear()
            asked, signal_asked = self._asked, self._signal_asked
            now = time.monotonic()
            sync = (
                now >= next_sync
                or self._sync_asked > self._answered
                or signal_asked > self._signal_answered
            )
            drained = False
            try:
                if now >= next_beat:
                    next_beat = now + HEARTBEAT_S
                    self._beat()
                self._collect(now >= next_sync, whole=signal_asked > self._signal_answered)
                drained = self._tick(sync=sync)
                if now >= next_sync:
                    next_sync = now + SYNC_S
                    on_second = self._on_second
                    if on_second is not None:
                        on_second()
                if signal_asked > self._signal_answered and drained:
                    self._signal_end = self._log.end
                    self._signal_answered = signal_asked
                    self._hurries_until = now + _HURRIES_S
                self._serve_signal(now)
            except Exception:  # noqa: BLE001 - the thread must outlive a bug of ours
                _log.exception("the delivery thread failed in a tick")
            # Before a full memory records wait in the channels, and nobody may be told otherwise.
            if self._answered < asked and drained:
                with self._ticked:
                    self._answered = asked
                    self._ticked.notify_all()
        try:
            self._tick(sync=True)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("the delivery thread failed in its last tick")
        if self._log.close_journal() and self._black_box is not None:
            self._black_box.remove()
        with self._ticked:
            # Whoever still waits for a tick would wait in vain.
            self._ended = True
            self._ticked.notify_all()

    def _serve_signal(self, now: float) -> None:
        """Keep the lanes at what a signal handler waits for, and do what it asks to be done."""
        if now < self._hurries_until:
            if not self.is_behind_from_signal():
                self._hurries_until = 0.0
            elif now >= self._hurries_at:
                self._hurries_at = now + _HURRY_EVERY_S
                for lane in self._lanes:
                    lane.nudge()
        call, self._signal_call = self._signal_call, None
        if call is not None:
            call()

    def _collect(self, is_second: bool, *, whole: bool) -> None:
        """Have summed up what is: once a second, and all of it before the process may go."""
        collect = self.collect
        if collect is not None and (is_second or whole):
            collect(whole=whole)

    def _tick(self, *, sync: bool) -> bool:
        """One round of work; whether everything that was in the channels is in the log."""
        mark = self._black_box.mark() if self._black_box is not None else None
        drained = self._framer.drain()
        self._memory.bound(may_tell=not self._log.is_full)
        written = self._log.write_journal()
        end = self._log.end
        if written:
            self._journaled_end = end
        if self._black_box is not None and mark is not None and drained and self._log.survives:
            self._black_box.release(mark)
        if sync and self._log.sync_journal():
            self._journaled_end = self._durable_end = end
        if not self._retain:
            self._log.release_journal()
        return drained

    def _tell_gap(self, gaps: Mapping[str, int]) -> None:
        assert self._on_gap is not None
        self._on_gap(gaps)
        self._log.tell(gaps)

    def _beat(self) -> None:
        for lease in self._leases:
            # Where the journal's disk failed at the start, it may have come back.
            lease.take()
            lease.beat()
        on_beat = self._on_beat
        if on_beat is not None:
            on_beat()


def _may_overflow(channel: Channel) -> bool:
    return 2 * len(channel.items) >= (channel.items.maxlen or 0)


class StandInStream(RunStream):
    """Stands in for a stream that may never be needed; it costs nothing until then.

    Args:
        origin: What all records will have in common.
        open_stream: Called by the first record; by the time it returns,
            `succeed` has been called, or the record is not kept.
    """

    def __init__(self, origin: Origin, open_stream: Callable[[], None]) -> None:
        super().__init__(origin)
        self._open_stream = open_stream
        self._successor: RunStream | None = None
        for channel in self._channels.values():
            channel.append = partial(self._hand_on, channel.kind)

    def open(self) -> None:
        """Open the real stream, as the first record does."""
        if self._successor is None:
            self._open_stream()

    @property
    def active(self) -> bool:
        """Whether what comes here is kept: by the stream that it opens."""
        return True

    @property
    def payloads(self) -> PayloadFolder | None:
        """Where the real stream's payloads go, which is opened for this."""
        if self._successor is None:
            self._open_stream()
        return None if self._successor is None else self._successor.payloads

    def succeed(self, stream: RunStream) -> None:
        """Pass on to the real stream what still comes here."""
        for kind, channel in self._channels.items():
            # What was numbered here keeps its number, so the next one must be another.
            stream.channel(kind).continue_sequence(channel)
        self._successor = stream

    def _hand_on(self, kind: str, item: Any) -> None:
        if self._successor is None:
            self._open_stream()
        if self._successor is not None:
            self._successor.channel(kind).append(item)
