"""A mirror is opened once for the journals of many processes, and left alone while it is down."""

import contextlib
import math
import os
import signal
import threading
import time

import pytest
from kit.programs import wait_until
from msgspec.structs import replace

import quark
from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.registry import default_registry
from quark_core.delivery.journal_folder import LaneEntry, Manifest
from quark_core.delivery.sync import SharedLanes, sync_folder
from quark_core.errors import BackendUnavailable, InvalidRunStateError
from quark_core.runs import recovery
from quark_core.system.process import current_process
from quark_core.testing.fakes import ScriptedBackend

CHILDREN = 3
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Mirror:
    """One store behind any number of openings, each of which is noted."""

    def __init__(self):
        self.store = ScriptedBackend()
        self.opened = []
        self.closed = []
        self.is_down = False
        self.close_error = None

    def open(self, _config):
        self.opened.append((threading.current_thread().name, time.monotonic()))
        if self.is_down:
            raise BackendUnavailable("planted outage")
        return Opening(self)

    def by(self, name):
        """When a thread of this name has opened it."""
        return [moment for thread, moment in self.opened if thread == name]

    def writers(self):
        return {batch.writer_id for batch in self.store.stored}


class Opening:
    def __init__(self, mirror):
        self._mirror = mirror

    def write(self, batch):
        if self._mirror.is_down:
            raise BackendUnavailable("planted outage")
        self._mirror.store.write(batch)

    def close(self):
        self._mirror.closed.append(self)
        if self._mirror.close_error is not None:
            raise self._mirror.close_error


@pytest.fixture
def mirror(monkeypatch):
    mirror = Mirror()
    definition = BackendDefinition(
        name="noted",
        summary="notes each opening",
        open=mirror.open,
        capabilities=frozenset({Capability.IDEMPOTENT}),
        own_process=False,
    )
    monkeypatch.setitem(default_registry()._definitions, "noted", definition)
    return mirror


class Children:
    """Forked processes that log a value, and then live until they are told to end."""

    def __init__(self, session, count):
        gate, self._gate = os.pipe()
        self._pids = []
        for index in range(count):
            pid = os.fork()
            if pid == 0:
                try:
                    os.close(self._gate)
                    quark.MetricsLogger(session).log("child", float(index), step=index)
                    session.flush("durable")
                    os.read(gate, 1)
                finally:
                    os._exit(0)
            self._pids.append(pid)
        os.close(gate)

    def end(self):
        os.close(self._gate)
        for pid in self._pids:
            os.waitpid(pid, 0)

    def kill(self):
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self.end()


@pytest.fixture
def session(tmp_path, mirror):
    session = quark.start_run(project="p", storage_dir=tmp_path, backends="noted")
    yield session
    with contextlib.suppress(InvalidRunStateError):  # most have ended it
        session.end_run()


def stored(session):
    return sorted(r.value for r in quark.MetricsLogger(session).read(metric_key="child"))


@pytest.mark.long
@needs_fork
def test_children_of_a_training_share_one_opening(session, mirror):
    assert wait_until(mirror.writers)
    children = Children(session, CHILDREN)
    assert wait_until(lambda: len(mirror.writers()) == 1 + CHILDREN)
    assert len(mirror.by("quark-children")) == 1
    assert mirror.closed == []
    children.end()
    # When no child is left it is closed, long before the run ends.
    assert wait_until(lambda: mirror.closed)
    session.end_run()
    assert len(mirror.opened) == len(mirror.closed) == 2
    assert stored(session) == [0.0, 1.0, 2.0]


@pytest.mark.long
@needs_fork
def test_a_mirror_that_is_down_is_not_asked_by_every_journal_every_second(session, mirror):
    assert wait_until(mirror.writers)
    mirror.is_down = True
    began = time.monotonic()
    children = Children(session, CHILDREN)
    # The primary has it all the same.
    assert wait_until(lambda: len(stored(session)) == CHILDREN)
    assert wait_until(lambda: mirror.by("quark-children"))
    time.sleep(max(0.0, 6.0 - (time.monotonic() - began)))
    asked = mirror.by("quark-children")
    # After 1, 2, 4 s and so on; without rests it would be three times each second.
    assert len(asked) <= 2 + math.log2(1 + time.monotonic() - began)
    mirror.is_down = False
    children.end()
    session.end_run()
    assert len(mirror.writers()) == 1 + CHILDREN
    assert list(recovery.find_folders(session.context.storage_dir)) == []


@pytest.mark.long
@needs_fork
def test_what_another_process_has_delivered_meanwhile_is_not_taken_back(tmp_path):
    """TensorBoard's files are cut off at what is acknowledged, which must not be an old figure."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    session = quark.start_run(project="p", storage_dir=tmp_path, backends="tensorboard")
    children = session.open_run.children
    turn, told = os.pipe()
    done, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            metrics = quark.MetricsLogger(session)
            for step in range(3):
                os.read(turn, 1)
                metrics.log("child", float(step), step=step)
                session.flush("durable")
                os.write(tell, b"x")
        finally:
            os._exit(0)
    place = session.run_path / "tensorboard"

    def points():
        found = []
        for folder in {path.parent for path in place.rglob("*tfevents*")}:
            read = accumulator.EventAccumulator(str(folder)).Reload()
            if "child" in read.Tags()["scalars"]:
                found += [event.step for event in read.Scalars("child")]
        return sorted(found)

    def log_one(expected):
        os.write(told, b"x")
        os.read(done, 1)
        assert wait_until(lambda: points() == expected)

    try:
        log_one([0])
        assert wait_until(lambda: not children._thread.is_alive())
        # From here on this training is slow, and somebody syncs.
        deliver, children._deliver = children._deliver, lambda _: None
        os.write(told, b"x")
        os.read(done, 1)
        (journal,) = (
            folder
            for folder in recovery.find_folders(tmp_path)
            if folder.path.name != session.open_run.origin.writer_id
        )
        sync_folder(journal, journal.read_manifest(), recovery.open_lane)
        assert points() == [0, 1]
        children._deliver = deliver
        log_one([0, 1, 2])
    finally:
        os.write(told, b"xxx")
        os.waitpid(pid, 0)
        for descriptor in (turn, told, done, tell):
            os.close(descriptor)
        session.end_run()
    assert points() == [0, 1, 2]


@pytest.mark.long
@needs_fork
def test_what_was_left_behind_shares_one_opening_too(session, mirror, monkeypatch):
    monkeypatch.setattr(recovery.ChildDelivery, "_deliver", lambda *_: None)
    assert wait_until(mirror.writers)
    children = Children(session, CHILDREN)
    own = session.open_run.origin.writer_id

    def count_journaled():
        lanes = recovery.survey(session.context.storage_dir)
        return sum(
            lane.backend == "noted" and lane.writer_id != own and lane.waiting > 0 for lane in lanes
        )

    assert wait_until(lambda: count_journaled() == CHILDREN)
    children.kill()
    session.end_run()
    before = len(mirror.opened)
    mirror.close_error = OSError("planted failure to close")
    results = [r for r in recovery.sync(session.context.storage_dir) if r.backend == "noted"]
    assert [r.state for r in results] == ["delivered"] * CHILDREN
    assert len(mirror.opened) == before + 1
    # What it could not finish is said of the run whose journals they are.
    assert {r.reason for r in results} == {"OSError: planted failure to close"}
    assert len(mirror.writers()) == 1 + CHILDREN
    assert recovery.sync(session.context.storage_dir) == []


@pytest.fixture
def manifest(tmp_path):
    lanes = (LaneEntry("noted", "noted"), LaneEntry("embedded", "embedded", primary=True))
    return Manifest(
        run_id="run0",
        writer_id="w",
        attempt=0,
        rank=0,
        project="p",
        storage_dir=str(tmp_path),
        run_path=str(tmp_path / "run"),
        lanes=lanes,
        process=current_process(),
    )


def test_only_a_mirror_that_cannot_take_it_now_stays_open(manifest, mirror):
    lanes = SharedLanes(lambda _manifest, _entry: (mirror.open(None), True))
    noted, primary = manifest.lanes
    first, _ = lanes.open(manifest, noted)
    assert lanes.keep(first, None)
    assert lanes.keep(first, BackendUnavailable("not now"))
    assert lanes.open(manifest, noted)[0] is first
    assert not lanes.keep(first, ZeroDivisionError("a bug"))
    second, _ = lanes.open(manifest, noted)
    assert second is not first
    # Those of another run, and the primary, are others.
    assert lanes.open(replace(manifest, run_id="run1"), noted)[0] is not second
    assert not lanes.keep(lanes.open(manifest, primary)[0], None)
    assert lanes.close(but_run_id="run1") == {}
    assert mirror.closed == [second]
    lanes.close()
    assert not lanes.is_open
