"""A new SQLite file for MLflow: whole at once, however many make it and whoever is killed."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from quark_backends.mlflow.client import make_database

OPEN = "import sys; from quark_backends.mlflow.client import open_server; open_server(sys.argv[1])"


def make_table(uri):
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database, database:
        database.execute("CREATE TABLE made (by TEXT)")


def list_tables(path):
    with closing(sqlite3.connect(path)) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master")}


def test_one_of_several_makes_it(tmp_path):
    made = []

    def make(uri):
        made.append(uri)
        time.sleep(0.2)
        make_table(uri)

    path = tmp_path / "new" / "m.db"
    threads = [threading.Thread(target=make_database, args=(path, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert [one.name for one in path.parent.iterdir()] == ["m.db"]
    assert list_tables(path) == {"made"}


def test_a_failure_leaves_nothing_and_the_next_one_makes_it(tmp_path):
    path = tmp_path / "m.db"

    def fail(uri):
        make_table(uri)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_database(path, fail)
    assert list(tmp_path.iterdir()) == []
    make_database(path, make_table)
    make_database(path, fail)  # it is there
    assert list_tables(path) == {"made"}


def test_a_file_that_another_tool_has_made_meanwhile_stays(tmp_path):
    path = tmp_path / "m.db"

    def make(uri):
        make_table(uri)
        path.write_bytes(b"theirs")

    make_database(path, make)
    assert path.read_bytes() == b"theirs"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_processes_that_open_a_new_store_at_once_and_one_that_is_killed(mlflow, tmp_path):
    path = tmp_path / "m.db"
    command = [sys.executable, "-c", OPEN, f"sqlite:///{path}"]
    killed = subprocess.Popen(command, start_new_session=True)
    while not list(tmp_path.glob(".m.db.new-*/store.db")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not path.exists()
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert [one.name for one in tmp_path.iterdir()] == ["m.db"]
    assert {"runs", "metrics", "alembic_version"} <= list_tables(path)
