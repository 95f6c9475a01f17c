"""A connection carries nothing from one transaction to the next: whose it was, nobody can tell."""

import contextlib

import psycopg
import pytest
from postgres_server import open_database
from shared_runs import StoredRun, open_over_postgres

from quark_backends.service.server.deployment import parse_store_url
from quark_backends.store.databases.postgres import PostgresPool
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.query import Query
from quark_core.runs.run_search import build_search

STATE = """
SELECT current_setting('search_path'), current_setting('statement_timeout'),
 current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'),
 current_setting('default_transaction_read_only'), current_setting('client_min_messages'),
 current_setting('default_transaction_isolation'),
 (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors)
"""


@pytest.fixture
def pool(postgres_url):
    with contextlib.closing(PostgresPool(postgres_url, max_connections=1)) as made:
        yield made


@pytest.fixture
def fresh(postgres_url):
    """The state of a connection that did nothing yet."""
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        return connection.execute(STATE).fetchone()


def read_state(pool):
    """The state of the one connection of a pool."""
    with pool._pool.connection() as raw:
        return raw.execute(STATE).fetchone()


def write(database, connection):
    connection.begin_write()
    connection.execute("DELETE FROM name WHERE text = ?", ("x",))
    connection.executemany("DELETE FROM name WHERE text = ?", [("x",), ("y",)])
    connection.commit()


def read(database, connection):
    connection.begin_read()
    connection.execute("SELECT text FROM name WHERE text = ?", ("x",)).fetchall()
    connection.commit()


def ask_once(database, connection):
    for _ in range(20):  # psycopg would prepare it
        connection.execute("SELECT text FROM name WHERE text = ?", ("x",)).fetchall()
    connection.executemany("DELETE FROM name WHERE text = ?", [("x",), ("y",)])


def ask_for_nothing_there(database, connection):
    with pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM nowhere")


def fail_in_the_middle(database, connection):
    connection.begin_write()
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("SELECT 1 / (SELECT count(*) FROM name WHERE false)")
    connection.rollback()


def leave_in_the_middle(database, connection):
    connection.begin_write()
    connection.execute("DELETE FROM name WHERE text = ?", ("x",))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "work",
    [write, read, ask_once, ask_for_nothing_there, fail_in_the_middle, leave_in_the_middle],
    ids=lambda work: work.__name__,
)
def test_nothing_of_a_transaction_stays_on_its_connection(postgres_url, pool, fresh, work):
    with open_database(postgres_url, pool=pool) as database:
        with contextlib.closing(database.connect()) as connection:
            work(database, connection)
        assert read_state(pool) == fresh


def test_nothing_of_a_search_stays_on_its_connection(postgres_url, pool, fresh):
    with (
        open_database(postgres_url, pool=pool) as database,
        open_over_postgres(database) as store,
    ):
        StoredRun(store).start()
        assert len(store.search(build_search(where="state == 'running'"))) == 1
        assert read_state(pool) == fresh
        with contextlib.closing(database.connect()) as connection:
            connection.begin_read()
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                connection.execute("DELETE FROM run")


def test_stores_of_two_workspaces_take_turns_on_one_connection(postgres_url, pool):
    with (
        open_database(postgres_url, pool=pool) as first,
        open_database(postgres_url, pool=pool) as second,
        open_over_postgres(first) as one,
        open_over_postgres(second) as two,
    ):
        writers = [StoredRun(one, "run1").start(), StoredRun(two, "run2").start()]
        for step in range(10):
            for writer in writers:
                writer.log(("loss", float(step), step))
        assert [run.run.id for run in one.list_runs()] == ["run1"]
        assert [run.run.id for run in two.list_runs()] == ["run2"]
        assert one.read("run1", "metric", Query()).count == 10
        assert two.read("run2", "metric", Query()).count == 10


def test_limits_hold_inside_of_a_transaction(postgres_database):
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    with contextlib.closing(postgres_database.connect()) as connection:
        connection.begin_write()
        found = {
            name: connection.execute(f"SELECT current_setting('{name}')").fetchone()[0]
            for name in (*names, "search_path")
        }
        connection.rollback()
    assert [found[name] for name in names] == ["1min", "15s", "10min"]
    assert found["search_path"] == postgres_database.schema


@pytest.mark.parametrize("asked", ["read-write", "read-only", "standby", "prefer-standby"])
def test_sessions_that_no_batch_gets_into_are_refused_with_the_word_to_use(
    postgres_url, monkeypatch, asked
):
    url = f"{postgres_url}?target_session_attrs={asked}"
    with pytest.raises(SessionStoreError, match="target_session_attrs=primary") as refused:
        PostgresPool(url)
    assert asked in str(refused.value)
    with pytest.raises(SchemaValidationError, match="target_session_attrs=primary"):
        parse_store_url(url)
    monkeypatch.setenv("PGTARGETSESSIONATTRS", asked)
    with pytest.raises(SessionStoreError, match="PGTARGETSESSIONATTRS"):
        PostgresPool(postgres_url)


def test_the_primary_is_found_among_several_hosts(postgres_url):
    host = postgres_url.partition("@")[2].partition("/")[0]
    url = postgres_url.replace(f"@{host}/", "@/")
    url += f"?host=127.0.0.1:1&host={host}&target_session_attrs=primary"
    with (
        open_database(url) as database,
        open_over_postgres(database) as store,
    ):
        StoredRun(store).start()
        assert len(store.search(build_search())) == 1
