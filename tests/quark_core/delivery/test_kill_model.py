"""A process is killed at any call while its journal fails and its lanes work: lost 0, twice 0.

Everything between `log()` and the stores is the real thing, on a real disk that
fails as told. The stores acknowledge whatever lies below their head, as the
real ones do, so that a number that is given twice loses what came second.
"""

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tiers import count_examples

from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.crash_buffer import BlackBox, find_box_path, remove_black_box
from quark_core.delivery.delivery_state import Files
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream
from quark_core.delivery.sync import count_waiting, sync_folder
from quark_core.errors import BackendUnavailable
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord
from quark_core.system.process import ProcessIdentity, current_process

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or not hasattr(os, "posix_fallocate"),
    reason="needs shared memory",
)

NUMBERS = itertools.count()


class Killed(BaseException):
    """The process is gone from here on."""


class FailingFiles(Files):
    """A disk that fails, for once or for good, and at which the process may be killed."""

    def __init__(self):
        self.fail_in = None
        self.broken = False
        self.kill_in = None
        self.synced = {}
        self.paths = {}

    def _step(self):
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                raise Killed
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def create(self, path):
        self._step()
        descriptor = super().create(path)
        self.paths[descriptor] = path
        self.synced[path] = 0
        return descriptor

    def write(self, descriptor, data):
        try:
            self._step()
        except OSError:
            # Half of it gets there, as on a disk that is full.
            super().write(descriptor, data[: len(data) // 2])
            raise
        except Killed:
            super().write(descriptor, data[: len(data) // 3])
            raise
        return super().write(descriptor, data)

    def truncate(self, descriptor, size_bytes):
        self._step()
        super().truncate(descriptor, size_bytes)

    def sync(self, descriptor):
        path = self.paths[descriptor]
        try:
            self._step()
        except OSError:
            # The system drops what it could not write, and calls it clean.
            with path.open("r+b") as file:
                file.truncate(self.synced[path])
            raise
        self.synced[path] = path.stat().st_size

    def remove(self, path):
        self._step()
        super().remove(path)


class Store:
    """Keeps batches; what is below its head is acknowledged and let go."""

    def __init__(self, replays):
        self.batches = {}
        self.head = 0
        self.down = False
        if replays:
            self.read_batches = self._read_batches

    def write(self, batch):
        if self.down:
            raise BackendUnavailable("down")
        if batch.number in self.batches:
            assert self.batches[batch.number].body == batch.body
        if batch.number >= self.head:
            self.batches[batch.number] = batch
            self.head = batch.number + 1

    def _read_batches(self, run_id, writer_id, start, limit):
        if self.down:
            raise BackendUnavailable("down")
        numbers = sorted(number for number in self.batches if number >= start)
        return [self.batches[number] for number in numbers[:limit]]

    def close(self):
        pass

    def list_sequences(self):
        return [
            (batch.kind, sequence)
            for batch in self.batches.values()
            for sequence in batch.decoded.to_list("sequence")
        ]


class KilledProcess(RuleBasedStateMachine):
    """One process from its start to a kill, and the recovery of what it left."""

    capacity_bytes = 1 << 24

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="quark-kill-"))
        self.origin = Origin(f"model{os.getpid()}", f"w{next(NUMBERS)}")
        self.folder = JournalFolder(self.directory / "journal" / self.origin.writer_id)
        self.files = FailingFiles()
        self.stores = {"primary": Store(True), "mirror": Store(False)}
        self.counters = {kind: itertools.count() for kind in ("metric", "event", "lifecycle")}
        self.accepted = set()
        self.box = BlackBox(
            find_box_path(self.origin.run_id, self.origin.writer_id),
            self.origin,
            capacity_bytes=self.capacity_bytes,
            segment_bytes=2048,
        )
        self.manifest = Manifest(
            run_id=self.origin.run_id,
            writer_id=self.origin.writer_id,
            attempt=0,
            rank=0,
            project="p",
            storage_dir=str(self.directory),
            run_path=str(self.directory),
            lanes=(LaneEntry("primary", "x", True), LaneEntry("mirror", "y")),
            process=ProcessIdentity(current_process().host, 1, "never"),
            black_box=str(self.box.path),
        )
        self.folder.write_manifest(self.manifest)
        journal = Journal(
            self.folder.path, self.origin, files=self.files, segment_bytes=900, prepare=None
        )
        self.log = BatchLog(journal=journal, box=self.box, window_bytes=2_000)
        self.cursors = {
            name: self.log.open_cursor(primary=name == "primary") for name in self.stores
        }
        self.stream = RunStream(
            self.origin, self.log, folder=self.folder, black_box=self.box, capacity_bytes=1 << 24
        )
        self.stream.channel("metric").fit_frames(7)
        self.alive = True
        self.head_is_lost = False

    def head(self, kind):
        origin = self.origin
        sequence = next(self.counters[kind])
        return (origin.run_id, origin.writer_id, 0, 0, sequence, 5)

    def put(self, kind, record):
        self.stream.channel(kind).append(record)
        self.accepted.add((kind, record.sequence))

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 60))
    def log_metrics(self, count):
        for _ in range(count):
            record = MetricRecord(*self.head("metric"), "a/b", "a", "b", 0.5, 1)
            self.put("metric", record)

    @precondition(lambda self: self.alive)
    @rule(kind=st.sampled_from(["event", "lifecycle"]))
    def log_other(self, kind):
        if kind == "event":
            record = EventRecord(*self.head(kind), "saved", "info")
        else:
            record = LifecycleRecord(*self.head(kind), "heartbeat", None)
        self.put(kind, record)

    @precondition(lambda self: self.alive)
    @rule(
        fail_in=st.none() | st.integers(0, 6),
        kill_in=st.none() | st.integers(0, 12),
        sync=st.booleans(),
    )
    def tick(self, fail_in, kill_in, sync):
        """The delivery thread's work; the disk may fail, and the process end, at any call."""
        self.files.fail_in, self.files.kill_in = fail_in, kill_in
        self.log._retry_at = 0.0
        try:
            self.stream._tick(sync=sync)
        except Killed:
            self.alive = False
        self.files.fail_in = self.files.kill_in = None

    @precondition(lambda self: self.alive)
    @rule(broken=st.booleans())
    def break_or_mend_disk(self, broken):
        self.files.broken = broken

    @precondition(lambda self: self.alive)
    @rule(
        name=st.sampled_from(["primary", "mirror"]),
        count=st.integers(1, 9),
        notes=st.booleans(),
        loses_reply=st.booleans(),
    )
    def deliver(self, name, count, notes, loses_reply):
        """A lane sends what it sees; its mark may not get to the disk, nor the reply to it."""
        cursor = self.cursors[name]
        for batch in cursor.peek(count):
            self.stores[name].write(batch)
            if loses_reply:
                return
            cursor.advance([batch])
            if notes:
                self.folder.mark(name).finish(batch.number + 1)

    @rule()
    def pass_time(self):
        """Also where the process is gone."""

    def teardown(self):
        try:
            self.recover()
        finally:
            remove_black_box(self.box.path)
            shutil.rmtree(self.directory, ignore_errors=True)

    @precondition(lambda self: self.alive)
    @rule()
    def lose_head(self):
        """What the box knows of batches is damaged: then the primary is asked."""
        self.head_is_lost = True

    def recover(self):
        """Whatever it looked like at the kill: after a sync each record is in each store, once."""
        if self.head_is_lost:
            with (self.box.path / "head").open("r+b") as file:
                file.write(bytes(4))
        self.stores["primary"].down = True  # a first one may come in an outage
        with contextlib.suppress(AssertionError):
            count_waiting(self.folder, self.manifest)
        sync_folder(self.folder, self.manifest, self.open_lane)
        self.stores["primary"].down = False
        results = sync_folder(self.folder, self.manifest, self.open_lane)
        assert {result.state for result in results} <= {"delivered"}
        assert [what for result in results for what in result.damage] == []
        assert not self.box.path.exists()
        for store in self.stores.values():
            stored = store.list_sequences()
            assert len(stored) == len(set(stored)), "stored twice"
            self.check_lost(self.accepted - set(stored), stored)

    def check_lost(self, lost, stored):
        assert lost == set()

    def open_lane(self, manifest, entry):
        return self.stores[entry.name], True


KilledProcess.TestCase.settings = settings(
    max_examples=count_examples(60), stateful_step_count=25, deadline=None
)
TestKilledProcess = KilledProcess.TestCase
