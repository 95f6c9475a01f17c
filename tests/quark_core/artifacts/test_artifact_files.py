"""store_file, log_file, load_file and open: files as they are, a piece at a time."""

import os
import threading

import pytest
from kit.programs import run_threads, wait_until
from payload_tools import assert_clean, assert_whole, list_events, list_objects, run_script, sha256

import quark
from quark_core.artifacts import payload_folder


def test_a_file_is_stored_and_copied_out(artifacts, tmp_path):
    data = os.urandom(3_000_001)
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    record = artifacts.store_file(
        "checkpoint", "best", str(path), step=3, namespace="a/b", metadata={"loss": 0.5}
    )
    assert (record.payload_format, record.artifact_key) == ("bytes", "a/b/best")
    assert record.payload_relative_path.endswith(".pt")
    assert (record.metadata["loss"], record.metadata.keys()) == (0.5, {"loss", "media_type"})
    assert_whole(artifacts, record, data)
    path.unlink()
    copy = artifacts.load_file(record, tmp_path / "copy.pt")
    assert copy == tmp_path / "copy.pt"
    assert copy.read_bytes() == data
    assert artifacts.load_file(record.id, str(copy)).read_bytes() == data
    os.chmod(copy, 0o600)  # a copy is the user's own, to write into
    assert sorted(tmp_path.glob(".*")) == []


def test_log_file_names_itself(artifacts, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    record = artifacts.log_file(path, step=1, metadata={"file_name": "mine"})
    assert (record.artifact_type, record.artifact_key) == ("file", "notes.txt")
    assert record.metadata == {"file_name": "mine", "media_type": "text/plain"}
    other = artifacts.log_file(path, name="n", namespace="ns", artifact_type="checkpoint")
    assert (other.artifact_type, other.artifact_key) == ("checkpoint", "ns/n")
    assert other.metadata["file_name"] == "notes.txt"
    assert artifacts.load(record) == artifacts.load(other) == b"hello"


@pytest.mark.parametrize(
    "name", ["a.tar.gz", "noext", ".hidden", "odd.e x", "dot.", "a." + "b" * 200]
)
def test_any_file_name_gives_a_path_that_holds_the_payload(artifacts, session, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"data")
    record = artifacts.store_file("t", "n", path)
    assert (session.run_path / record.payload_relative_path).read_bytes() == b"data"
    assert artifacts.load(record) == b"data"


def test_a_link_to_a_file_is_followed(artifacts, tmp_path):
    (tmp_path / "real").write_bytes(b"data")
    (tmp_path / "link").symlink_to("real")
    assert artifacts.load(artifacts.store_file("t", "n", tmp_path / "link")) == b"data"


@pytest.fixture
def bad_paths(tmp_path):
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("dir", "is a directory"),
        ("missing", "No such file"),
        ("dangling", "No such file"),
        ("pipe", "not a regular file"),
        ("to_pipe", "not a regular file"),
        ("loop", "symbolic link"),
        ("file/below", "Not a directory"),
        ("x" * 300, "too long"),
        ("/dev/null", "not a regular file"),
        ("nul\0byte", "cannot be read"),
    ],
)
def test_what_is_no_readable_file(artifacts, session, bad_paths, path, reason):
    for call in (
        lambda given: artifacts.store_file("t", "n", given),
        lambda given: artifacts.log_file(given, name="n"),
        lambda given: artifacts.log_image("n", given),
    ):
        with pytest.raises(quark.SchemaValidationError, match=f"^(path|image) .*{reason}") as said:
            call(bad_paths / path)
        assert path[:100] in str(said.value)
    assert artifacts.read() == ()
    assert not (session.run_path / "artifacts").exists()


@pytest.mark.parametrize("path", [None, 5, ["a"], object()])
def test_what_is_no_path(artifacts, path):
    for call in (
        lambda: artifacts.store_file("t", "n", path),
        lambda: artifacts.log_file(path),
        lambda: artifacts.log_file(path, name="n"),
    ):
        with pytest.raises(quark.SchemaValidationError, match=r"^path must be a path"):
            call()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads anything")
def test_an_unreadable_file(artifacts, tmp_path):
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(quark.SchemaValidationError, match="Permission denied"):
        artifacts.store_file("t", "n", path)


class Watched:
    """A file of the user's that calls back after its first piece was read."""

    def __init__(self, file, then):
        self._file, self._then = file, then

    def read(self, size=-1):
        data = self._file.read(size)
        then, self._then = self._then, None
        if then is not None:
            thread = threading.Thread(target=then)
            thread.start()
            thread.join()
        return data

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


SIZE = 3 * payload_folder.CHUNK_BYTES + 17


@pytest.fixture
def store_while(artifacts, monkeypatch, tmp_path):
    """Store a file to which something happens after its first piece."""
    path = tmp_path / "moving"
    path.write_bytes(b"a" * SIZE)
    # Long ago, so that what is written now has another time on any file system.
    os.utime(path, (1, 1))
    opened = payload_folder.open_source

    def store(then):
        def open_watched(given, argument="path"):
            source, size_bytes = opened(given, argument)
            return Watched(source, lambda: then(path)), size_bytes

        monkeypatch.setattr("quark_core.writers.artifact_writing.open_source", open_watched)
        return artifacts.store_file("t", "n", path)

    return store


def append(path):
    with path.open("ab") as file:
        file.write(b"b" * 5_000_000)


def shrink(path):
    os.truncate(path, 100)


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(2 * payload_folder.CHUNK_BYTES)
        file.write(b"b" * 1000)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(b"b" * 10)
    os.replace(other, path)


def test_a_file_that_grows_is_stored_as_long_as_it_was(artifacts, session, store_while):
    record = store_while(append)
    assert record.size_bytes == SIZE
    assert record.metadata["changed_while_read"] is True
    assert_whole(artifacts, record, b"a" * SIZE)
    assert_clean(session)


@pytest.mark.parametrize("then", [shrink, overwrite])
def test_a_file_that_is_altered_says_so(artifacts, session, store_while, then):
    record = store_while(then)
    assert record.metadata["changed_while_read"] is True
    loaded = artifacts.load(record)
    assert len(loaded) == record.size_bytes <= SIZE
    assert loaded.startswith(b"a" * payload_folder.CHUNK_BYTES)
    assert_clean(session)


@pytest.mark.parametrize("then", [replace, os.unlink, lambda path: None])
def test_a_file_that_is_replaced_or_removed_is_stored_as_it_was(artifacts, store_while, then):
    record = store_while(then)
    assert record.metadata == {"media_type": "text/plain"}
    assert_whole(artifacts, record, b"a" * SIZE)


@pytest.mark.long
def test_a_file_that_cannot_be_read_to_its_end(artifacts, session, monkeypatch, tmp_path):
    path = tmp_path / "bad_sector"
    path.write_bytes(bytes(SIZE))

    class Broken(Watched):
        def read(self, size=-1):
            if self._then is None:
                raise OSError(5, "Input/output error")
            self._then = None
            return self._file.read(size)

    def open_broken(given, argument="path"):
        source, size_bytes = payload_folder.open_source(given, argument)
        return Broken(source, "once"), size_bytes

    monkeypatch.setattr("quark_core.writers.artifact_writing.open_source", open_broken)
    with pytest.raises(quark.SchemaValidationError, match="cannot be read: Input/output error"):
        artifacts.store_file("t", "n", path)
    assert artifacts.read() == ()
    assert list_objects(session) == {}
    assert_clean(session)


@pytest.mark.long
def test_a_log_that_is_written_all_the_time(artifacts, session, tmp_path):
    path = tmp_path / "train.log"
    path.touch()
    stop = threading.Event()

    def write():
        with path.open("ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b"line\n" * 1000)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert wait_until(lambda: path.stat().st_size > 100_000)
        records = [artifacts.store_file("log", "train", path, step=n) for n in range(5)]
    finally:
        stop.set()
        thread.join()
    whole = path.read_bytes()
    for record in records:
        assert artifacts.load(record) == whole[: record.size_bytes]
        assert record.size_bytes > 100_000
    assert_clean(session)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("dir", quark.SchemaValidationError),
        (".", quark.SchemaValidationError),
        ("", quark.SchemaValidationError),
        (None, quark.SchemaValidationError),
        (5, quark.SchemaValidationError),
        ("a\0b", quark.SchemaValidationError),
        ("missing/copy", quark.SchemaValidationError),
        ("file/copy", quark.SchemaValidationError),
    ],
)
def test_a_copy_that_cannot_be_made(artifacts, bad_paths, monkeypatch, target, error):
    monkeypatch.chdir(bad_paths)
    record = artifacts.store("t", "n", b"data")
    before = sorted(os.listdir(bad_paths))
    with pytest.raises(error):
        artifacts.load_file(record, target)
    assert sorted(os.listdir(bad_paths)) == before


def test_a_copy_may_have_a_long_name_and_replaces_what_is_there(artifacts, tmp_path):
    record = artifacts.store("t", "n", b"data")
    for name in ("x" * 255, "ü" * 127):
        target = tmp_path / name
        target.write_bytes(b"older and longer")
        assert artifacts.load_file(record, target).read_bytes() == b"data"


@pytest.mark.long
def test_an_open_payload_is_a_file(artifacts):
    data = b"".join(b"line %d\n" % n for n in range(300_000))
    record = artifacts.store("t", "n", data)
    with artifacts.open(record) as file:
        assert file.readline() == b"line 0\n"
        assert file.read(7) == b"line 1\n"
        file.seek(-7, os.SEEK_END)
        assert file.read() == data[-7:]
    assert file.closed
    with artifacts.open(record.id) as file:
        assert sum(1 for _ in file) == 300_000


MEMORY = """
import resource
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    artifacts = quark.ArtifactStore(session)
    artifacts.load_file(artifacts.store("t", "warm", b"x" * 2_000_000), sys.argv[2] + ".warm")
    artifacts.read()
    before = peak_bytes()
    record = artifacts.store_file("t", "large", sys.argv[2])
    artifacts.load_file(record, sys.argv[2] + ".copy")
    artifacts.load_file(record.id, sys.argv[2] + ".copy")
    with artifacts.open(record) as file:
        while file.read(1 << 20):
            pass
    print(peak_bytes() - before, record.size_bytes, record.sha256)
"""


@pytest.mark.long
def test_a_large_file_is_never_held_in_memory(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    grown, size_bytes, _ = run_script(tmp_path, MEMORY, path).split()
    assert int(size_bytes) == 64 * 1024 * 1024
    assert int(grown) < 40 * 1024 * 1024
    assert (tmp_path / "sparse.copy").stat().st_size == int(size_bytes)


# ArtifactStore over the life of a run: opened, read-only, closed, ended, kept nowhere.


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
                with pytest.raises(quark.ArtifactNotFoundError, match="this run stores nothing"):
                    call(record)
        assert seen == records
        assert artifacts.read() == ()
        assert artifacts.flush() == ()
        assert list_events(session, "artifact_not_kept") == ()
        with pytest.raises(quark.SchemaValidationError):
            artifacts.store("t", "..", b"x")
    assert not (tmp_path / "runs").exists()
    assert "could not be stored" not in caplog.text


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
