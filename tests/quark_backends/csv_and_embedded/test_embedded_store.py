"""The embedded store: made whole or not at all, and what it refuses."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading

import pytest

import quark
from quark_backends.store.databases import sqlite
from quark_backends.store.databases.sqlite import SCHEMA_VERSION, connect, ensure_store, find_store
from quark_core.errors import SessionStoreError


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_a_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path):
    foreign = tmp_path / ".quark"
    foreign.mkdir()
    (foreign / "quark.db").write_bytes(b"somebody else's")
    before = snapshot(tmp_path)
    for call in (
        lambda: quark.start_run(project="p", storage_dir=tmp_path),
        lambda: quark.open_run("x", tmp_path),
        lambda: quark.resume_run(run_id="x", storage_dir=tmp_path),
    ):
        with pytest.raises(SessionStoreError, match=r"\.quark was not created by this Quark"):
            call()
    assert snapshot(tmp_path) == before


def test_a_database_that_is_not_ours_is_refused(tmp_path):
    layout = ensure_store(tmp_path)
    layout.db_path.unlink()
    sqlite3.connect(layout.db_path).execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(SessionStoreError, match="not created by this Quark"):
        quark.start_run(project="p", storage_dir=tmp_path)


def test_a_damaged_database_is_refused(tmp_path):
    layout = ensure_store(tmp_path)
    layout.db_path.write_bytes(b"\0" * 8192)
    with pytest.raises(SessionStoreError):
        quark.start_run(project="p", storage_dir=tmp_path)


def test_a_store_of_a_newer_version_is_refused_with_both_versions(tmp_path):
    layout = ensure_store(tmp_path)
    database = sqlite3.connect(layout.db_path)
    database.execute(f"PRAGMA user_version={SCHEMA_VERSION + 6}")
    database.close()
    before = layout.db_path.read_bytes()
    with pytest.raises(
        SessionStoreError, match=rf"{SCHEMA_VERSION + 6}.*{SCHEMA_VERSION}.*Upgrade"
    ):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert layout.db_path.read_bytes() == before


def test_an_unwritable_storage_dir_is_named():
    # Holds for every user, root included, as chmod would not.
    with pytest.raises(SessionStoreError, match="/proc/quark cannot be written"):
        quark.start_run(project="p", storage_dir="/proc/quark")


def test_a_storage_dir_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    for storage_dir in (path, str(path)):
        with pytest.raises(SessionStoreError, match="is a file"):
            quark.start_run(project="p", storage_dir=storage_dir)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_storage_dir(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SessionStoreError, match="cannot be written"):
        quark.start_run(project="p", storage_dir=tmp_path)


@pytest.mark.long
def test_processes_that_start_at_once_make_one_store(tmp_path):
    program = (
        "import sys, quark\n"
        "s = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "print(s.run_id); s.end_run()\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    ids = [child.communicate()[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == [".quark"]
    assert all(quark.open_run(run_id, tmp_path).status == "completed" for run_id in ids)


def test_threads_that_make_the_store_at_once(tmp_path):
    barrier, made = threading.Barrier(8), []

    def make():
        barrier.wait()
        made.append(ensure_store(tmp_path).root)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / ".quark"] * 8
    assert [path.name for path in tmp_path.iterdir()] == [".quark"]


@pytest.mark.parametrize("had_runs", [False, True])
def test_a_store_that_another_process_makes_meanwhile_is_used(tmp_path, monkeypatch, had_runs):
    """A look for the marker, then one at the folder: the store may come between the two."""
    if had_runs:
        (tmp_path / ".quark" / "runs").mkdir(parents=True)
    read = sqlite.read_marker

    def make_meanwhile(layout):
        monkeypatch.setattr(sqlite, "read_marker", read)
        try:
            return read(layout)
        finally:
            ensure_store(tmp_path)

    monkeypatch.setattr(sqlite, "read_marker", make_meanwhile)
    assert find_store(tmp_path).root == tmp_path / ".quark"


def test_a_store_that_is_being_remade_is_no_error_for_another_process(tmp_path, monkeypatch):
    (tmp_path / ".quark" / "runs").mkdir(parents=True)
    write, others = sqlite.write_marker, []

    def look_first(root):
        (root / f"{sqlite.MARKER}.new1-0").touch()  # as the other one has begun its marker
        others.append(find_store(tmp_path))
        (root / f"{sqlite.MARKER}.new1-0").unlink()
        write(root)

    monkeypatch.setattr(sqlite, "write_marker", look_first)
    assert ensure_store(tmp_path).root == find_store(tmp_path).root
    assert others == [None]


def test_an_empty_quark_folder_becomes_a_store(tmp_path):
    (tmp_path / ".quark").mkdir()
    assert find_store(tmp_path) is None
    with quark.start_run(project="p", storage_dir=tmp_path):
        pass
    marker = json.loads((tmp_path / ".quark" / "store.json").read_text())
    assert marker["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize("name", ["with space", "q?mark", "per%cent", "hash#", "ünï"])
def test_odd_paths(tmp_path, name):
    with quark.start_run(project="p", storage_dir=tmp_path / name) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    assert (tmp_path / name / ".quark" / "quark.db").is_file()
    again = quark.open_run(session.run_id, tmp_path / name)
    assert quark.MetricsLogger(again).read()[0].value == 1.0


def test_the_database_is_what_is_promised(tmp_path):
    connection = connect(ensure_store(tmp_path))
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    connection.close()


def test_a_damaged_batch_is_reported_by_its_number_and_the_rest_is_read(tmp_path, caplog):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        metrics.flush()
        metrics.log("m", 2.0, step=1)
    database = sqlite3.connect(session.context.db_path)
    database.execute(
        "UPDATE batch SET body = x'00ff' WHERE pk ="
        " (SELECT min(pk) FROM batch WHERE kind = 'metric')"
    )
    database.commit()
    database.close()
    found = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read()
    assert [record.value for record in found] == [2.0]
    writer = session.open_run.origin.writer_id
    assert re.search(rf"batch of writer {writer} \d+ is damaged, its 1 records", caplog.text)


def test_a_busy_database_is_waited_for(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        other = sqlite3.connect(session.context.db_path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        metrics.log("m", 1.0, step=0)
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "0.2")
        with pytest.raises(SessionStoreError, match="did not acknowledge"):
            metrics.flush()
        other.execute("ROLLBACK")
        other.close()
        monkeypatch.delenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS")
        assert [record.value for record in metrics.read()] == [1.0]


@pytest.mark.sampled
@pytest.mark.parametrize("journal_only", [False, True])
def test_a_store_that_was_copied_is_resumed_where_it_is_now(tmp_path, monkeypatch, journal_only):
    if journal_only:
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    first, second = tmp_path / "first", tmp_path / "second"
    with quark.start_run(project="p", storage_dir=first) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.end_run("interrupted")
    shutil.copytree(first, second)
    before = snapshot(first)

    with quark.resume_run(run_id=session.run_id, storage_dir=second) as resumed:
        assert resumed.run_path == second / ".quark" / "runs" / session.run_id
        metrics = quark.MetricsLogger(resumed)
        metrics.log("loss", 0.5, step=1)
        quark.ArtifactStore(resumed).store("note", "note", "stored here")
        assert [record.value for record in metrics.read(metric_key="loss")] == [1.0, 0.5]

    assert snapshot(first) == before
    assert quark.open_run(session.run_id, second).run_path == resumed.run_path
    (found,) = quark.search_runs(storage_dir=second)
    assert found.stored.run.run_path == str(resumed.run_path)
