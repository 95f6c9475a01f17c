"""The service over a PgBouncer in transaction mode: a connection is lent for one transaction."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pgbouncer import CONNECTIONS
from postgres_server import new_database
from service_fixtures import call, ingest, serving

from quark_core.testing.fakes import BatchMaker

THREADS = 16
BATCHES = 10
WORKSPACES = ("red", "blue")


@pytest.fixture
def database(postgres_server):
    """The URL without the pooler of a database that only one test has."""
    with new_database(postgres_server.url) as url:
        yield url


@pytest.fixture
def server(pgbouncer, database, tmp_path):
    url = pgbouncer.find_url(database)
    with serving(tmp_path, store_url=url, limits={"requests_per_s": 1e6}) as running:
        yield running


@pytest.fixture
def clients(server):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(server.client(name)) for name in WORKSPACES}


def read_own(server_url, workspace):
    """Ids of runs and numbers of their metrics' batches, in a workspace's schema."""
    with psycopg.connect(server_url.replace("+psycopg", "")) as connection:
        rows = connection.execute(
            f"SELECT run.id, array_agg(number ORDER BY number)"
            f" FROM quark_ws_{workspace}.batch"
            f" JOIN quark_ws_{workspace}.writer ON writer.pk = writer_pk"
            f" JOIN quark_ws_{workspace}.run ON run.pk = run_pk"
            " WHERE kind = 'metric' GROUP BY run.id"
        ).fetchall()
    return dict(rows)


def write_runs(clients):
    """Write from many threads, each a run of its own in one of the workspaces."""

    def write(index):
        client = clients[WORKSPACES[index % 2]]
        maker = BatchMaker(f"run{index}")
        points = [(("loss", step, 1.0), (f"m{step}", 0, 2.0)) for step in range(BATCHES)]
        batches = [maker.start(), *(maker.metrics(*pair) for pair in points)]
        return [ingest(client, batch).status_code for batch in batches]

    with ThreadPoolExecutor(THREADS) as threads:
        for codes in threads.map(write, range(THREADS)):
            assert codes == [200] * (BATCHES + 1)


@pytest.mark.long
def test_two_workspaces_over_four_connections(clients, database):
    write_runs(clients)
    for odd, workspace in enumerate(WORKSPACES):
        runs = {f"run{index}" for index in range(odd, THREADS, 2)}
        numbers = list(range(1, BATCHES + 1))
        assert read_own(database, workspace) == dict.fromkeys(runs, numbers)
        client = clients[workspace]
        listed = call(client, "list_runs").json()
        assert {run["run"]["id"] for run in listed} == runs
        found = call(client, "search", search={"where": "m3 > 1"}).json()
        assert {run["stored"]["run"]["id"] for run in found} == runs
        for run_id in runs:
            read = call(client, "read", run_id=run_id, kind="metric", query={}).json()
            assert len(read) == 2 * BATCHES
        assert call(client, "load_run", run_id=f"run{1 - odd}").status_code == 404


@pytest.mark.long
def test_the_connections_that_are_lent_are_as_they_were(clients, pgbouncer):
    write_runs(clients)
    url = pgbouncer.url.replace("+psycopg", "")
    held = [psycopg.connect(url) for _ in range(CONNECTIONS)]
    # Each is in a transaction, so that together they are all that there are.
    found = {
        connection.execute(
            "SELECT pg_backend_pid(), current_setting('search_path'),"
            " current_setting('statement_timeout'), (SELECT count(*) FROM pg_prepared_statements)"
        ).fetchone()
        for connection in held
    }
    assert len({pid for pid, *_ in found}) == CONNECTIONS
    assert {tuple(state) for _, *state in found} == {('"$user", public', "0", 0)}
    for connection in held:
        connection.close()


@pytest.mark.long
def test_a_pooler_that_is_started_again_loses_nothing(server, pgbouncer, database):
    with server.client("red") as client:
        maker = BatchMaker("run1")
        assert ingest(client, maker.start()).status_code == 200
        assert ingest(client, maker.metrics(("loss", 0, 1.0))).status_code == 200
        pgbouncer.stop()
        batch = maker.metrics(("loss", 1, 1.0))
        assert ingest(client, batch).status_code == 503
        pgbouncer.start()
        assert ingest(client, batch).status_code == 200
        assert ingest(client, batch).status_code == 200
    assert read_own(database, "red") == {"run1": [1, 2]}
