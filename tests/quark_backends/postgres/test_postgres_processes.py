"""Several processes write one run, and PostgreSQL is killed: each batch is there once."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from postgres_server import open_database
from shared_runs import StoredRun, open_over_postgres
from stores import Writer

from quark_backends.store.databases.postgres import PostgresDatabase, PostgresPool
from quark_backends.store.run_store import PostgresRunStore
from quark_core.errors import BackendRejected, BackendUnavailable, SessionStoreError
from quark_core.records.query import Query
from quark_core.runs.run_search import build_search

ALL = Query(all_attempts=True)

# A server's process: it takes batches of one run from its input, as often as they are there.
SERVER = """
import sys, msgspec
from quark_backends.store.databases.postgres import PostgresDatabase
from quark_backends.store.run_store import PostgresRunStore
from quark_core.backends.contract import Batch
database = PostgresDatabase(sys.argv[1], schema=sys.argv[2])
store = PostgresRunStore(database)
groups = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[list[Batch]])
print("ready", flush=True)
for group in groups:
    store.write_group(group)
store.close()
database.close()
"""


def start_server(url, database, groups):
    import msgspec

    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER, url, database.schema],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(msgspec.msgpack.encode(groups))
    process.stdin.close()
    return process


def wait_for(process):
    with process:
        said, errors = process.stdout.read(), process.stderr.read()
    assert (process.returncode, said, errors.decode()) == (0, b"ready\n", "")


def make_groups(run, writer, count, size=4):
    batches = [
        writer.batch(
            [writer.metric("loss", float(n), n), writer.metric(f"own/{writer.id}", 1.0, n)]
        )
        for n in range(count)
    ]
    return [batches[start : start + size] for start in range(0, count, size)]


def read_steps(store, writer):
    rows = store.read("run0", "metric", ALL)
    mine = rows.take(rows["writer_id"] == writer.id)
    return mine.take(mine["metric_key"] == "loss")["step"].tolist()


@pytest.mark.long
def test_two_processes_write_one_run_at_once(postgres_url, postgres_database):
    with open_over_postgres(postgres_database) as store:
        run = StoredRun(store)
        run.start()
        writers = [Writer(run, 0, rank=rank) for rank in range(2)]
        groups = [make_groups(run, writer, 200) for writer in writers]
        servers = [start_server(postgres_url, postgres_database, part) for part in groups]
        for server in servers:
            wait_for(server)
        for writer in writers:
            assert read_steps(store, writer) == list(range(200))
        summary = store.summarize("run0")
        assert summary.metrics["loss"].count == 400
        assert summary.metrics["loss"].last == summary.metrics["loss"].high == 199.0
        assert len(summary.metrics) == 3


@pytest.mark.long
def test_two_processes_are_given_the_same_batches(postgres_url, postgres_database):
    with open_over_postgres(postgres_database) as store:
        run = StoredRun(store)
        writer = run.start()
        groups = make_groups(run, writer, 200)
        servers = [start_server(postgres_url, postgres_database, groups) for _ in range(2)]
        for server in servers:
            wait_for(server)
        assert read_steps(store, writer) == list(range(200))
        assert store.summarize("run0").metrics["loss"].count == 200
        found = store.read_batches("run0", writer.id, 0, 1_000)
        assert [batch.number for batch in found] == list(range(201))


@pytest.mark.long
def test_one_of_those_who_start_a_run_at_once_has_it(postgres_url, postgres_database):
    databases = [PostgresDatabase(postgres_url, schema=postgres_database.schema) for _ in range(4)]
    stores = [PostgresRunStore(database) for database in databases]
    ready = threading.Barrier(4)

    def start(number, run_id):
        run = StoredRun(stores[number], run_id)
        ready.wait()
        try:
            return run.start()
        except BackendRejected as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        for attempt in range(10):
            found = list(threads.map(start, range(4), [f"run{attempt}"] * 4))
            refused = [said for said in found if isinstance(said, str)]
            assert len(refused) == 3
            assert all("was started by another process" in said for said in refused)
            assert stores[0].load_run(f"run{attempt}").run.attempt == 0
    for store, database in zip(stores, databases, strict=True):
        store.close()
        database.close()


@pytest.mark.long
def test_one_start_that_two_processes_deliver_is_taken_from_both(postgres_url, postgres_database):
    sent = []
    with open_over_postgres(postgres_database) as store:
        StoredRun(store, write=sent.extend).start()
    servers = [start_server(postgres_url, postgres_database, [sent]) for _ in range(3)]
    for server in servers:
        wait_for(server)
    with open_over_postgres(postgres_database) as store:
        assert store.load_run("run0").run.attempt == 0


@pytest.mark.long
def test_a_resume_hides_what_others_write_meanwhile(postgres_database):
    """Figures are those of the visible points, whoever was first."""
    with open_over_postgres(postgres_database) as store:
        run = StoredRun(store)
        first = run.start()
        late = make_groups(run, first, 120)
        for group in late[:10]:
            store.write_group(group)
        with ThreadPoolExecutor(2) as threads:
            writing = threads.submit(lambda: [store.write_group(group) for group in late[10:]])
            resuming = threads.submit(lambda: [run.start(from_step=step) for step in (90, 50)])
            writing.result()
            resuming.result()
        visible = store.read("run0", "metric", Query())
        mine = visible.take(visible["metric_key"] == "loss")
        assert mine["step"].tolist() == list(range(50))
        summary = store.summarize("run0")
        assert summary.metrics["loss"].count == 50
        assert (summary.metrics["loss"].last, summary.newest_step) == (49.0, 49)


class Deliverer:
    """Delivers one writer's batches as a lane does: again and again until they are taken."""

    def __init__(self, store, groups):
        self.store, self.groups = store, groups
        self.acknowledged = 0
        self.failures = 0
        self.failed = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        pause = threading.Event()
        for group in self.groups:
            while True:
                try:
                    self.store.write_group(group)
                except BackendUnavailable:
                    self.failures += 1
                    if self.failures > 5_000:
                        self.failed.append("never taken")
                        return
                    # A server that starts refuses whoever comes, at once.
                    pause.wait(0.01)
                except BaseException as error:
                    self.failed.append(error)
                    return
                else:
                    break
            self.acknowledged += 1

    def wait_until(self, groups):
        pause = threading.Event()
        while self.acknowledged < groups and self.thread.is_alive():
            pause.wait(0.002)

    def finish(self):
        self.thread.join()
        assert self.failed == []
        assert self.acknowledged == len(self.groups)


@pytest.mark.parametrize("how", ["backends", pytest.param("server", marks=pytest.mark.long)])
def test_a_postgres_that_is_killed_loses_and_doubles_nothing(postgres_server, how):
    url = postgres_server.url
    with open_database(url) as database, open_over_postgres(database) as store:
        run = StoredRun(store)
        run.start()
        writers = [Writer(run, 0, rank=rank) for rank in range(2)]
        groups = [make_groups(run, writer, 600, size=3) for writer in writers]
        deliverers = [Deliverer(store, part) for part in groups]
        for kill in range(1, 5):
            for deliverer in deliverers:
                deliverer.wait_until(kill * 30)
            acknowledged = [deliverer.acknowledged for deliverer in deliverers]
            if how == "backends":
                postgres_server.kill_backends()
            else:
                postgres_server.kill()
                postgres_server.start()
            for writer, taken in zip(writers, acknowledged, strict=True):
                steps = read_when_possible(store, writer)
                assert steps == list(range(len(steps)))
                assert len(steps) >= taken * 3
        for deliverer in deliverers:
            deliverer.finish()
        for writer in writers:
            assert read_steps(store, writer) == list(range(600))
        summary = store.summarize("run0")
        assert summary.metrics["loss"].count == 1_200
        (found,) = store.search(build_search(where="loss > 0"))
        assert found.newest_step == 599
        for writer in writers:
            batches = store.read_batches("run0", writer.id, 0, 1_000)
            assert [batch.number for batch in batches] == list(range(600))


def read_when_possible(store, writer):
    """What is read, once the database answers again."""
    for _ in range(1_200):
        try:
            return read_steps(store, writer)
        except SessionStoreError:
            threading.Event().wait(0.05)
    raise AssertionError("the database never came back")


@pytest.mark.long
def test_a_writer_that_is_killed_in_the_middle_leaves_whole_groups(postgres_url, postgres_database):
    with open_over_postgres(postgres_database) as store:
        run = StoredRun(store)
        writer = run.start()
        groups = make_groups(run, writer, 2_000, size=5)
        for _ in range(4):
            server = start_server(postgres_url, postgres_database, groups)
            with server:
                assert server.stdout.readline() == b"ready\n"
                before = len(read_steps(store, writer))
                pause = threading.Event()
                while len(read_steps(store, writer)) <= before and server.poll() is None:
                    pause.wait(0.002)
                server.kill()
            steps = read_steps(store, writer)
            assert steps == list(range(len(steps)))
            assert len(steps) % 5 == 0
            # What the run holds was given back when its connection broke off.
            assert store.summarize("run0").metrics["loss"].count >= len(steps)
        wait_for(start_server(postgres_url, postgres_database, groups))
        assert read_steps(store, writer) == list(range(2_000))
        assert store.summarize("run0").metrics["loss"].count == 2_000


@pytest.mark.long
def test_more_callers_than_connections_take_turns(postgres_url):
    pool = PostgresPool(postgres_url, max_connections=2)
    with open_database(postgres_url, pool=pool) as database, open_over_postgres(database) as store:
        runs = [StoredRun(store, f"run{number}") for number in range(8)]

        def work(run):
            writer = run.start()
            for step in range(20):
                writer.log(("loss", float(step), step))
                assert store.read(run.run_id, "metric", ALL).count == step + 1
            return store.summarize(run.run_id).metrics["loss"].count

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, runs)) == [20] * 8
    pool.close()


def test_psycopg_is_loaded_by_who_uses_postgresql_only():
    program = (
        "import sys, json; import quark; from quark_backends.store import run_store;"
        " from quark_backends.store.databases import sqlite;"
        " print(json.dumps([m for m in ('psycopg', 'psycopg_pool', 'sqlalchemy')"
        " if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == []
