"""A migrated store has the very tables of a new one, and those that are declared."""

import sqlite3

import quark
from quark_backends.store.databases.sqlite import OLDEST_VERSION, SCHEMA_VERSION, ensure_store
from quark_backends.store.databases.tables import ADDED, SQLITE, list_statements


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


def test_the_statements_make_the_tables_of_a_new_store(tmp_path):
    database = sqlite3.connect(tmp_path / "made.db")
    for statement in list_statements(SQLITE):
        database.execute(statement)
    database.close()
    new = ensure_store(tmp_path / "new")
    assert describe_tables(tmp_path / "made.db") == describe_tables(new.db_path)


def test_a_migrated_store_has_the_tables_of_a_new_one(old_store, tmp_path):
    new = ensure_store(tmp_path / "new")
    wanted = describe_tables(new.db_path)
    assert describe_tables(old_store.db_path) != wanted
    quark.migrate_store(old_store.root)
    assert describe_tables(old_store.db_path) == wanted


def test_the_tables_of_an_older_version_are_known(old_store, tmp_path):
    database = sqlite3.connect(tmp_path / "made.db")
    for statement in list_statements(SQLITE, OLDEST_VERSION):
        database.execute(statement)
    database.close()
    assert describe_tables(tmp_path / "made.db") == describe_tables(old_store.db_path)


def test_each_version_says_what_it_has_added():
    assert sorted(ADDED) == list(range(OLDEST_VERSION + 1, SCHEMA_VERSION + 1))
