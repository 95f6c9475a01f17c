"""The batches that wait for at least one lane, each lane at its own cursor."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quark_core.backends.contract import Batch
from quark_core.delivery.channel import FRAME_BYTES, Channel, encode_frame_body
from quark_core.delivery.crash_buffer import BlackBox, StreamAccounts, list_item_spans
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.segments import Origin, encode_frame

_log = logging.getLogger("quark")

DEFAULT_CAPACITY_BYTES = 64 * 1024 * 1024
# Lanes that are this far behind read from the journal instead.
_WINDOW_BYTES = 8 * 1024 * 1024
_JOURNAL_RETRY_S = 0.2
_JOURNAL_PART = 16
_REPLAYED = 256


class BatchLog:
    """One writer's batches in the order of their numbers, from 0 on.

    With a journal, batches are written there before any reader sees them;
    memory holds the newest of them, and a lane that is further behind reads
    the journal. While the journal cannot be written, batches go to the black
    box instead and wait in memory too, up to the capacity, and lanes are
    served from there. Where neither takes them, lanes are served all the
    same, but nothing that outlives the process numbers them anew: the black
    box notes that they are made. Without a journal memory is all there is:
    beyond the capacity the oldest go, and each cursor that had not passed
    them counts their records as dropped.

    One thread appends; cursors may be used from any.

    Args:
        capacity_bytes: Bound of what is held in memory alone.
        journal: Where batches are written first.
        window_bytes: How much of what is journaled is kept in memory as well.
        journal_capacity_bytes: Beyond this the journal lets go what the
            primary has, even if another lane has not.
        box: Where batches are kept that the journal does not take, and where it is
            noted which records are in batches.
        replay: Gives batches that the journal has let go, from a number on and
            at most so many, out of the primary.
    """

    def __init__(
        self,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        journal: Journal | None = None,
        *,
        window_bytes: int = _WINDOW_BYTES,
        journal_capacity_bytes: int | None = None,
        box: BlackBox | None = None,
        replay: Callable[[int, int], list[Batch]] | None = None,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._window_bytes = window_bytes
        self._journal_capacity_bytes = journal_capacity_bytes
        self._box = box
        self._replay = replay
        self._keeper: Cursor | None = None
        self._journal = journal
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._base = 0
        self._size_bytes = 0
        # Records up to each position are what reports are made of: one total per batch
        # that some cursor has not passed.
        self._totals: deque[int] = deque([0])
        self._totals_base = 0
        self._released = 0
        self.accounts = StreamAccounts()
        """Which records are in a batch; the appending thread's."""
        self._unpublished: list[Batch] = []
        self._kept_end = 0
        self._unsynced_kept = False
        self._unwritten: list[Batch] = []
        self._unwritten_bytes = 0
        self._retry_at = 0.0
        self._journal_error: str | None = None
        self._cursors: list[Cursor] = []

    def open_cursor(self, *, primary: bool = False) -> Cursor:
        """A new reader at the beginning; opened before the first append."""
        with self._changed:
            cursor = Cursor(self, 0)
            self._cursors.append(cursor)
            if primary:
                self._keeper = cursor
            return cursor

    def append(self, *batches: Batch) -> None:
        """Add batches and hand them to the readers."""
        self.add(*batches)
        self.persist()

    def add(self, *batches: Batch) -> None:
        """Add batches, which readers see from the next `persist` on."""
        if not self._cursors and self._journal is None:
            return
        with self._changed:
            self._unpublished += batches
        self.accounts.next_number = batches[-1].number + 1
        if self._journal is not None:
            self._unwritten += batches
            self._unwritten_bytes += sum(len(batch.body) for batch in batches)

    def persist(self) -> None:
        """Bring what was added to where it outlives the process, then hand it to the readers."""
        self.write_journal()
        self._publish()
        if self._box is not None:
            self._box.provide()
        with self._changed:
            self._evict()

    def account(self, kind: str, items: list[Any]) -> None:
        """Note that a channel's items are in a batch that is about to be added."""
        if self._box is not None:
            self.accounts.add(kind, list_item_spans(items))

    def tell(self, gaps: Mapping[str, int]) -> None:
        """Note that records, by kind, are gone and that the run itself tells of it."""
        self.accounts.tell(gaps)
        if self._box is not None:
            self._box.save_accounts(self.accounts)

    def _publish(self) -> None:
        """Let the readers see what was added."""
        if not self._unpublished:
            return
        if self._box is not None:
            self._box.save_accounts(self.accounts)
        with self._changed:
            for batch in self._unpublished:
                self._batches.append(batch)
                self._totals.append(self._totals[-1] + batch.count)
                self._size_bytes += len(batch.body)
            self._unpublished.clear()
            self._changed.notify_all()

    def count_unpublished(self) -> int:
        """Records that were added and that no reader sees yet."""
        with self._changed:
            return sum(batch.count for batch in self._unpublished)

    def write_journal(self, *, now: bool = False) -> bool:
        """Write to the journal what is not there yet; whether all of it is.

        While the journal fails it is tried a few times a second, not at every
        call, and the black box takes what it does not.

        Args:
            now: Try even if the last try was a moment ago.
        """
        self._forget_delivered()
        if self._journal is None:
            return False
        whole = not self._unwritten or self._try_journal(now=now)
        if self._box is not None:
            self._use_box(self._box, whole)
        return whole

    def _use_box(self, box: BlackBox, whole: bool) -> None:
        """Keep in the black box what the journal does not hold, and no more than that."""
        journal = self._journal
        assert journal is not None
        if whole and not journal.must_rewrite:
            self._kept_end, self._unsynced_kept = 0, False
            box.drop_frames()
        frames: list[tuple[int, bytes]] = []
        if journal.must_rewrite and not self._unsynced_kept:
            # After a failed sync nothing may be trusted that was not synced.
            frames += journal.unsynced
        left = [batch for batch in self._unwritten if batch.number >= self._kept_end]
        frames += [(batch.number, encode_frame(batch)) for batch in left]
        if frames:
            try:
                box.keep_frames(frames)
            except (OSError, MemoryError) as error:
                if not self.accounts.exposed:
                    _log.warning(
                        "shared memory is not available either (%s). Until the journal can be "
                        "written, a killed process loses the records that no backend has yet",
                        error,
                    )
            else:
                self._unsynced_kept = journal.must_rewrite
                self._kept_end = frames[-1][0] + 1
                left = []
        exposed = sum(batch.count for batch in left)
        if exposed != self.accounts.exposed:
            self.accounts.exposed = exposed
            box.save_accounts(self.accounts)

    @property
    def survives(self) -> bool:
        """Whether all that was added is where it outlives the process."""
        if self._journal is None:
            return False
        return not self._unwritten or (
            self._box is not None and self._unwritten[-1].number < self._kept_end
        )

    def _try_journal(self, *, now: bool) -> bool:
        """Write to the journal what is not there yet, as `write_journal`."""
        assert self._journal is not None
        if not now and time.monotonic() < self._retry_at:
            return False
        try:
            # In parts, so that a disk with little room takes what it can.
            while self._unwritten:
                part = self._unwritten[:_JOURNAL_PART]
                self._journal.append(part)
                del self._unwritten[: len(part)]
                self._unwritten_bytes -= sum(len(batch.body) for batch in part)
        except (OSError, MemoryError, RecursionError) as error:
            self._retry_at = time.monotonic() + _JOURNAL_RETRY_S
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if reason != self._journal_error:
                _log.warning(
                    "the journal %s cannot be written (%s); records wait in memory",
                    self._journal.directory,
                    reason,
                )
            self._journal_error = reason
            return False
        if self._journal_error is not None:
            _log.warning("the journal %s can be written again", self._journal.directory)
            self._journal_error = None
        return True

    def _forget_delivered(self) -> None:
        """What every lane has passed need not be journaled any more."""
        if not self._unwritten or not self._cursors or self._journal_error is None:
            return
        kept = [batch for batch in self._unwritten if batch.number >= self._released]
        if len(kept) < len(self._unwritten):
            self._unwritten = kept
            self._unwritten_bytes = sum(len(batch.body) for batch in kept)
        if self._box is not None and self._kept_end:
            self._box.release_frames(self._released)

    def sync_journal(self) -> bool:
        """Bring the journal to the disk; whether all that was appended is there."""
        if not self.write_journal(now=True):
            return False
        assert self._journal is not None
        try:
            self._journal.sync()
        except (OSError, MemoryError) as error:
            _log.debug("syncing the journal %s: %s", self._journal.directory, error)
            if self._box is not None:
                self._use_box(self._box, not self._unwritten)
            return False
        return True

    def close_journal(self) -> bool:
        """Bring the journal to the disk and close it; whether it is whole.

        Called by the appending thread.
        """
        if self._journal is None:
            return True
        whole = self.write_journal(now=True)
        self._journal.close()
        return whole

    @property
    def is_full(self) -> bool:
        """Whether memory holds all it may because the journal cannot be written."""
        return self._journal is not None and self._unwritten_bytes >= self._capacity_bytes

    @property
    def journal_error(self) -> str | None:
        """Why the journal cannot be written now, or None."""
        return self._journal_error

    @property
    def end(self) -> int:
        """Position after the newest batch, whether readers see it yet or not."""
        with self._changed:
            return self._find_end()

    def _find_end(self) -> int:
        return self._base + len(self._batches) + len(self._unpublished)

    @property
    def all_settled(self) -> bool:
        """Whether every cursor is at the end, and its backend has all of it for good."""
        with self._changed:
            settled = all(cursor.safe_end == cursor.position for cursor in self._cursors)
        return settled and self.all_passed

    @property
    def all_passed(self) -> bool:
        """Whether every cursor is at the end."""
        with self._changed:
            end = self._find_end()
            if not self._cursors:
                return self._journal is None
            return all(cursor.position >= end for cursor in self._cursors)

    def _evict(self) -> None:
        """Keep memory within its bounds."""
        if self._journal is None:
            while self._size_bytes > self._capacity_bytes and len(self._batches) > 1:
                self._forget_first()
            return
        written = self._journal.end
        if not self._cursors:
            # Nobody reads here: another process delivers the journal.
            while self._base < written and self._batches:
                self._forget_first()
                self._totals.popleft()
                self._totals_base += 1
            return
        # What a sync that fails may yet lose must not have to be read from the journal.
        durable = self._journal.durable_end
        while self._size_bytes > self._window_bytes and self._base < durable and self._batches:
            self._forget_first()

    def _forget_first(self) -> None:
        batch = self._batches.popleft()
        self._base += 1
        self._size_bytes -= len(batch.body)

    def _release(self) -> None:
        """Forget what every cursor has passed."""
        passed = min(cursor.position for cursor in self._cursors)
        while self._base < passed and self._batches:
            self._forget_first()
        while self._totals_base < passed:
            self._totals.popleft()
            self._totals_base += 1
        self._released = min(cursor.safe_end for cursor in self._cursors)

    def release_journal(self) -> None:
        """Delete the journal's segments that every cursor has passed; by the appending thread."""
        journal, keeper, capacity = self._journal, self._keeper, self._journal_capacity_bytes
        if journal is None:
            return
        journal.release(self._released)
        if keeper is not None and capacity is not None and journal.size_bytes > capacity:
            journal.release(keeper.safe_end)

    def _total(self, position: int) -> int:
        return self._totals[position - self._totals_base]


class Cursor:
    """One reader's place in a `BatchLog`.

    Attributes:
        position: Number of the batch that comes next.
        dropped_records: Records that went before this reader had them.
    """

    def __init__(self, log: BatchLog, position: int) -> None:
        self._log = log
        self._woken = False
        self._behind: Iterator[Batch] | None = None
        self._read_ahead: deque[Batch] = deque()
        self.position = position
        self._settled: int | None = None
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
            if log._journal is None:
                self._skip_dropped()
            if self.position >= log._base:
                self._behind = None
                self._read_ahead.clear()
                start = self.position - log._base
                stop = min(start + limit, len(log._batches))
                return [log._batches[index] for index in range(start, stop)]
            assert log._journal is not None
            directory, files = log._journal.directory, log._journal.files
            end = log._base + len(log._batches)
        # What is journaled a moment before it is counted here must wait for that.
        found = self._peek_journal(lambda: JournalReader(directory, files=files), limit)
        return [batch for batch in found if batch.number < end]

    def _peek_journal(self, open_reader: Callable[[], JournalReader], limit: int) -> list[Batch]:
        """The next batches out of the journal, read without holding the log's lock."""
        while self._read_ahead and self._read_ahead[0].number < self.position:
            self._read_ahead.popleft()
        while len(self._read_ahead) < limit:
            if self._behind is None:
                start = self._read_ahead[-1].number + 1 if self._read_ahead else self.position
                self._behind = open_reader().read(start)
            batch = next(self._behind, None)
            if batch is None:
                self._behind = None
                break
            self._read_ahead.append(batch)
        if self._read_ahead and self._read_ahead[0].number == self.position:
            return list(self._read_ahead)[:limit]
        return self._peek_primary(limit)

    def _peek_primary(self, limit: int) -> list[Batch]:
        """What the journal has let go, out of the primary; a gap where that has it neither."""
        log = self._log
        following = self._read_ahead[0].number if self._read_ahead else log._base
        if log._replay is not None:
            count = min(limit, following - self.position)
            batches = [b for b in log._replay(self.position, count) if b.number < following]
            if batches:
                return batches
        self._skip_unreadable(following)
        return list(self._read_ahead)[:limit]

    def read_again(self, start: int) -> Iterator[list[Batch]]:
        """Batches before this reader's place, out of the primary and then out of the journal."""
        log = self._log
        wanted = start
        while wanted < self.position and log._replay is not None:
            count = min(_REPLAYED, self.position - wanted)
            found = [b for b in log._replay(wanted, count) if b.number < self.position]
            if not found:
                break
            yield found
            wanted = found[-1].number + 1
        if log._journal is None or wanted >= self.position:
            return
        reader = JournalReader(log._journal.directory, files=log._journal.files, is_written=True)
        for batch in reader.read(wanted):
            if batch.number >= self.position:
                return
            yield [batch]

    def advance(self, batches: Sequence[Batch]) -> None:
        """Pass batches that `peek` returned and that are done with."""
        log = self._log
        with log._changed:
            self._pass_to(batches[-1].number + 1, sum(batch.count for batch in batches))

    @property
    def safe_end(self) -> int:
        """Number before which nothing has to be sent again, whatever becomes of the backend."""
        return self.position if self._settled is None else min(self._settled, self.position)

    def settle(self, end: int | None) -> None:
        """Note before which number the backend has everything for good; None: all it was given."""
        with self._log._changed:
            self._settled = end
            self._log._release()

    def wait_passed(self, position: int, timeout_s: float) -> bool:
        """Wait until this reader has passed a position; whether it has."""
        with self._log._changed:
            return self._log._changed.wait_for(lambda: self.position >= position, timeout_s)

    def count_records(self) -> tuple[int, int, int]:
        """Records submitted to this reader, waiting for it, and dropped."""
        log = self._log
        with log._changed:
            if log._journal is None:
                self._skip_dropped()
            submitted = log._totals[-1]
            return submitted, submitted - log._total(self.position), self.dropped_records

    def _pass_to(self, position: int, delivered: int) -> None:
        """Move on; what lies between and was not delivered counts as dropped."""
        log = self._log
        if position <= self.position:
            # They were counted as dropped while they were being delivered.
            self.dropped_records -= delivered
            return
        between = log._total(position) - log._total(self.position)
        self.dropped_records += between - delivered
        self.position = position
        log._release()
        log._changed.notify_all()

    def _skip_dropped(self) -> None:
        if self.position < self._log._base:
            self._pass_to(self._log._base, 0)

    def _skip_unreadable(self, following: int) -> None:
        """Nobody has what this reader needs next; go on with what there is, and count it."""
        with self._log._changed:
            if self.position < following:
                _log.warning("batches %d to %d are missing", self.position, following - 1)
                self._pass_to(following, 0)


# A loop that logs without a pause must not make the thread spin.
_SHORTEST_TICK_S = 0.005


class Framer:
    """Numbers a writer's batches; belongs to the delivery thread, counts may be asked anywhere.

    Args:
        origin: What all records have in common.
        channels: Where records come from, by kind, in the order of a tick.
        log: Where batches go.
    """

    def __init__(self, origin: Origin, channels: Mapping[str, Channel], log: BatchLog) -> None:
        self._origin = origin
        self._channels = tuple(channels.values())
        self._log = log
        self._draining = 0
        self._framed_bytes = 0
        self._unpersisted_bytes = 0
        self.unencodable = 0
        """Records that could not be encoded; a bug, counted."""

    def drain(self) -> bool:
        """Put what is in the channels now into the log; whether there was room for all of it."""
        drained = True
        for channel in self._channels:
            if channel.items:
                drained = self._drain(channel) and drained
        self._persist()
        return drained

    def count_pending(self) -> int:
        """Records that are accepted and that no reader of the log sees yet."""
        waiting = sum(channel.count_records() for channel in self._channels)
        return self._draining + self._log.count_unpublished() + waiting

    def choose_wait(self, tick_s: float, elapsed_s: float) -> float:
        """How long to wait for the next tick, so that about `FRAME_BYTES` come in meanwhile.

        The threads that log must not be made to look at a size or to wake
        anybody, so it is reckoned from what came since the last call.

        Args:
            tick_s: The longest wait.
            elapsed_s: Time since the last call.
        """
        framed, self._framed_bytes = self._framed_bytes, 0
        if framed <= FRAME_BYTES:
            return tick_s
        return min(tick_s, max(_SHORTEST_TICK_S, elapsed_s * FRAME_BYTES / framed))

    def _drain(self, channel: Channel) -> bool:
        # What comes while this goes on waits for the next tick, so that a tick ends.
        remaining = len(channel.items)
        while remaining > 0 and not self._log.is_full:
            items, records = channel.take_frame()
            if not items:
                return True
            remaining -= len(items)
            self._draining = records
            try:
                batch = self._make_batch(channel.kind, items)
            except Exception:  # noqa: BLE001
                # Records are validated before they come here, so this is a bug of ours or
                # memory that ran out; it must cost this frame only, and be seen.
                _log.exception("%d %s records could not be encoded", records, channel.kind)
                self.unencodable += records
                self._draining = 0
                continue
            self._log.account(channel.kind, items)
            self._log.add(batch)
            for listener in channel.listeners:
                listener(batch)
            self._draining = 0
            self._framed_bytes += len(batch.body)
            # Several small frames are one write.
            self._unpersisted_bytes += len(batch.body)
            if self._unpersisted_bytes >= FRAME_BYTES:
                self._persist()
        return remaining <= 0

    def _persist(self) -> None:
        self._unpersisted_bytes = 0
        self._log.persist()

    def _make_batch(self, kind: str, items: list[Any]) -> Batch:
        count, body = encode_frame_body(kind, items)
        origin = self._origin
        return Batch(
            origin.run_id or "",
            origin.writer_id,
            origin.attempt,
            origin.rank,
            self._log.end,
            kind,
            count,
            body,
        )
