"""A fork waits for what a child must not have a copy of half done, but not for ever."""

import os
import sqlite3
import threading
import time

import pytest

from quark_backends.store.databases.connection import SqliteConnection
from quark_core.system import process
from quark_core.system.process import ForkGate, writing_gate

DEADLINE_S = 60

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def fork_and_look(look):
    """What a child finds, as its exit status."""
    pid = os.fork()
    if not pid:
        os._exit(look())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def connect(path):
    return sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=1, factory=SqliteConnection
    )


def write(path):
    """0 where the store can be written to."""
    try:
        connection = connect(path)
        connection.begin_write()
        connection.execute("INSERT INTO t VALUES (2)")
        connection.commit()
    except sqlite3.Error:
        return 1
    return 0


def test_a_child_that_is_forked_while_a_thread_writes_finds_the_store_free(tmp_path, monkeypatch):
    # How long a fork waits at most is what the next test is about.
    monkeypatch.setattr(process, "_WRITE_TIMEOUT_S", DEADLINE_S)
    path = tmp_path / "store.db"
    connection = connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (n)")
    begun = threading.Event()

    def work():
        connection.begin_write()
        connection.execute("INSERT INTO t VALUES (1)")
        begun.set()
        time.sleep(0.3)
        connection.commit()

    for _ in range(3):
        begun.clear()
        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(DEADLINE_S)
        assert fork_and_look(lambda: write(path)) == 0
        thread.join()
    assert connection.execute("SELECT COUNT(*) FROM t").fetchone() == (6,)
    connection.close()


def test_a_writer_that_hangs_holds_up_a_fork_for_a_while_only(monkeypatch):
    monkeypatch.setattr(process, "_WRITE_TIMEOUT_S", 0.1)
    writing_gate.enter()
    try:
        # The child's gate is its own.
        assert fork_and_look(lambda: writing_gate._inside) == 0
    finally:
        writing_gate.leave()
    assert writing_gate._inside == 0


def test_a_write_that_fails_leaves_the_gate(tmp_path):
    path = tmp_path / "store.db"
    first, second = connect(path), connect(path)
    first.execute("CREATE TABLE t (n)")
    first.begin_write()
    second.execute("PRAGMA busy_timeout=0")
    with pytest.raises(sqlite3.OperationalError):
        second.begin_write()
    assert writing_gate._inside == 1
    first.rollback()
    first.begin_write()
    first.close()
    second.close()
    assert writing_gate._inside == 0


def test_of_two_that_close_it_each_opens_what_it_has_closed():
    gate = ForkGate()
    gate.enter()
    closed, forked = threading.Semaphore(0), threading.Semaphore(0)

    def fork():
        assert gate.close(DEADLINE_S)
        closed.release()
        assert forked.acquire(timeout=DEADLINE_S)
        gate.open()

    threads = [threading.Thread(target=fork) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Both wait for the one inside, which has let go of the lock for that.
    deadline = time.monotonic() + DEADLINE_S
    while len(gate._changed._waiters) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    gate.leave()
    for _ in threads:
        assert closed.acquire(timeout=DEADLINE_S)
        forked.release()
    for thread in threads:
        thread.join(DEADLINE_S)
    entered = threading.Thread(target=gate.enter, daemon=True)
    entered.start()
    entered.join(DEADLINE_S)
    assert gate._inside == 1


def test_nobody_gets_in_while_it_is_closed():
    gate = ForkGate()
    assert gate.close(DEADLINE_S)
    thread = threading.Thread(target=gate.enter)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.open()
    thread.join(DEADLINE_S)
    assert gate._inside == 1
