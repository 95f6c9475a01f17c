"""What is answered for a claim has been synced before, though nobody holds the database for it."""

import errno
import os
import shutil
import sqlite3
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from quark_backends.store.databases import write_batching
from quark_backends.store.databases.sqlite import ensure_store
from quark_backends.store.run_store import SqliteRunStore
from quark_backends.store.writing import trials
from quark_core.backends.coordination import NewTrial
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import current_process
from quark_core.testing.fakes import BatchMaker

pytestmark = pytest.mark.skipif(
    not write_batching._SYNCS_APART, reason="there SQLite syncs by itself, with the database held"
)


class Disk:
    """What a power loss would leave of a store: what its files held as they were synced last."""

    def __init__(self, layout, folder):
        self.layout = layout
        self.folder = folder
        self.syncs = 0
        self._lock = threading.Lock()

    def sync(self, file):
        assert os.path.samestat(
            os.fstat(file), self.layout.db_path.with_name("quark.db-wal").stat()
        )
        with self._lock:
            self.syncs += 1
            for suffix in ("", "-wal"):
                kept = self.layout.db_path.with_name(f"quark.db{suffix}")
                shutil.copy(kept, self.folder / kept.name)

    def read(self, sql):
        with self._lock:
            left = self.folder / "left"
            left.mkdir(exist_ok=True)
            (left / "quark.db-shm").unlink(missing_ok=True)
            for suffix in ("", "-wal"):
                shutil.copy(self.folder / f"quark.db{suffix}", left)
            connection = sqlite3.connect(left / "quark.db")
            try:
                return connection.execute(sql).fetchall()
            finally:
                connection.close()


@pytest.fixture
def layout(tmp_path):
    return ensure_store(tmp_path / "runs")


@pytest.fixture
def disk(layout, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    made = Disk(layout, tmp_path / "disk")
    monkeypatch.setattr(write_batching.os, "fsync", made.sync)
    return made


@pytest.fixture
def taking_turns(layout):
    opened = write_batching.SqliteTurns(layout)
    yield opened
    opened.close()


def open_sweep(taking_turns, count):
    made = taking_turns.run(lambda c: trials.open_sweep(c, "p", "lr", {"metric": "loss"}, 3))
    added = [NewTrial(parameters={"n": n}) for n in range(count)]
    taking_turns.run(lambda c: trials.add_trials(c, made.id, added, "all"))
    return made.id


def claim(taking_turns, sweep, request):
    worker = current_process()
    return taking_turns.run(lambda c: trials.claim_trial(c, sweep, request, worker, 60.0, None))


def test_each_answer_is_on_the_disk_before_it_is_given(taking_turns, disk):
    sweep = open_sweep(taking_turns, 24)

    def ask(n):
        given = claim(taking_turns, sweep, f"r{n}")
        kept = disk.read(f"SELECT token, request_id FROM trial WHERE number = {given.number}")
        return kept == [(given.token, f"r{n}")]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(24)))


def test_who_is_given_nothing_waits_for_no_disk(taking_turns, disk):
    sweep = open_sweep(taking_turns, 1)
    assert claim(taking_turns, sweep, "r") is not None
    before = disk.syncs
    assert claim(taking_turns, sweep, "s") is None
    assert disk.syncs == before


def test_others_write_while_one_waits_for_the_disk(layout, taking_turns, monkeypatch):
    sweep = open_sweep(taking_turns, 2)
    is_syncing, may_end = threading.Event(), threading.Event()

    def wait(_file):
        is_syncing.set()
        assert may_end.wait(30)

    monkeypatch.setattr(write_batching.os, "fsync", wait)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(claim, taking_turns, sweep, "r")
        assert is_syncing.wait(30)
        monkeypatch.setattr(write_batching.os, "fsync", lambda _file: None)
        other = write_batching.SqliteTurns(layout)
        assert claim(other, sweep, "s").number == 1
        assert claim(taking_turns, sweep, "t") is None
        assert not slow.done()
        other.close()
        may_end.set()
        assert slow.result().number == 0


def test_who_finds_what_another_is_syncing_waits_for_the_disk_too(
    layout, taking_turns, monkeypatch
):
    sweep = open_sweep(taking_turns, 1)
    given = claim(taking_turns, sweep, "r")
    is_syncing, may_end = threading.Event(), threading.Event()
    told, syncs = TrialResult(state="completed"), []

    def settle(by):
        return by.run(lambda c: trials.settle_trial(c, given.claim, told, 60.0)).state

    def wait(_file):
        is_syncing.set()
        assert may_end.wait(30)

    monkeypatch.setattr(write_batching.os, "fsync", wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(settle, taking_turns)
        assert is_syncing.wait(30)
        monkeypatch.setattr(write_batching.os, "fsync", syncs.append)
        # Its reply was lost, and it is told again, here and by another process.
        other = write_batching.SqliteTurns(layout)
        for by in (taking_turns, other):
            before = len(syncs)
            assert settle(by) == "completed"
            assert len(syncs) == before + 1
        other.close()
        may_end.set()
        assert first.result() == "completed"


def test_what_could_not_be_synced_is_brought_into_the_database(layout, taking_turns, monkeypatch):
    sweep = open_sweep(taking_turns, 1)

    def fail(_file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(write_batching.os, "fsync", fail)
    given = claim(taking_turns, sweep, "r")
    assert layout.db_path.with_name("quark.db-wal").stat().st_size == 0
    connection = sqlite3.connect(f"file:{layout.db_path}?immutable=1", uri=True)
    assert connection.execute("SELECT token FROM trial").fetchall() == [(given.token,)]
    connection.close()


def test_where_that_cannot_be_done_either_it_is_told_and_asking_again_gives_the_same(
    layout, taking_turns, monkeypatch
):
    sweep = open_sweep(taking_turns, 2)

    def fail(_file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(write_batching.os, "fsync", fail)
        broken.setattr(write_batching, "empty_log", lambda _connection: False)
        with pytest.raises(
            SessionStoreError, match=r"log of the store .*quark\.db.* synced.*Errno 5"
        ):
            claim(taking_turns, sweep, "r")
    assert (claim(taking_turns, sweep, "r").number, claim(taking_turns, sweep, "s").number) == (
        0,
        1,
    )


def read_file(layout, sql):
    """What the database file has without its log."""
    connection = sqlite3.connect(f"file:{layout.db_path}?immutable=1", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def fail_to_sync(_file):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.long
def test_what_is_told_again_after_a_failed_sync_is_not_answered_before_it_is_on_the_disk(
    layout, taking_turns, monkeypatch
):
    sweep = open_sweep(taking_turns, 1)
    given = claim(taking_turns, sweep, "r")
    told = TrialResult(state="completed")

    def settle():
        return taking_turns.run(lambda c: trials.settle_trial(c, given.claim, told, 60.0))

    reader = sqlite3.connect(layout.db_path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM trial").fetchall()  # what comes after cannot leave the log
    with monkeypatch.context() as broken:
        broken.setattr(write_batching.os, "fsync", fail_to_sync)
        with pytest.raises(SessionStoreError, match="cannot be synced"):
            settle()
        # It was written: to tell it again changes nothing.
        with pytest.raises(SessionStoreError, match="cannot be synced"):
            settle()
    reader.close()
    assert settle().state == "completed"
    assert read_file(layout, "SELECT state FROM trial") == [("completed",)]


@pytest.mark.long
def test_a_sync_that_fails_after_others_have_closed_the_store_is_told(
    layout, taking_turns, monkeypatch
):
    sweep = open_sweep(taking_turns, 1)
    is_syncing, may_end = threading.Event(), threading.Event()

    def fail_late(file):
        is_syncing.set()
        assert may_end.wait(30)
        fail_to_sync(file)

    reader = sqlite3.connect(layout.db_path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM trial").fetchall()
    monkeypatch.setattr(write_batching.os, "fsync", fail_late)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(claim, taking_turns, sweep, "r")
        assert is_syncing.wait(30)
        taking_turns.close()
        may_end.set()
        with pytest.raises(SessionStoreError, match=r"cannot be synced.*Errno 5"):
            asked.result()
    reader.close()


def test_a_failed_sync_which_the_system_tells_one_thread_is_that_of_all_who_sync(
    layout, taking_turns, monkeypatch
):
    sweep = open_sweep(taking_turns, 2)
    both_sync, has_failed, emptied = threading.Barrier(2), threading.Event(), []
    empty_log = write_batching.empty_log

    def fail_once(_file):
        if both_sync.wait(30) == 0:
            fail_to_sync(_file)
        assert has_failed.wait(30)

    def note(connection):
        has_failed.set()
        emptied.append(threading.get_ident())
        return empty_log(connection)

    monkeypatch.setattr(write_batching.os, "fsync", fail_once)
    monkeypatch.setattr(write_batching, "empty_log", note)
    with ThreadPoolExecutor(2) as pool:
        given = pool.map(lambda request: claim(taking_turns, sweep, request).number, "rs")
        assert sorted(given) == [0, 1]
    assert len(set(emptied)) == 2


def test_a_log_that_cannot_be_opened_is_emptied_each_time(layout, taking_turns, monkeypatch):
    def refuse(_layout):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(write_batching, "_OpenLog", refuse)
    sweep = open_sweep(taking_turns, 1)
    assert claim(taking_turns, sweep, "r").number == 0
    assert layout.db_path.with_name("quark.db-wal").stat().st_size == 0


def test_the_file_of_the_log_is_closed_with_the_last_who_syncs_it(taking_turns):
    open_sweep(taking_turns, 1)
    log = weakref.ref(taking_turns._log)
    file, known = log()._file, os.fstat(log()._file)
    taking_turns.close()
    assert log() is None
    with suppress(OSError):  # another thread may have got its number
        assert not os.path.samestat(os.fstat(file), known)


def test_several_in_a_block_are_synced_once_and_before_it_ends(taking_turns, disk):
    sweep = open_sweep(taking_turns, 5)
    before = disk.syncs
    with taking_turns.syncing():
        given = [claim(taking_turns, sweep, "r0"), claim(taking_turns, sweep, "r1")]
        with taking_turns.syncing():
            given.append(claim(taking_turns, sweep, "r2"))
        assert disk.syncs == before
    assert disk.syncs == before + 1
    kept = disk.read("SELECT number, token, request_id FROM trial WHERE token > 0 ORDER BY number")
    assert kept == [(each.number, each.token, f"r{n}") for n, each in enumerate(given)]
    claim(taking_turns, sweep, "r3")
    assert disk.syncs == before + 2


def test_a_block_of_one_thread_puts_off_nothing_of_another(taking_turns, disk):
    sweep = open_sweep(taking_turns, 2)
    before = disk.syncs
    with taking_turns.syncing(), ThreadPoolExecutor(1) as pool:
        pool.submit(claim, taking_turns, sweep, "r").result()
        assert disk.syncs == before + 1
    assert disk.syncs == before + 1


@pytest.fixture
def store(layout):
    opened = SqliteRunStore(layout)
    yield opened
    opened.close()


def ask(store, sweep, request):
    return partial(
        store.claim_trial, sweep, request_id=request, worker=current_process(), lease_s=60.0
    )


def make_sweep(store, count):
    sweep = store.open_sweep("p", "lr", {"metric": "loss"}, max_failures=3)
    store.add_trials(sweep.id, [NewTrial(parameters={"n": n}) for n in range(count)], key="all")
    return sweep.id


def test_of_calls_that_are_made_together_each_has_its_own_answer_and_all_one_sync(store, disk):
    sweep = make_sweep(store, 2)
    before = disk.syncs
    calls = [ask(store, sweep, "r"), ask(store, "nothing", "s"), ask(store, sweep, "t")]
    first, unknown, second = store.coordinate_together(calls)
    assert isinstance(unknown, SchemaValidationError)
    assert [first.number, second.number] == [0, 1]
    assert disk.syncs == before + 1
    assert disk.read("SELECT count(*) FROM trial WHERE token = 1") == [(2,)]


def test_where_their_sync_fails_none_of_them_is_answered(store, monkeypatch):
    sweep = make_sweep(store, 2)

    def fail(_file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(write_batching.os, "fsync", fail)
        patched.setattr(write_batching, "empty_log", lambda _connection: False)
        found = store.coordinate_together([ask(store, sweep, "r"), ask(store, sweep, "s")])
    assert [type(each) for each in found] == [SessionStoreError] * 2
    again = store.coordinate_together([ask(store, sweep, "r"), ask(store, sweep, "s")])
    assert [(each.number, each.token) for each in again] == [(0, 1), (1, 1)]


def test_batches_are_written_while_a_claim_waits_for_the_disk(store, monkeypatch):
    sweep = make_sweep(store, 1)
    is_syncing, may_end = threading.Event(), threading.Event()

    def wait(_file):
        is_syncing.set()
        assert may_end.wait(30)

    monkeypatch.setattr(write_batching.os, "fsync", wait)
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(ask(store, sweep, "r"))
        assert is_syncing.wait(30)
        store.write_group([BatchMaker("run").start()])
        assert not claimed.done()
        may_end.set()
        assert claimed.result().number == 0
    assert store.load_run("run").run.id == "run"
