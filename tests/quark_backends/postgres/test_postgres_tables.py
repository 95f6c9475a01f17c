"""The migrations make in PostgreSQL the tables that are declared, in a schema, once."""

import contextlib
import threading
import uuid

import pytest
from postgres_server import open_database
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool
from stores import list_tables

from quark_backends.store.databases.postgres import (
    VERSION_TABLE,
    PostgresDatabase,
    PostgresPool,
    set_version,
)
from quark_backends.store.databases.sqlite import (
    OLDEST_VERSION,
    SCHEMA_VERSION,
    connect_memory,
)
from quark_backends.store.databases.tables import POSTGRESQL, list_statements
from quark_core.errors import BackendUnavailable, SchemaMigrationError, SessionStoreError


@contextlib.contextmanager
def connect_core(url, schema):
    engine = create_engine(
        url, poolclass=NullPool, connect_args={"options": f"-c search_path={schema}"}
    )
    with engine.connect() as core:
        yield core
    engine.dispose()


def describe_tables(core):
    """What PostgreSQL knows of each table, whatever text made it."""
    inspector = inspect(core)
    columns = core.execute(
        text(
            "SELECT table_name, column_name, data_type, is_nullable, collation_name,"
            " column_default, is_identity FROM information_schema.columns"
            " WHERE table_schema = current_schema() AND table_name <> 'store_version'"
            " ORDER BY table_name, ordinal_position"
        )
    )
    tables = {}
    for table, *column in columns:
        tables.setdefault(table, {"columns": []})["columns"].append(tuple(column))
    for table, found in tables.items():
        found["key"] = inspector.get_pk_constraint(table)["constrained_columns"]
        found["unique"] = sorted(c["column_names"] for c in inspector.get_unique_constraints(table))
        found["indexes"] = sorted(
            (index["name"], index["column_names"], index["unique"])
            for index in inspector.get_indexes(table)
        )
        found["references"] = sorted(
            (key["constrained_columns"], key["referred_table"], key["referred_columns"])
            for key in inspector.get_foreign_keys(table)
        )
    return tables


@pytest.mark.long
def test_the_tables_are_those_of_sqlite(postgres_url, make_postgres_database):
    made = make_postgres_database()
    with connect_core(postgres_url, made.schema) as core:
        found = describe_tables(core)
        sequences = core.scalar(
            text(
                "SELECT count(*) FROM pg_class WHERE relkind = 'S'"
                f" AND relnamespace = '{made.schema}'::regnamespace"
            )
        )
    assert sequences == 0
    with contextlib.closing(connect_memory()) as memory:
        for table in list_tables():
            columns = memory.execute(f"PRAGMA table_info({table})").fetchall()
            assert [(row[0], row[2] == "NO") for row in found[table]["columns"]] == [
                (name, bool(not_null)) for _, name, _, not_null, *_ in columns
            ]
            keys = sorted((row[5], row[1]) for row in columns if row[5])
            assert found[table]["key"] == [name for _, name in keys]
            indexes = memory.execute(f"PRAGMA index_list({table})").fetchall()
            own = sorted((row[1], bool(row[2])) for row in indexes if row[3] == "c")
            assert [(name, unique) for name, _, unique in found[table]["indexes"]] >= own
            references = memory.execute(f"PRAGMA foreign_key_list({table})").fetchall()
            wanted = sorted(([row[3]], row[2], [row[4]]) for row in references)
            assert found[table]["references"] == wanted
    columns = [column for table in found.values() for column in table["columns"]]
    assert {column[3] for column in columns if column[1] == "text"} == {"C"}
    assert {column[1] for column in columns} == {"text", "bigint", "double precision", "bytea"}
    assert sorted(found) == sorted(list_tables())


def test_a_schema_gets_its_tables_once(make_postgres_database):
    database = make_postgres_database(create=False)
    assert database.read_version() is None
    with pytest.raises(SessionStoreError, match=r"has no store.*quark db upgrade"):
        database.connect()
    assert database.create() == SCHEMA_VERSION == database.read_version()
    with contextlib.closing(database.connect()) as connection:
        connection.execute("INSERT INTO removed VALUES ('a', 1)")
    assert database.create() == database.migrate() == SCHEMA_VERSION
    with contextlib.closing(database.connect()) as connection:
        assert connection.execute("SELECT * FROM removed").fetchall() == [("a", 1)]


def test_an_older_store_is_refused_until_it_is_migrated(postgres_url, make_postgres_database):
    new, old = make_postgres_database(), make_postgres_database(create=False)
    with connect_core(postgres_url, old.schema) as core:
        core.execute(text(f"CREATE SCHEMA {old.schema}"))
        for statement in list_statements(POSTGRESQL, OLDEST_VERSION):
            core.execute(text(statement))
        for statement in set_version(OLDEST_VERSION):
            core.execute(text(statement))
        core.execute(text("INSERT INTO name (pk, text) VALUES (7, 'loss')"))
        core.commit()
    assert old.read_version() == OLDEST_VERSION
    match = f"schema version {OLDEST_VERSION}, but this Quark requires version"
    with pytest.raises(SessionStoreError, match=match):
        old.connect()
    with pytest.raises(BackendUnavailable, match=match):
        old.run(lambda connection: None)
    assert old.migrate() == SCHEMA_VERSION == old.read_version()
    with contextlib.closing(old.connect()) as connection:
        assert connection.execute("SELECT pk, text FROM name").fetchall() == [(7, "loss")]
    found = []
    for database in (new, old):
        with connect_core(postgres_url, database.schema) as core:
            found.append(describe_tables(core))
    assert found[0] == found[1]


def test_a_newer_store_is_refused_and_left_as_it_is(postgres_url, make_postgres_database):
    made = make_postgres_database()
    with contextlib.closing(made.connect()) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version = 41")
    with contextlib.closing(PostgresDatabase(postgres_url, schema=made.schema)) as database:
        with pytest.raises(
            SessionStoreError, match=rf"version 41.*supports up to {SCHEMA_VERSION}. Upgrade"
        ):
            database.connect()
        with pytest.raises(SchemaMigrationError, match="version 41"):
            database.migrate()
        with pytest.raises(SchemaMigrationError, match="version 41"):
            database.create()
        assert database.read_version() == 41


def test_many_may_make_one_store_at_once(postgres_url):
    schema = f"quark_test_{uuid.uuid4().hex}"
    databases = [PostgresDatabase(postgres_url, schema=schema) for _ in range(4)]
    ready, found = threading.Barrier(4), []

    def create(database):
        ready.wait()
        found.append(database.create())

    threads = [threading.Thread(target=create, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SCHEMA_VERSION] * 4
    with contextlib.closing(databases[0].take()) as connection:
        connection.execute(f"DROP SCHEMA {schema} CASCADE")
    for database in databases:
        database.close()


def test_stores_of_one_pool_do_not_see_each_other(postgres_url):
    pool = PostgresPool(postgres_url, max_connections=1)
    with (
        open_database(postgres_url, pool=pool) as first,
        open_database(postgres_url, pool=pool) as second,
    ):
        for name, database in (("a", first), ("b", second), ("c", first)):
            with contextlib.closing(database.connect()) as connection:
                connection.execute("INSERT INTO removed VALUES (?, 1)", (name,))
        for names, database in ((["a", "c"], first), (["b"], second)):
            with contextlib.closing(database.connect()) as connection:
                rows = connection.execute("SELECT run_id FROM removed ORDER BY run_id").fetchall()
            assert [row[0] for row in rows] == names
    pool.close()


@pytest.mark.parametrize(
    "url", ["", "sqlite:///x.db", "mysql://u:secret@h/d", "postgresql+asyncpg://u:secret@h/d", "??"]
)
def test_a_url_of_something_else_is_refused_without_its_password(url):
    with pytest.raises(SessionStoreError, match=r"postgresql\+psycopg://") as caught:
        PostgresDatabase(url, schema="s")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("schema", ["", "A", "a-b", 'a"b', "1a", "a" * 64, "a.b"])
def test_a_bad_name_of_a_schema_is_refused(schema):
    with pytest.raises(SessionStoreError, match="schema must be"):
        PostgresDatabase("postgresql://h/d", schema=schema)


def test_a_database_out_of_reach_is_told_without_the_password():
    # Nobody listens there.
    url = "postgresql+psycopg://somebody:secret@127.0.0.1:1/d"
    with contextlib.closing(PostgresDatabase(url, schema="s", wait_s=0.5)) as database:
        for call in (database.connect, database.read_version, database.migrate):
            with pytest.raises(SessionStoreError, match="cannot be reached") as caught:
                call()
            assert "secret" not in str(caught.value)
        with pytest.raises(BackendUnavailable, match="cannot be reached") as caught:
            database.run(lambda connection: None)
        assert "secret" not in str(caught.value)
        assert "secret" not in database.name
