import gc
import os
import sqlite3

import pytest

import quark
from quark_backends.store.databases.connection import SqliteConnection, close_with
from quark_core.errors import InvalidRunStateError, RunNotFoundError


@pytest.fixture
def left_open(monkeypatch, tmp_path):
    """Where connections to stores of the test were opened, and not closed before they went."""
    found = []

    def note(connection):
        try:
            path = connection.execute("PRAGMA database_list").fetchone()[2]
        except sqlite3.ProgrammingError:
            return  # it was closed
        if path.startswith(str(tmp_path)):  # not those of threads that a test before has left
            found.append(path)

    gc.collect()
    monkeypatch.setattr(SqliteConnection, "__del__", note, raising=False)
    yield found
    gc.collect()


def make_run(root):
    session = quark.start_run(project="p", storage_dir=root)
    with quark.MetricsLogger(session) as metrics:
        metrics.log("loss", 1.0, step=0)
    session.end_run()
    return session


@pytest.mark.long
def test_who_reads_a_run_leaves_nothing_open(tmp_path, left_open):
    run_id = make_run(tmp_path).run_id
    gc.collect()

    opened = quark.open_run(run_id, storage_dir=tmp_path)
    with quark.MetricsLogger(opened) as metrics:
        assert [record.value for record in metrics.read()] == [1.0]
        assert metrics.series("loss").points == 1
    assert [found.run_id for found in quark.search_runs(storage_dir=tmp_path)] == [run_id]
    del opened, metrics
    gc.collect()

    assert left_open == []


@pytest.mark.long
def test_what_is_read_of_an_ended_run_leaves_nothing_open(tmp_path, left_open):
    session = make_run(tmp_path)
    assert session.reload().status == "completed"
    del session
    gc.collect()

    assert left_open == []


@pytest.mark.long
def test_a_start_that_fails_leaves_nothing_open(tmp_path, left_open):
    make_run(tmp_path)
    with pytest.raises(RunNotFoundError):
        quark.start_run(project="p", storage_dir=tmp_path, parent_run_id="missing")
    gc.collect()

    assert left_open == []


@pytest.mark.long
def test_a_resumption_that_fails_leaves_nothing_open(tmp_path, left_open):
    run_id = make_run(tmp_path).run_id
    with pytest.raises(InvalidRunStateError):
        quark.resume_run(run_id=run_id, storage_dir=tmp_path)
    with pytest.raises(RunNotFoundError):
        quark.resume_run(run_id="missing", storage_dir=tmp_path)
    gc.collect()

    assert left_open == []


@pytest.mark.long
def test_a_resumption_closes_what_it_has_looked_with(tmp_path, left_open):
    run_id = make_run(tmp_path).run_id
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path, reopen=True) as session:
        gc.collect()
        assert left_open == []
    del session
    gc.collect()

    assert left_open == []


@pytest.mark.long
def test_a_context_that_is_attached_leaves_nothing_open(tmp_path, left_open):
    session = make_run(tmp_path)
    context = session.context
    del session
    with quark.MetricsLogger(context) as metrics:
        assert len(metrics.read()) == 1
    del metrics
    gc.collect()

    assert left_open == []


class Owner:
    """Opens something."""


def test_what_an_object_has_opened_is_closed_once_when_it_is_dropped():
    closed = []
    owner = Owner()
    close = close_with(owner, lambda: closed.append("closed"))
    del owner
    close()

    assert closed == ["closed"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_it_to_its_parent():
    closed = []
    owner = Owner()
    close = close_with(owner, lambda: closed.append("closed"))
    pid = os.fork()
    if pid == 0:
        close()
        os._exit(len(closed))
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert closed == []
    close()
    assert closed == ["closed"]
