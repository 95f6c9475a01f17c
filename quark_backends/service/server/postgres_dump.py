"""Writes the schemas of a service's PostgreSQL database into a backup, and reads them back.

All of them are as of one moment: one transaction reads them, with COPY. They
come back into tables that the migrations make, of the version that was copied,
under other names; one transaction then gives all of them theirs. No program of
PostgreSQL's is needed, which would have to be as new as the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from psycopg import sql
from sqlalchemy import Connection, create_engine, inspect
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from quark_backends.service.server.deployment import CONTROL_VERSION, STEPS
from quark_backends.store.databases.postgres import VERSION_TABLE, set_version
from quark_backends.store.databases.sqlite import SCHEMA_VERSION
from quark_backends.store.databases.tables import POSTGRESQL, list_statements
from quark_backends.store.upkeep.backup import BackupFolder
from quark_core.config.redaction import redact_text
from quark_core.errors import SessionStoreError

CONTROL_SCHEMA = "quark_control"
"""The schema of workspaces and keys."""

_FOLDER = "postgresql"
_INDEX = f"{_FOLDER}/tables.json"
_WORKSPACES = "quark\\_ws\\_%"
_VERSION_TABLES = {CONTROL_SCHEMA: ("control_version", "version")}
_STORE_VERSION = (VERSION_TABLE, "version")


class _Table(msgspec.Struct, frozen=True):
    """A table that was copied, after those that it refers to.

    Attributes:
        name: Its name.
        columns: Theirs, in the order of the copy.
        rows: How many there are.
        path: Where in the backup they lie, in PostgreSQL's binary format.
    """

    name: str
    columns: list[str]
    rows: int
    path: str


class _Schema(msgspec.Struct, frozen=True):
    """A schema that was copied: its name, the version of its tables, and these."""

    name: str
    version: int
    tables: list[_Table]


def dump_schemas(url: URL, prefix: str, backup: BackupFolder) -> list[str]:
    """Copy the control schema and those of all workspaces, as of one moment.

    Args:
        url: The database.
        prefix: Begins the names of workspaces' schemas.
        backup: Where they go.

    Returns:
        The workspaces.

    Raises:
        SessionStoreError: The database cannot be read, or there is no room.
    """
    with _engine(url) as engine:
        reading = engine.execution_options(isolation_level="REPEATABLE READ")
        with reading.connect() as core:
            core.exec_driver_sql("SET TRANSACTION READ ONLY")
            core.exec_driver_sql("SET LOCAL statement_timeout = 0")
            rows = core.exec_driver_sql(f"SELECT name FROM {CONTROL_SCHEMA}.workspace")
            workspaces = sorted(rows.scalars())
            names = [CONTROL_SCHEMA, *(f"{prefix}{name}" for name in workspaces)]
            schemas = [_dump_schema(core, name, backup) for name in names]
    backup.write_file(_INDEX, iter([msgspec.json.encode(schemas)]))
    return workspaces


def find_schemas(url: URL) -> list[str]:
    """The schemas of a service that a database has.

    Raises:
        SessionStoreError: It cannot be read.
    """
    with _engine(url) as engine, engine.connect() as core:
        rows = core.exec_driver_sql(
            "SELECT nspname FROM pg_namespace WHERE nspname = %s OR nspname LIKE %s"
            " ORDER BY nspname",
            (CONTROL_SCHEMA, _WORKSPACES),
        )
        return list(rows.scalars())


def load_schemas(url: URL, folder: Path, replaced: Sequence[str]) -> dict[str, str]:
    """Make the schemas of a backup in a database, all at once or none.

    Args:
        url: The database.
        folder: The backup, which has been verified.
        replaced: Schemas that are there and make way; they are renamed.

    Returns:
        Each of those -> what it is called now.

    Raises:
        SessionStoreError: A newer Quark made the backup, or the database fails.
    """
    schemas = msgspec.json.decode((folder / _INDEX).read_bytes(), type=list[_Schema])
    for schema in schemas:
        known = CONTROL_VERSION if schema.name == CONTROL_SCHEMA else SCHEMA_VERSION
        if schema.version > known:
            raise SessionStoreError(
                f"the backup's schema {schema.name} has version {schema.version}, but this "
                f"Quark supports up to {known}. Upgrade quark-tracker to restore it"
            )
    token = os.urandom(4).hex()
    made = {schema.name: f"quark_new_{token}_{n}" for n, schema in enumerate(schemas)}
    aside = {name: f"quark_replaced_{token}_{n}" for n, name in enumerate(replaced)}
    with _engine(url) as engine:
        try:
            for schema in schemas:
                with engine.begin() as core:
                    _load_schema(core, schema, made[schema.name], folder)
            with engine.begin() as core:
                for old, new in [*aside.items(), *((new, old) for old, new in made.items())]:
                    core.exec_driver_sql(f"ALTER SCHEMA {_quote(old)} RENAME TO {_quote(new)}")
        except BaseException:
            for name in made.values():
                with engine.begin() as core:
                    core.exec_driver_sql(f"DROP SCHEMA IF EXISTS {_quote(name)} CASCADE")
            raise
    return aside


def _dump_schema(core: Connection, schema: str, backup: BackupFolder) -> _Schema:
    inspector = inspect(core)
    table, column = _VERSION_TABLES.get(schema, _STORE_VERSION)
    version = core.exec_driver_sql(
        f"SELECT {_quote(column)} FROM {_quote(schema)}.{_quote(table)}"
    ).scalar_one()
    tables = []
    for name, _ in inspector.get_sorted_table_and_fkc_names(schema=schema):
        if name is None:
            continue  # what refers to itself in a circle; there is none
        columns = [str(each["name"]) for each in inspector.get_columns(name, schema=schema)]
        path = f"{_FOLDER}/{schema}/{name}.copy"
        cursor = _raw(core).cursor()
        backup.write_file(path, _copy_out(cursor, schema, name, columns))
        tables.append(_Table(name, columns, cursor.rowcount, path))
    return _Schema(schema, int(version), tables)


def _copy_out(
    cursor: psycopg.Cursor[Any], schema: str, table: str, columns: list[str]
) -> Iterator[bytes]:
    place = f"{_quote(schema)}.{_quote(table)}"
    with cursor.copy(_statement(f"COPY {place} ({_list(columns)}) TO STDOUT (FORMAT binary)")) as c:
        for piece in c:
            yield bytes(piece)


def _load_schema(core: Connection, schema: _Schema, name: str, folder: Path) -> None:
    core.exec_driver_sql("SET LOCAL statement_timeout = 0")
    core.exec_driver_sql(f"CREATE SCHEMA {_quote(name)}")
    core.exec_driver_sql(f"SET LOCAL search_path TO {_quote(name)}")
    if schema.name == CONTROL_SCHEMA:
        core.exec_driver_sql("CREATE TABLE upgrading (pk int PRIMARY KEY)")
        for step in STEPS[: schema.version]:
            step(core)
    else:
        for statement in (
            *list_statements(POSTGRESQL, schema.version),
            *set_version(schema.version),
        ):
            core.exec_driver_sql(statement)
    for table in schema.tables:
        core.exec_driver_sql(f"DELETE FROM {_quote(table.name)}")
        cursor = _raw(core).cursor()
        place = f"{_quote(table.name)} ({_list(table.columns)})"
        with (
            (folder / table.path).open("rb") as file,
            cursor.copy(_statement(f"COPY {place} FROM STDIN (FORMAT binary)")) as copy,
        ):
            while piece := file.read(2**20):
                copy.write(piece)
        if cursor.rowcount != table.rows:
            raise SessionStoreError(
                f"{table.path}: {cursor.rowcount} of {table.rows} copied rows were restored"
            )


@contextmanager
def _engine(url: URL) -> Iterator[Engine]:
    """Connections that are closed after use; errors of the database as ours."""
    engine = create_engine(url, poolclass=NullPool, connect_args={"application_name": "quark"})
    try:
        yield engine
    except (SQLAlchemyError, psycopg.Error) as error:
        reason = redact_text(str(getattr(error, "orig", None) or error))
        name = url.render_as_string(hide_password=True)
        raise SessionStoreError(f"the database {name}: {reason}") from error
    finally:
        engine.dispose()


def _raw(core: Connection) -> psycopg.Connection[Any]:
    raw = core.connection.driver_connection
    assert isinstance(raw, psycopg.Connection)
    return raw


def _quote(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def _list(columns: list[str]) -> str:
    return ", ".join(map(_quote, columns))


def _statement(text: Any) -> sql.SQL:
    # Made of quoted names only; the driver asks for a literal otherwise.
    return sql.SQL(text)
