"""ArtifactStore over the life of a run: opened, read-only, closed, ended, kept nowhere."""

import pytest
from kit.programs import run_threads
from payload_tools import list_events, list_objects, run_script, sha256

import quark


@pytest.fixture
def every_store(tmp_path):
    """Every call that stores, with a good payload."""
    path = tmp_path / "picture.png"
    from PIL import Image

    Image.new("L", (2, 2)).save(path)
    return {
        "store": lambda artifacts: artifacts.store("t", "n", b"x"),
        "store_file": lambda artifacts: artifacts.store_file("t", "n", path),
        "log_file": lambda artifacts: artifacts.log_file(path),
        "log_histogram": lambda artifacts: artifacts.log_histogram("h", bins=[0, 1], counts=[1]),
        "log_snapshot": lambda artifacts: artifacts.log_snapshot("s", {}),
        "log_image": lambda artifacts: artifacts.log_image("i", path),
        "log_table": lambda artifacts: artifacts.log_table("t", {"a": [1]}),
    }


def assert_refused(every_store, artifacts, match):
    before = artifacts.read()
    for name, store in every_store.items():
        with pytest.raises(quark.InvalidRunStateError, match=match) as said:
            store(artifacts)
        assert str(said.value).split(":")[0] in (name, "store")
    assert artifacts.read() == before


def test_a_run_that_is_opened_reads_and_refuses(tmp_path, every_store):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        written = quark.ArtifactStore(session)
        records = (written.store("t", "n", b"x"), written.store("t", "m", {"a": 1}))
        written.flush()
        # Also while it is still going on.
        reading = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path))
        assert reading.read() == records
        assert reading.load(records[1].id) == {"a": 1}
    opened = quark.open_run(session.run_id, tmp_path)
    for target in (opened, opened.context):
        artifacts = quark.ArtifactStore(target)
        assert artifacts.read() == records
        assert [artifacts.load(record) for record in records] == [b"x", {"a": 1}]
        assert artifacts.load(records[0].id) == b"x"
        assert artifacts.load_file(records[0], tmp_path / "copy").read_bytes() == b"x"
        assert_refused(every_store, artifacts, "reading only")
        assert artifacts.flush() == ()
        artifacts.close()
        assert artifacts.load(records[0]) == b"x"
    assert len(list_objects(session)) == 2


def test_a_closed_store_reads_and_refuses(session, every_store):
    with quark.ArtifactStore(session) as artifacts:
        record = artifacts.store("t", "n", b"x")
    artifacts.close()
    assert artifacts.read() == (record,)
    assert artifacts.load(record.id) == b"x"
    assert_refused(every_store, artifacts, "this ArtifactStore is closed")
    assert quark.ArtifactStore(session).store("t", "n", b"y").sequence == 1


def test_an_ended_run_reads_and_refuses(tmp_path, every_store):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    artifacts = quark.ArtifactStore(session)
    record = artifacts.store("t", "n", b"x")
    session.end_run()
    assert artifacts.read() == (record,)
    assert artifacts.load(record) == artifacts.load(record.id) == b"x"
    assert_refused(every_store, artifacts, "has ended")
    artifacts.close()
    late = quark.ArtifactStore(session)
    assert late.load(record) == b"x"
    assert_refused(every_store, late, "has ended")


@pytest.mark.parametrize("session", [None, 5, "run", object()])
def test_what_is_no_session(session):
    with pytest.raises(quark.SchemaValidationError, match=r"^session"):
        quark.ArtifactStore(session)


def test_two_stores_on_one_session(session):
    first, second = quark.ArtifactStore(session), quark.ArtifactStore(session.context)
    records = [first.store("t", "a", 1), second.store("t", "b", 1), first.store("t", "c", 2)]
    assert first.read() == second.read() == tuple(records)
    assert [record.sequence for record in records] == [0, 1, 2]
    assert second.load(records[0]) == 1
    assert first.flush() == (records[0], records[2])
    assert second.flush() == (records[1],)
    first.close()
    assert second.store("t", "d", 3).sequence == 3


def test_flush_returns_this_stores_records(session):
    artifacts = quark.ArtifactStore(session)
    assert artifacts.flush() == ()
    records = [artifacts.store("t", "n", index) for index in range(5)]
    records.append(artifacts.log_histogram("h", bins=[0, 1], counts=[1]))
    assert artifacts.flush() == tuple(records)
    assert artifacts.flush() == ()
    many = [artifacts.store("t", "n", index) for index in range(105)]
    assert artifacts.flush() == tuple(many[100:])  # of 100 it lets go
    assert artifacts.read() == (*records, *many)


@pytest.mark.long
def test_threads_may_store_read_and_load_at_once(session):
    artifacts = quark.ArtifactStore(session)
    failures = []

    def work(name):
        try:
            for step in range(15):
                record = artifacts.store("t", name, {"of": name, "step": step}, step=step)
                assert artifacts.load(record) == {"of": name, "step": step}
                assert artifacts.load(record.id) == {"of": name, "step": step}
                assert artifacts.read(artifact_key=name)[-1] == record
        except BaseException as error:
            failures.append(error)

    run_threads(work, [f"w{index}" for index in range(6)])
    assert failures == []
    assert sorted(record.sequence for record in artifacts.read()) == list(range(90))


@pytest.mark.parametrize("strict_mode", [False, True])
@pytest.mark.parametrize("ways", ["none", "rank"])
def test_where_nothing_is_kept_a_record_says_so(tmp_path, monkeypatch, caplog, ways, strict_mode):
    if ways == "rank":
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("QUARK_RUN_ID", "ranked")
    seen = []
    with quark.start_run(
        project="p",
        storage_dir=tmp_path / "runs",
        backends="none" if ways == "none" else None,
        strict_mode=strict_mode,
    ) as session:
        artifacts = quark.ArtifactStore(session, retention_hooks=[lambda _, r: seen.append(r)])
        path = tmp_path / "file"
        path.write_bytes(b"of a file")
        records = [artifacts.store("t", "n", b"payload"), artifacts.store_file("t", "n", path)]
        for record, data in zip(records, (b"payload", b"of a file"), strict=True):
            assert (record.sha256, record.size_bytes) == (sha256(data), len(data))
            assert (record.payload_relative_path, record.metadata_relative_path) == (None, None)
            for call in (artifacts.load, artifacts.open):
                with pytest.raises(
                    quark.ArtifactNotFoundError, match="nothing of this run is kept"
                ):
                    call(record)
        assert seen == records
        assert artifacts.read() == ()
        assert artifacts.flush() == ()
        assert list_events(session, "artifact_not_kept") == ()
        with pytest.raises(quark.SchemaValidationError):
            artifacts.store("t", "..", b"x")
    assert not (tmp_path / "runs").exists()
    assert "could not be kept" not in caplog.text


LIGHT = """
session = quark.start_run(project="p", storage_dir=storage_dir)
artifacts = quark.ArtifactStore(session)
artifacts.store("t", "n", {"a": 1})
artifacts.store("t", "n", b"bytes")
heavy = {"numpy", "PIL", "matplotlib", "pandas", "polars", "pyarrow", "plotly", "torch"}
print(sorted(heavy & sys.modules.keys()))
session.end_run()
"""


@pytest.mark.long
def test_storing_loads_no_heavy_library(tmp_path):
    assert run_script(tmp_path, LIGHT) == "[]\n"
