"""Payloads that are damaged or gone: told clearly, never handed out."""

import os
import shutil

import pytest
from payload_tools import list_objects

import quark

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
        with pytest.raises(quark.ArtifactNotFoundError, match="not there") as said:
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
