"""Journal, marks and store against a model, with a file system that crashes and fails."""

import contextlib
import errno
import os
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiers import count_examples

from quark_core.delivery.delivery_state import Files
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.segments import Origin
from quark_core.errors import BackendUnavailable
from quark_core.testing.fakes import BatchMaker, ScriptedBackend


class CrashingFiles(Files):
    """A file system in memory; a crash keeps what was synced, and some of the rest."""

    def __init__(self):
        self.data = {}
        self.synced = {}
        self.open = {}
        self.next_descriptor = 3
        self.fail_in = None

    def _step(self):
        if self.fail_in is None:
            return
        self.fail_in -= 1
        if self.fail_in < 0:
            self.fail_in = None
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def make_directory(self, path):
        self._step()

    def create(self, path):
        self._step()
        assert path not in self.data
        self.data[path] = bytearray()
        self.synced[path] = b""
        descriptor, self.next_descriptor = self.next_descriptor, self.next_descriptor + 1
        self.open[descriptor] = path
        return descriptor

    def identify(self, descriptor):
        return self.open[descriptor]

    def write(self, descriptor, data):
        try:
            self._step()
        except OSError:
            # Half of it gets there, as on a disk that is full.
            self.data[self.open[descriptor]] += bytes(data[: len(data) // 2])
            raise
        self.data[self.open[descriptor]] += bytes(data)
        return len(data)

    def truncate(self, descriptor, size_bytes):
        self._step()
        del self.data[self.open[descriptor]][size_bytes:]

    def sync(self, descriptor):
        path = self.open[descriptor]
        try:
            self._step()
        except OSError:
            # The system drops what it could not write, and calls it clean.
            self.data[path] = bytearray(self.synced[path])
            raise
        self.synced[path] = bytes(self.data[path])

    def close(self, descriptor):
        self.open.pop(descriptor, None)

    def read(self, path):
        if path not in self.data:
            raise FileNotFoundError(path)
        return bytes(self.data[path])

    def exists(self, path):
        return path in self.data

    def remove(self, path):
        self.data.pop(path, None)
        self.synced.pop(path, None)

    def list_names(self, path):
        return sorted(p.name for p in self.data if p.parent == path)

    def lose_power(self, keep_share):
        """Everything that was not synced is cut somewhere."""
        for path, data in self.data.items():
            kept = len(self.synced[path])
            self.data[path] = data[: kept + int((len(data) - kept) * keep_share)]


class Delivery(RuleBasedStateMachine):
    """One writer, its journal and an idempotent store, through everything that may happen."""

    def __init__(self):
        super().__init__()
        self.files = CrashingFiles()
        self.directory = Path("journal")
        self.maker = BatchMaker("run0")
        self.store = ScriptedBackend()
        self.accepted = []  # everything that log() returned for, in batches
        self.unwritten = []  # what the journal thread still holds in memory
        self.mark = 0
        self.dead = False
        self.ending = ("none", 0.0)
        self.durable = 0
        self.journaled = 0
        self.open_journal()

    def open_journal(self):
        self.journal = Journal(
            self.directory, Origin("run0", "writer0"), files=self.files, segment_bytes=300
        )

    @initialize(
        ending=st.sampled_from(["none", "kill", "power"]), keep_share=st.sampled_from([0, 0.5, 1])
    )
    def choose_ending(self, ending, keep_share):
        """What happens to the process at the end of the story."""
        self.ending = (ending, keep_share)

    @rule(count=st.integers(1, 3), fail_in=st.none() | st.integers(0, 4))
    def tick(self, count, fail_in):
        """Batches are closed and written; the disk may fail at any call."""
        batch = self.maker.metrics(*[("m", step, 0.0) for step in range(count)])
        self.accepted.append(batch)
        self.unwritten.append(batch)
        self.files.fail_in = fail_in
        try:
            self.journal.append(self.unwritten)
        except OSError:
            pass
        else:
            self.unwritten = []
            self.journaled = len(self.accepted)
        self.look_at_promises()

    @rule(fail_in=st.none() | st.integers(0, 4))
    def sync(self, fail_in):
        """What is journaled is brought to the disk; that may fail too."""
        self.files.fail_in = fail_in
        with contextlib.suppress(OSError):
            self.journal.sync()
        self.look_at_promises()

    def look_at_promises(self):
        """What is safe from what, as the journal says."""
        self.files.fail_in = None
        self.durable = self.journal.durable_end
        if self.journal.must_rewrite:
            # A failed sync may have lost what was only written; memory has it still.
            self.journaled = self.durable

    def batches_to_deliver(self):
        """What a lane sees: the journal and, while the process lives, its memory."""
        if self.dead:
            return list(JournalReader(self.directory, files=self.files).read(self.mark))
        return self.accepted[self.mark :]

    @rule(fault=st.sampled_from(["ok", "unavailable", "lost_reply"]), count=st.integers(1, 4))
    def deliver(self, fault, count):
        """A lane, or quark sync, delivers some batches; the reply may be lost."""
        self.store._script = iter([fault])
        for batch in self.batches_to_deliver()[:count]:
            try:
                self.store.write(batch)
            except BackendUnavailable:
                return
            self.mark = batch.number + 1

    @rule()
    def lose_mark(self):
        """The mark is not synced, so a crash may bring back an older one."""
        self.mark = max(0, self.mark - 2)
        released = self.first_left()
        self.mark = max(self.mark, released)

    def first_left(self):
        left = list(JournalReader(self.directory, files=self.files).read())
        return left[0].number if left else self.mark

    @rule()
    def release(self):
        """Segments go that the store has acknowledged, and no others."""
        self.journal.release(self.mark)

    @invariant()
    def nothing_comes_twice_or_out_of_order(self):
        numbers = [batch.number for batch in self.store.stored]
        assert numbers == list(range(len(numbers)))

    @invariant()
    def stored_is_what_was_accepted(self):
        assert self.store.stored == self.accepted[: len(self.store.stored)]

    @invariant()
    def the_journal_reads_in_order_and_each_once(self):
        numbers = [b.number for b in JournalReader(self.directory, files=self.files).read()]
        assert numbers == sorted(set(numbers))

    def end(self):
        """SIGKILL keeps what was written, the loss of power what was synced."""
        ending, keep_share = self.ending
        if ending == "none":
            return 0
        self.dead = True
        self.files.open.clear()
        if ending == "power":
            self.files.lose_power(keep_share)
            return self.durable
        return self.journaled

    def teardown(self):
        """Whatever was promised is in the store or in the journal, and is delivered once."""
        survivors = self.end()
        left = list(JournalReader(self.directory, files=self.files).read())
        numbers = {batch.number for batch in left + self.store.stored}
        assert set(range(survivors)) <= numbers
        self.store._script = iter([])
        for batch in self.batches_to_deliver():
            self.store.write(batch)
        stored = [batch.number for batch in self.store.stored]
        assert stored == list(range(len(stored)))
        assert len(stored) == len(self.accepted) if not self.dead else len(stored) >= survivors


Delivery.TestCase.settings = settings(
    max_examples=count_examples(300), stateful_step_count=40, deadline=None
)
TestDelivery = Delivery.TestCase
