"""A migrated store has the very tables of a new one, and those that are declared."""

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

import quark
from quark_backends.store.databases import migration
from quark_backends.store.databases.sqlite import SCHEMA_VERSION, ensure_store, load_schema
from quark_backends.store.databases.tables import METADATA, render_schema
from quark_core.errors import SchemaMigrationError

MIGRATIONS = str(Path(migration.__file__).with_name("migrations"))


def describe_tables(path):
    """What SQLite knows of each table and index, whatever text made them."""
    database = sqlite3.connect(path)

    def ask(pragma, name):
        return database.execute(f"PRAGMA {pragma}('{name}')").fetchall()

    tables = {}
    names = database.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    for name, sql in names:
        columns = []
        for _, column, kind, not_null, default, key, hidden in ask("table_xinfo", name):
            # A lone INTEGER PRIMARY KEY is SQLite's own row number, which is never NULL.
            is_number = key == 1 and kind == "INTEGER" and "WITHOUT ROWID" not in sql
            columns.append((column, kind, bool(not_null) or is_number, default, key, hidden))
        indexes = []
        for _, index, unique, origin, partial in ask("index_list", name):
            parts = [row[2:] for row in ask("index_xinfo", index) if row[5]]
            # The names of those that constraints bring are SQLite's.
            indexes.append((index if origin == "c" else "", unique, origin, partial, parts))
        tables[name] = {
            "columns": columns,
            "indexes": sorted(indexes, key=str),
            "references": sorted(row[2:] for row in ask("foreign_key_list", name)),
            "own rows": "WITHOUT ROWID" in sql,
            "counts on": "AUTOINCREMENT" in sql,
        }
    database.close()
    return tables


def read_revision(path):
    database = sqlite3.connect(path)
    found = database.execute("SELECT version_num FROM alembic_version").fetchall()
    database.close()
    return found


def test_the_schema_is_the_one_that_is_declared():
    assert load_schema() == render_schema()


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_migrated_store_has_the_tables_of_a_new_one(copy_store, tmp_path, version):
    old = copy_store(version)
    new = ensure_store(tmp_path / "new")
    wanted = describe_tables(new.db_path)
    assert describe_tables(old.db_path) != wanted
    quark.migrate_store(old.root)
    assert describe_tables(old.db_path) == wanted
    assert read_revision(old.db_path) == read_revision(new.db_path)


@pytest.fixture
def core(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path}/empty.db")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def config(core):
    made = Config()
    made.set_main_option("script_location", MIGRATIONS)
    made.attributes["connection"] = core
    return made


def test_migrations_alone_make_the_tables(core, config, tmp_path):
    command.upgrade(config, "head")
    core.commit()
    assert compare_metadata(MigrationContext.configure(core), METADATA) == []
    new = ensure_store(tmp_path / "new")
    assert describe_tables(tmp_path / "empty.db") == describe_tables(new.db_path)


def test_the_first_migration_makes_the_tables_of_the_first_version(
    core, config, tmp_path, first_store
):
    command.upgrade(config, "0001")
    core.commit()
    made = describe_tables(tmp_path / "empty.db")
    del made["alembic_version"]
    assert made == describe_tables(first_store.db_path)


def test_the_newest_migration_is_the_current_version():
    scripts = ScriptDirectory(MIGRATIONS)
    assert scripts.get_current_head() == f"{SCHEMA_VERSION:04d}"
    assert len(scripts.get_bases()) == 1


@pytest.mark.parametrize("target", ["0001", "base"])
def test_going_back_is_refused(core, config, target):
    command.upgrade(config, "head")
    with pytest.raises(SchemaMigrationError, match="not taken back"):
        command.downgrade(config, target)
