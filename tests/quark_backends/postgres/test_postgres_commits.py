"""What PostgreSQL calls a commit, and is none: a batch counts only once it is where it must be."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from postgres_server import open_database
from shared_runs import StoredRun, open_over_postgres

from quark_backends.store.databases.postgres import PostgresPool
from quark_core.errors import BackendUnavailable
from quark_core.records.query import Query


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as made:
        yield made


def test_a_commit_that_is_cancelled_while_it_waits_for_a_standby_is_not_acknowledged(
    postgres_server, threads
):
    server = postgres_server
    with open_database(server.url) as database, open_over_postgres(database) as store:
        writer = StoredRun(store).start()
        batch = writer.batch([writer.metric("loss", 1.0, 0)])
        with server.missing_standby():
            # From the second time on it is there, on one machine: that is not told as stored.
            for _ in range(3):
                writing = threads.submit(store.write_group, [batch])
                server.cancel(server.find_waiting())
                with pytest.raises(BackendUnavailable, match="it is unknown"):
                    writing.result(30)
                assert store.read("run0", "metric", Query()).count == 1
            writing = threads.submit(store.write_group, [batch])
            server.find_waiting()
            assert not writing.done()
        writing.result(30)
        assert store.read("run0", "metric", Query()).count == 1
        assert store.summarize("run0").metrics["loss"].count == 1


def test_a_connection_whose_commit_was_warned_of_is_used_no_more(postgres_server, threads):
    pool = PostgresPool(postgres_server.url, max_connections=1)
    with open_database(postgres_server.url, pool=pool) as database:

        def write():
            connection = database.take()
            try:
                connection.begin_write()
                connection.execute("INSERT INTO name (pk, text) VALUES (1, ?)", ("loss",))
                connection.commit()
            finally:
                connection.close()

        with postgres_server.missing_standby():
            writing = threads.submit(write)
            pid = postgres_server.find_waiting()
            postgres_server.cancel(pid)
            with pytest.raises(Exception, match="it is unknown"):
                writing.result(30)
        with pool._pool.connection() as raw:
            assert raw.info.backend_pid != pid
    pool.close()
