"""A disk that fills in the middle of an artifact: no half file, a clear word, and on it goes."""

import errno
import logging
import os
import threading

import pytest
from failing_disk import FailingDisk
from payload_tools import (
    assert_clean,
    assert_whole,
    list_events,
    list_objects,
    list_scratch,
    sha256,
)

import quark
from quark_core.runs import recovery

SIZE = 1_500_000
SWEEP = 24


@pytest.fixture
def disk(monkeypatch, tmp_path):
    return FailingDisk(monkeypatch, tmp_path)


@pytest.fixture(params=["store", "store_file"])
def store(request, tmp_path):
    """Stores new bytes by one of the two ways; returns them and the record."""

    heads = set()

    def store_one(artifacts, **arguments):
        data = os.urandom(SIZE)
        # Each needs a folder of its own, so that every one makes the same calls.
        while sha256(data)[:2] in heads:
            data = os.urandom(SIZE)
        heads.add(sha256(data)[:2])
        if request.param == "store":
            return data, artifacts.store("t", "a/b", data, **arguments)
        path = tmp_path / "payload.bin"
        path.write_bytes(data)
        return data, artifacts.store_file("t", "a/b", path, **arguments)

    return store_one


@pytest.mark.sampled
@pytest.mark.parametrize("stays_full", [False, True])
def test_a_disk_full_at_any_call(disk, artifacts, session, store, stays_full, caplog):
    lost, failed, unfailed = [], set(), 0
    store(artifacts)  # makes the folders that all share
    for place in range(SWEEP):
        disk.arm(place, stays_full=stays_full)
        data, record = store(artifacts, step=place, metadata={"mine": place})
        called, committed = list(disk.failed), disk.committed
        disk.arm(None)
        failed |= set(called)
        assert (record.sha256, record.size_bytes) == (sha256(data), SIZE)
        assert list_scratch(session) == [], called
        assert_clean(session)
        if called and not committed:
            lost.append(record)
            assert_told(artifacts, record, place)
            assert sha256(data) not in list_objects(session)
        else:
            assert_whole(artifacts, record, data)
            assert record.metadata["mine"] == place
        again = artifacts.store("t", "again", data)
        assert_whole(artifacts, again, data)
        unfailed = 0 if called else unfailed + 1
    assert unfailed >= 2  # the sweep has gone past the last call
    assert {"payload write", "payload fsync", "payload replace", "mkdir", "payload open"} <= failed
    assert failed >= {"name symlink", "name replace", "write_bytes"}
    assert len(lost) >= 5
    events = list_events(session, "artifact_not_kept")
    assert [event.payload["count"] for event in events] == list(range(1, len(lost) + 1))
    for event, record in zip(events, lost, strict=True):
        assert (event.severity, event.step) == ("error", record.step)
        assert event.payload == event.payload | {
            "artifact_key": "a/b",
            "artifact_type": "t",
            "size_bytes": SIZE,
            "sha256": record.sha256,
            "reason": "No space left on device",
        }
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([line for line in said if "could not be kept: No space left" in line]) == 1


def assert_told(artifacts, record, place):
    """A record of a payload that was not kept says so, here and in the store."""
    assert (record.payload_relative_path, record.metadata_relative_path) == (None, None)
    assert record.metadata["mine"] == place
    assert record.metadata["not_kept"] == "No space left on device"
    assert artifacts.read(artifact_id=record.id) == (record,)
    for call in (artifacts.load, artifacts.open):
        for artifact in (record, record.id):
            with pytest.raises(quark.ArtifactNotFoundError, match="not kept: No space left"):
                call(artifact)


@pytest.mark.sampled
@pytest.mark.parametrize("stays_full", [False, True])
def test_a_strict_run_raises_and_stores_no_record(disk, strict_artifacts, store, stays_full):
    artifacts = strict_artifacts
    run_path = artifacts._run.context.run_path
    raised, kept = 0, [store(artifacts)[1]]
    for place in range(SWEEP):
        disk.arm(place, stays_full=stays_full)
        try:
            data, record = store(artifacts)
        except quark.SessionStoreError as error:
            raised += 1
            assert not disk.committed, disk.failed
            message = str(error)
            assert "artifact 'a/b'" in message, message
            assert "No space left on device" in message
        else:
            assert disk.committed or not disk.failed
            disk.arm(None)
            assert_whole(artifacts, record, data)
            kept.append(record)
        disk.arm(None)
        assert list((run_path / "artifacts" / ".partial").glob("*")) == []
    assert raised >= 5
    assert artifacts.read() == tuple(kept)
    assert quark.EventLogger(artifacts._run.context).read(event_type="artifact_not_kept") == ()


@pytest.mark.parametrize("error", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG])
def test_other_troubles_of_a_disk_are_told_by_their_names(disk, artifacts, session, error):
    artifacts.store("t", "n", b"makes the folders")
    disk.arm(0, stays_full=True, error=error)
    record = artifacts.store("t", "n", os.urandom(100))
    disk.arm(None)
    assert record.metadata["not_kept"] == os.strerror(error)
    with pytest.raises(quark.ArtifactNotFoundError, match=os.strerror(error)):
        artifacts.load(record)
    assert_clean(session)


def test_an_equal_payload_needs_no_room(disk, artifacts):
    first = artifacts.store("t", "n", b"data" * 1000)
    disk.arm(0, stays_full=True)
    again = artifacts.store("t", "n", b"data" * 1000)
    assert set(disk.failed) <= {"name symlink", "mkdir", "write_bytes", "name replace"}
    assert again.payload_relative_path is not None
    assert artifacts.load(again) == artifacts.load(first) == b"data" * 1000


def test_hooks_are_told_of_what_was_not_kept_too(disk, session):
    seen = []
    artifacts = quark.ArtifactStore(
        session, retention_hooks=[lambda store, record: seen.append(record.payload_relative_path)]
    )
    disk.arm(0, stays_full=True)
    artifacts.store("t", "n", b"x")
    disk.arm(None)
    artifacts.store("t", "n", b"x")
    assert seen[0] is None
    assert seen[1] is not None


def test_many_threads_on_a_full_disk_are_each_counted(disk, artifacts, session):
    disk.arm(0, stays_full=True)
    threads = [
        threading.Thread(
            target=lambda: [artifacts.store("t", "n", os.urandom(10)) for _ in range(10)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disk.arm(None)
    counts = [event.payload["count"] for event in list_events(session, "artifact_not_kept")]
    assert sorted(counts) == list(range(1, 41))
    assert_clean(session)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_an_interrupt_leaves_nothing_behind(artifacts, session, monkeypatch, name):
    from quark_core.artifacts import payload_folder

    def interrupt(*arguments):
        raise Interrupted

    class Interrupting:
        def __getattr__(self, asked):
            return interrupt if asked == name else getattr(os, asked)

    monkeypatch.setattr(payload_folder, "os", Interrupting())
    with pytest.raises(Interrupted):
        artifacts.store("t", "n", b"data")
    monkeypatch.undo()
    assert artifacts.read() == ()
    assert_clean(session)
    assert artifacts.load(artifacts.store("t", "n", b"data")) == b"data"


def fill(directory):
    with (directory / "filler").open("ab", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_real_disk_that_is_really_full(small_disk):
    with quark.start_run(project="p", storage_dir=small_disk) as session:
        artifacts = quark.ArtifactStore(session)
        first = artifacts.store("t", "first", os.urandom(500_000))
        artifacts.flush()
        # It fills while the payload is written, not before.
        large = artifacts.store("t", "large", os.urandom(20_000_000))
        assert large.metadata["not_kept"] == "No space left on device"
        assert_clean(session)
        fill(small_disk)
        small = [artifacts.store("t", "small", os.urandom(100_000)) for _ in range(3)]
        assert {record.payload_relative_path for record in small} == {None}
        assert_clean(session)
        (small_disk / "filler").unlink()
        last = artifacts.store("t", "last", b"room again")
        assert artifacts.read() == (first, large, *small, last)
        assert artifacts.load(last) == b"room again"
        counts = [event.payload["count"] for event in list_events(session, "artifact_not_kept")]
        assert counts == [1, 2, 3, 4]
    assert session.report_delivery().complete
    assert recovery.survey(small_disk) == []
    found = quark.ArtifactStore(quark.open_run(session.run_id, small_disk))
    assert len(found.load(first)) == 500_000
