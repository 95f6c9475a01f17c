"""A file system that hangs stops no training, and no end of a run."""

import threading

import pytest
from journaled import adds_up, open_stream, put_metric, stored_values
from kit.programs import log_steps, wait_until

import quark
from quark_core.delivery.delivery_state import Files
from quark_core.errors import SessionStoreError
from quark_core.testing.fakes import ScriptedBackend

# Longer than a test may last: what waits for the disk does not come back by itself.
HANGS_S = 600


class HangingFiles(Files):
    """Once `hold` is called, one operation waits until `release` is."""

    def __init__(self, operation):
        self.operation = operation
        self.open = threading.Event()
        self.open.set()
        self.waits = threading.Event()
        self.hold = self.open.clear
        self.release = self.open.set

    def _pass(self, operation):
        if operation == self.operation and not self.open.is_set():
            self.waits.set()
            self.open.wait(HANGS_S)

    def write(self, descriptor, data):
        self._pass("write")
        return super().write(descriptor, data)

    def sync(self, descriptor):
        self._pass("sync")
        super().sync(descriptor)

    def create(self, path):
        self._pass("create")
        return super().create(path)


def put_until_it_hangs(stream, files):
    """Put in the values from 100 to 5,000, so many at once that the journal begins a segment."""
    for value in range(100, 5_000):
        put_metric(stream, value)
        if value % 1_000 == 0:
            files.waits.wait(0.5)
    assert files.waits.wait(60)


@pytest.mark.parametrize("operation", ["write", "sync", "create"])
def test_what_is_logged_while_the_disk_hangs_is_delivered_after_it(tmp_path, operation):
    files, backend = HangingFiles(operation), ScriptedBackend()
    stream = open_stream(tmp_path / "j", backend, files=files, segment_bytes=2_000)
    for value in range(100):
        put_metric(stream, value)
    stream.flush(60)
    files.hold()
    put_until_it_hangs(stream, files)
    with pytest.raises(SessionStoreError, match="Nothing is lost"):
        stream.flush(0.1, "durable")
    assert adds_up(stream.report().lanes[0])
    assert stream.report().lanes[0].submitted == 5_000
    files.release()
    stream.flush(60, "durable")
    assert stream.close(60).complete
    assert stored_values(backend) == list(map(float, range(5_000)))


@pytest.mark.sampled
@pytest.mark.parametrize("operation", ["write", "sync", "create"])
def test_the_end_of_a_stream_on_a_hanging_disk_is_bounded_and_tells_what_waits(tmp_path, operation):
    files, backend = HangingFiles(operation), ScriptedBackend()
    stream = open_stream(tmp_path / "j", backend, files=files, segment_bytes=2_000)
    for value in range(100):
        put_metric(stream, value)
    stream.flush(60)
    files.hold()
    put_until_it_hangs(stream, files)
    (lane,) = stream.close(0.5).lanes
    assert not files.open.is_set()
    assert (lane.submitted, lane.waiting) == (5_000, 5_000 - lane.delivered)
    files.release()


@pytest.fixture
def hang(monkeypatch):
    """Makes the writes of every journal that is opened from now on hang."""
    files = HangingFiles("write")
    monkeypatch.setattr("quark_core.delivery.journal.Files", lambda: files)
    yield files
    files.release()


@pytest.mark.long
def test_a_run_on_a_hanging_disk_ends_in_time(tmp_path, hang, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    session = quark.start_run(project="p", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    session.flush()
    hang.hold()
    log_steps(metrics, 1, 1000)
    with pytest.raises(quark.SessionStoreError, match="Nothing is lost"):
        session.flush(timeout_s=0.2)
    session.end_run()
    assert not hang.open.is_set()
    (lane,) = session.report_delivery().lanes
    assert lane.waiting > 0
    assert lane.submitted >= 1_000
    assert lane.submitted == lane.delivered + lane.waiting


@pytest.mark.long
def test_the_journal_of_a_run_that_ended_while_the_disk_hung_is_still_delivered(
    tmp_path, hang, monkeypatch
):
    """Nothing is deleted that still waits, and what was accepted comes when the disk is back."""
    from quark_core.runs import recovery

    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    session = quark.start_run(project="p", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    session.flush()
    hang.hold()
    log_steps(metrics, 1, 1000)
    assert hang.waits.wait(60)
    session.end_run()
    thread = session.open_run.stream._thread
    hang.release()
    assert wait_until(lambda: not thread.is_alive())
    recovery.sync(tmp_path)
    found = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read(metric_key="m")
    assert [record.value for record in found] == list(map(float, range(1_000)))


@pytest.mark.long
def test_a_run_that_ends_without_waiting_leaves_all_of_it_in_the_journal(tmp_path, monkeypatch):
    from quark_core.runs import recovery

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.flush()
        log_steps(metrics, 5000)
        monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0")
    thread = session.open_run.stream._thread
    assert wait_until(lambda: not thread.is_alive())
    recovery.sync(tmp_path)
    found = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read(metric_key="m")
    assert [record.value for record in found] == list(map(float, range(5_000)))
