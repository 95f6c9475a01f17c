"""A store whose database is not there, or not there any more, and several who make it."""

import threading

import pytest

import quark
from quark_backends.store.databases import connection, sqlite
from quark_backends.store.databases.sqlite import ensure_marker, ensure_store
from quark_core.errors import SessionStoreError


def make_while(monkeypatch, root, work):
    """Make the database that a store lacks; others work once it was seen to lack it."""
    create = sqlite._create_database
    is_first = threading.Lock()

    def create_late(path):
        create(path)
        if is_first.acquire(blocking=False):
            work()

    monkeypatch.setattr(sqlite, "_create_database", create_late)
    ensure_store(root)


def test_who_makes_it_late_leaves_what_another_has_written(tmp_path, monkeypatch):
    layout = ensure_marker(tmp_path)
    told = {}

    def train():
        session = quark.start_run(project="p", storage_dir=tmp_path)
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.flush("stored")
        assert layout.db_path.with_name(f"{layout.db_path.name}-wal").stat().st_size
        told["session"] = session

    make_while(monkeypatch, tmp_path, train)
    session = told["session"]
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert [row.value for row in quark.MetricsLogger(opened).read()] == [1.0]
    session.end_run()
    assert sorted(path.name for path in layout.root.glob("quark.db.new*")) == []


def test_the_log_of_a_database_that_is_gone_is_not_played_into_the_next(tmp_path):
    layout = ensure_marker(tmp_path)
    log = layout.db_path.with_name(f"{layout.db_path.name}-wal")
    log.write_bytes(b"of another database")
    ensure_store(tmp_path)
    assert not log.exists()
    assert layout.db_path.exists()


def test_one_makes_it_at_a_time_and_nobody_waits_for_ever(tmp_path, monkeypatch):
    layout = ensure_marker(tmp_path)
    monkeypatch.setattr(connection, "_CHANGE_TIMEOUT_S", 0.1)
    with connection.changing(layout.root):
        with pytest.raises(SessionStoreError, match="another process has used it"):
            ensure_store(tmp_path)
        assert not layout.db_path.exists()
    ensure_store(tmp_path)
    assert layout.db_path.exists()
