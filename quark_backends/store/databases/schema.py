"""Writes the tables as the SQL that makes them; run as a module to renew `schema.sql`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from quark_backends.store.databases.tables import METADATA

_HEAD = (
    "-- Made from tables.py by `python -m quark_backends.store.databases.schema`; do not edit.\n"
)
# Alembic keeps here which migrations a store has; a new store has all of them.
_ALEMBIC = """CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO alembic_version (version_num) VALUES ('0006');
"""


def render_schema() -> str:
    """The statements that make all tables in SQLite."""
    statements = []
    dialect = sqlite.dialect()
    for table in METADATA.sorted_tables:
        statements.append(CreateTable(table).compile(dialect=dialect))
        statements += [
            CreateIndex(index).compile(dialect=dialect)
            for index in sorted(table.indexes, key=lambda index: str(index.name))
        ]
    lines = [
        line.rstrip().replace("\t", "    ")
        for statement in statements
        for line in f"{str(statement).strip()};".splitlines()
    ]
    return _HEAD + "\n".join(lines) + "\n" + _ALEMBIC


if __name__ == "__main__":
    Path(__file__).with_name("schema.sql").write_text(render_schema(), "utf-8")
