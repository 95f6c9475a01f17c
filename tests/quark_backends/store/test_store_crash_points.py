"""A failure or a kill at any statement of compaction or ingest leaves every record there, once."""

import os
import shutil
import signal
import sqlite3

import pytest
from stores import Store, Writer

from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.upkeep.compaction import Compactor
from quark_core.errors import BackendUnavailable
from quark_core.records import EventRecord
from quark_core.records.query import Query

KINDS = ("metric", "event", "layer")


class Breaking:
    """A connection whose n-th statement fails, before or after it was done."""

    def __init__(self, connection, place, mode):
        self.connection, self.place, self.mode = connection, place, mode

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, *arguments):
        return self._do(self.connection.execute, *arguments)

    def executemany(self, *arguments):
        return self._do(self.connection.executemany, *arguments)

    def insert(self, *arguments):
        return self._do(self.connection.insert, *arguments)

    def begin_write(self):
        self._do(lambda _: self.connection.begin_write(), "BEGIN")

    def commit(self):
        self._do(lambda _: self.connection.commit(), "COMMIT")

    def _do(self, function, *arguments):
        here, self.place = self.place == 0, self.place - 1
        # A transaction that began and says that it did not is no failure that SQLite knows.
        before = self.mode == "before" or arguments[0].startswith("BEGIN")
        if here and before:
            self._break()
        done = function(*arguments)
        if here and not before:
            self._break()
        return done

    def _break(self):
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise sqlite3.OperationalError("injected")


def read_all(layout, run_id="run0"):
    reader = StoreReader(lambda: connect(layout, read_only=True))
    try:
        return [
            repr(record)
            for kind in KINDS
            for record in reader.read(run_id, kind, Query()).to_records()
        ]
    finally:
        reader.close()


def fill(folder):
    """A store with chunks, one of them damaged, and with batches that wait."""
    store = Store(folder)
    writer = store.start()
    for start in (0, 12):
        for step in range(start, start + 12):
            writer.log(*[(f"m{key}", float(step * key), step) for key in range(4)])
            writer.write([writer.layer("encoder", step, mean=1.0)])
            writer.write([EventRecord(*writer.head("event"), "saved", "info")])
        if start == 0:
            store.compact()
    writer.log(("new/key", 1.0, 5))
    store.connection.execute(
        "UPDATE chunk SET body = substr(body, 1, 20)"
        " WHERE pk = (SELECT max(pk) FROM chunk WHERE kind = 'metric')"
    )
    store.close()


def compact_all(connection):
    compactor = Compactor(connection)
    while work := compactor.find_work(minimum=1):
        for item in work:
            compactor.compact(item)


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", ["before", *(pytest.param(each, marks=pytest.mark.long) for each in ("after", "kill"))]
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_compaction_may_break_at_any_statement(tmp_path, mode):
    if mode == "kill" and not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    made = tmp_path / "made"
    fill(made)
    expected = read_all(StoreLayout(made))
    place, broken = 0, True
    while broken:
        copy = tmp_path / f"copy{place}"
        shutil.copytree(made, copy)
        layout = StoreLayout(copy)
        if mode == "kill":
            broken = not compact_in_child(layout, place)
        else:
            broken = not compact_until_broken(layout, place, mode)
        assert read_all(layout) == expected, place
        connection = connect(layout)
        compact_all(connection)
        connection.close()
        assert read_all(layout) == expected, place
        shutil.rmtree(copy)
        place += 1
    assert place > 20


def compact_until_broken(layout, place, mode):
    """Whether all was done without coming to the place."""
    connection = connect(layout)
    try:
        compact_all(Breaking(connection, place, mode))
    except sqlite3.OperationalError:
        assert not connection.in_transaction
        return False
    finally:
        connection.close()
    return True


def compact_in_child(layout, place):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            compact_all(Breaking(connect(layout), place, "kill"))
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_group_that_fails_at_any_statement_is_stored_once_when_it_comes_again(tmp_path, mode):
    place, broken = 0, True
    while broken:
        store = Store(tmp_path / str(place))
        writer = store.start()
        writer.log(("a", 1.0, 1))
        other = Writer(store, store.attempt)
        group = [
            writer.batch([writer.metric("new1", 1.0, 1), writer.metric("a", 5.0, 9)]),
            other.batch([other.metric("new2", 2.0, 2)]),
        ]
        real = store.connection
        breaking = Breaking(real, place, mode)
        store.ingest._connection = store.ingest._names._connection = breaking
        broken = False
        try:
            store.ingest.write(group)
        except BackendUnavailable:
            broken = True
        assert not real.in_transaction
        store.ingest._connection = store.ingest._names._connection = real
        store.ingest.write(group)
        found = store.reader.read("run0", "metric", Query())
        assert sorted(found["metric_key"].tolist()) == ["a", "a", "new1", "new2"]
        rows = real.execute("SELECT text, count, last FROM run_metric JOIN name ON pk = name_pk")
        assert sorted(rows) == [("a", 2, 5.0), ("new1", 1, 1.0), ("new2", 1, 2.0)]
        store.close()
        place += 1
    assert place > 10
