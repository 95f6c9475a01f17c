"""Tables of the store as `schema.sql` describes them: for SQLite, PostgreSQL and older versions.

PostgreSQL has a schema of these tables for each workspace; its keys are drawn at random, without
sequences.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from quark_core.records.schema import CURRENT_SCHEMA_VERSION

Dialect = Literal["sqlite", "postgresql"]
SQLITE: Dialect = "sqlite"
POSTGRESQL: Dialect = "postgresql"

ADDED: dict[int, frozenset[str]] = {
    6: frozenset(
        "sweep trial log entry run.sweep_id run.trial_number run.trial_token run_by_trial".split()
    ),
}
"""What each version has that the one before has not: tables, columns of others, and indexes.

A version only adds. What it adds is described in `schema.sql`, as all tables are.
"""

_MADE = re.compile(r"CREATE (?P<what>TABLE|(?:UNIQUE )?INDEX) (?P<name>\w+)(?: ON (?P<table>\w+))?")
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_IN_POSTGRESQL = {
    "INTEGER": "BIGINT",
    # By code points, as SQLite compares: a database's own order differs from one to the next.
    "TEXT": 'TEXT COLLATE "C"',
    "DOUBLE": "DOUBLE PRECISION",
    "BLOB": "BYTEA",
    " AUTOINCREMENT": "",
    " WITHOUT ROWID": "",
}
_WORDS = re.compile("|".join(rf"{word}\b" for word in _IN_POSTGRESQL))


def load_schema() -> str:
    """The statements that make all tables in SQLite."""
    return _COMMENT.sub("", Path(__file__).with_name("schema.sql").read_text("utf-8"))


def list_statements(
    dialect: Dialect, version: int = CURRENT_SCHEMA_VERSION, *, since: int | None = None
) -> list[str]:
    """The statements that make the tables of a version.

    Args:
        dialect: `SQLITE` or `POSTGRESQL`.
        version: The version.
        since: The version of the tables that are there; None where there are none.
    """
    later = _find_added(version)
    # None where all is new.
    new = None if since is None else _find_added(since) - later
    statements: list[str] = []
    for statement in load_schema().strip().removesuffix(";").split(";\n"):
        made = _MADE.match(statement.strip())
        assert made is not None
        name, table = made["name"], made["table"] or made["name"]
        if name in later or table in later:
            continue
        is_new = new is None or table in new
        if made["what"] != "TABLE":
            if is_new or (new is not None and name in new):
                statements.append(statement.strip())
            continue
        lines = statement.strip().split("\n")
        if is_new:
            kept = (line for line in lines if f"{name}.{_first_word(line)}" not in later)
            statements.append("\n".join(kept))
            continue
        statements += [
            f"ALTER TABLE {name} ADD COLUMN {line.strip().removesuffix(',')}"
            for line in lines
            if new is not None and f"{name}.{_first_word(line)}" in new
        ]
    if dialect == POSTGRESQL:
        return [_WORDS.sub(lambda found: _IN_POSTGRESQL[found[0]], each) for each in statements]
    return statements


def _first_word(line: str) -> str:
    """The name of the column that a line describes."""
    return line.split(maxsplit=1)[0]


def _find_added(version: int) -> frozenset[str]:
    """What versions after one have added."""
    return frozenset().union(*(names for added, names in ADDED.items() if added > version))
