"""Payloads that are damaged or gone: told clearly, never handed out."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import threading
import time

import pytest
from failing_disk import FailingDisk
from kit.programs import run_code, start_code
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

DATA = os.urandom(3_000_000)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    rewrite(path, data)


def truncate(path):
    rewrite(path, path.read_bytes()[:-1])


def empty(path):
    rewrite(path, b"")


def lengthen(path):
    rewrite(path, path.read_bytes() + b"x")


def rewrite(path, data):
    path.unlink()
    path.write_bytes(data)


@pytest.fixture(params=["own", "opened", "resumed"])
def store_and_reader(request, tmp_path):
    """A store with one artifact, and the one that reads: itself, of another process, resumed."""
    session = quark.start_run(project="p", storage_dir=tmp_path / "runs")
    artifacts = quark.ArtifactStore(session)
    record = artifacts.store("t", "layer/weights", DATA)
    artifacts.flush()
    if request.param == "own":
        yield session, artifacts, record
        session.end_run()
        return
    session.end_run("failed")
    if request.param == "opened":
        opened = quark.open_run(session.run_id, tmp_path / "runs")
        yield opened, quark.ArtifactStore(opened), record
    else:
        with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path / "runs") as resumed:
            yield resumed, quark.ArtifactStore(resumed), record


def find_object(session, record):
    return list_objects(session)[record.sha256]


@pytest.mark.sampled
@pytest.mark.parametrize("damage", [flip, truncate, empty, lengthen])
def test_a_damaged_payload_is_never_handed_out(store_and_reader, damage, tmp_path):
    session, artifacts, record = store_and_reader
    assert artifacts.load(record) == DATA
    damage(find_object(session, record))
    for artifact in (record, record.id):
        with pytest.raises(quark.ArtifactDamagedError, match="'layer/weights' is damaged") as said:
            artifacts.load(artifact)
        assert record.sha256 in str(said.value)
        assert f"{len(DATA)} bytes" in str(said.value)
        with pytest.raises(quark.ArtifactDamagedError), artifacts.open(artifact) as file:
            while file.read(100_000):
                pass
        target = tmp_path / "copy"
        with pytest.raises(quark.ArtifactDamagedError):
            artifacts.load_file(artifact, target)
        assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    # What is in the records is right all the same.
    assert artifacts.read() == (record,)


@pytest.mark.long
def test_a_copy_that_exists_stays_where_the_payload_is_damaged(store_and_reader, tmp_path):
    session, artifacts, record = store_and_reader
    target = artifacts.load_file(record, tmp_path / "copy")
    flip(find_object(session, record))
    with pytest.raises(quark.ArtifactDamagedError):
        artifacts.load_file(record, target)
    assert target.read_bytes() == DATA


@pytest.mark.parametrize("what", ["object", "folder"])
def test_a_deleted_payload_is_not_found(store_and_reader, what, tmp_path):
    session, artifacts, record = store_and_reader
    if what == "object":
        find_object(session, record).unlink()
    else:
        shutil.rmtree(session.run_path / "artifacts")
    for call in (
        artifacts.load,
        artifacts.open,
        lambda artifact: artifacts.load_file(artifact, tmp_path / "copy"),
    ):
        with pytest.raises(quark.ArtifactNotFoundError, match="does not exist") as said:
            call(record)
        assert record.sha256 in str(said.value)
    assert not (tmp_path / "copy").exists()
    assert artifacts.read(artifact_id=record.id) == (record,)


def test_a_payload_that_has_become_a_directory_cannot_be_read(store_and_reader):
    session, artifacts, record = store_and_reader
    place = find_object(session, record)
    place.unlink()
    place.mkdir()
    with pytest.raises(quark.SessionStoreError):
        artifacts.load(record)


def test_storing_it_again_makes_a_payload_of_another_length_whole(artifacts, session):
    record = artifacts.store("t", "n", DATA)
    truncate(find_object(session, record))
    again = artifacts.store("t", "n", DATA)
    assert artifacts.load(record) == artifacts.load(again) == DATA
    find_object(session, record).unlink()
    artifacts.store("t", "n", DATA)
    assert artifacts.load(record) == DATA


def test_a_lost_link_or_metadata_file_costs_nothing_but_itself(artifacts, session):
    record = artifacts.store("t", "n", DATA)
    (session.run_path / record.payload_relative_path).unlink()
    (session.run_path / record.metadata_relative_path).unlink()
    assert artifacts.load(record) == DATA
    assert artifacts.read() == (record,)


def test_an_object_is_read_only(artifacts, session):
    record = artifacts.store("t", "n", DATA)
    assert find_object(session, record).stat().st_mode & 0o222 == 0


@pytest.mark.long
def test_a_record_of_another_run_of_the_store_is_loaded_too(artifacts, session):
    other = quark.start_run(project="p", storage_dir=session.context.storage_dir)
    record = quark.ArtifactStore(other).store("t", "n", b"of another run")
    other.end_run()
    assert artifacts.load(record) == b"of another run"
    with pytest.raises(quark.ArtifactNotFoundError, match="no artifact"):
        artifacts.load(record.id)


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
    assert len([line for line in said if "could not be stored: No space left" in line]) == 1


def assert_told(artifacts, record, place):
    """A record of a payload that was not kept says so, here and in the store."""
    assert (record.payload_relative_path, record.metadata_relative_path) == (None, None)
    assert record.metadata["mine"] == place
    assert record.metadata["not_kept"] == "No space left on device"
    assert artifacts.read(artifact_id=record.id) == (record,)
    for call in (artifacts.load, artifacts.open):
        for artifact in (record, record.id):
            with pytest.raises(quark.ArtifactNotFoundError, match="not stored: No space left"):
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


PROGRAM = """
import os, random, sys, threading, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
artifacts = quark.ArtifactStore(session)
chance = random.Random(int(sys.argv[2]))
path = sys.argv[1] + f"/file{sys.argv[2]}"
print(session.run_id, flush=True)
def work():
    step = 0
    while True:
        artifacts.store("small", "thread", {"n": step, "noise": os.urandom(8).hex()}, step=step)
        step += 1
threading.Thread(target=work, daemon=True).start()
step = 0
while True:
    data = os.urandom(int(4 ** chance.uniform(0, 11)))
    if step % 3:
        record = artifacts.store("blob", "main", data, step=step)
    else:
        with open(path, "wb") as file:
            file.write(data)
        record = artifacts.store_file("blob", "main", path, step=step)
    step += 1
    if step % 7 == 0:
        artifacts.flush()
        print(step, record.sha256, flush=True)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_every_listed_artifact_loads(tmp_path, seed):
    child = start_code(PROGRAM, tmp_path, seed)
    run_id = child.stdout.readline().strip()
    time.sleep(random.Random(seed).uniform(0.1, 0.6))
    child.send_signal(signal.SIGKILL)
    flushed = [line.split() for line in child.communicate()[0].splitlines()]
    recovery.sync(tmp_path)
    assert recovery.survey(tmp_path) == []

    session = quark.open_run(run_id, tmp_path)
    artifacts = quark.ArtifactStore(session)
    listed = artifacts.read()
    for record in listed:
        with artifacts.open(record) as file:
            assert sha256(file.read()) == record.sha256
        assert sha256((session.run_path / record.payload_relative_path).read_bytes())
        assert record.payload_format == "json" or "media_type" in record.metadata
    for name in ("main", "thread"):
        steps = [record.step for record in artifacts.read(artifact_key=name)]
        assert steps == list(range(len(steps)))
    kept = {record.sha256 for record in listed}
    main = [record.step for record in artifacts.read(artifact_key="main")]
    for step, digest in flushed:
        assert digest in kept
        assert len(main) >= int(step)
    # What has a name of an object is one, also where its record was never made.
    for digest, path in list_objects(session).items():
        assert sha256(path.read_bytes()) == digest
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path) as resumed:
        again = quark.ArtifactStore(resumed)
        assert again.load(again.store("blob", "main", b"after", step=len(main))) == b"after"
        assert len(again.read()) == len(listed) + 1


LAST_LINES = {
    "log_directory": "quark.ArtifactStore(session).log_directory(sys.argv[2], name='it')",
    "log_video": "quark.ArtifactStore(session).log_video('it', sys.argv[2] + '/0.mp4', step=0)",
}
BEGINNING = """
import sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
print(session.id, flush=True)
"""


@pytest.mark.parametrize("last_line", ["log_directory", "log_video"])
def test_what_is_promised_on_the_last_line_is_kept(tmp_path, last_line):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.mp4").write_bytes(os.urandom(20_000))
    code = BEGINNING + LAST_LINES[last_line]
    done = run_code(code, tmp_path, folder, env={**os.environ, "QUARK_QUIET": "1"})
    assert "not stored" not in done.stderr
    run = quark.open_run(done.stdout.strip(), tmp_path)
    assert run.status == "completed"
    kept = list(quark.ArtifactStore(run).read())
    assert len(kept) == (101 if last_line == "log_directory" else 1)
