"""Attempts, summaries for search, chunks of compacted batches, generations of analyzers.

Adds to what version 1 has and alters none of it: every batch stays as it was
written. The summaries themselves are made afterwards, by the code that keeps
them current.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError

revision = "0002"
down_revision = "0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the columns and tables, and the attempts that the writers tell of."""
    op.add_column("run", sa.Column("newest_step", _NUMBER))
    op.add_column("run", sa.Column("trashed_us", _NUMBER))
    op.add_column("writer", sa.Column("hidden_step", _NUMBER))
    # An index is read in both directions, so DESC gained nothing.
    op.drop_index("run_by_creation", "run")
    op.drop_index("run_by_project", "run")
    op.create_index("run_by_creation", "run", ["created_us", "trashed_us"])
    op.create_index("run_by_project", "run", ["project_id", "created_us", "trashed_us"])
    _add_tables_of_runs()
    _add_tables_of_records()
    _add_tables_of_analyzers()
    _fill_attempts()


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")


def _references(name: str, target: str) -> sa.Column[int]:
    return sa.Column(name, _NUMBER, sa.ForeignKey(target), nullable=False)


def _key(name: str, target: str) -> sa.Column[int]:
    return sa.Column(name, _NUMBER, sa.ForeignKey(target), primary_key=True)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, _NUMBER, nullable=False)


def _add_tables_of_runs() -> None:
    op.create_table(
        "attempt",
        _key("run_pk", "run.pk"),
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("from_step", _NUMBER),
        _number("started_us"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "run_tag",
        _key("run_pk", "run.pk"),
        sa.Column("tag", _TEXT, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("run_tag_by_tag", "run_tag", ["tag"])
    op.create_table(
        "run_config",
        _key("run_pk", "run.pk"),
        sa.Column("key", _TEXT, primary_key=True),
        sa.Column("type", _TEXT, nullable=False),
        sa.Column("number", sa.Double),
        sa.Column("text", _TEXT),
        sqlite_with_rowid=False,
    )
    op.create_index("run_config_by_key", "run_config", ["key"])
    op.create_table(
        "name",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("text", _TEXT, nullable=False, unique=True),
    )
    op.create_table(
        "run_metric",
        _key("run_pk", "run.pk"),
        _key("name_pk", "name.pk"),
        _number("count"),
        _number("non_finite"),
        sa.Column("first", sa.Double),
        sa.Column("last", sa.Double),
        sa.Column("low", sa.Double),
        sa.Column("high", sa.Double),
        sa.Column("last_step", _NUMBER),
        _number("last_us"),
        _number("first_place"),
        _number("first_started_us"),
        _number("first_sequence"),
        _number("last_place"),
        _number("last_started_us"),
        _number("last_sequence"),
        sqlite_with_rowid=False,
    )
    op.create_index("run_metric_by_name", "run_metric", ["name_pk", "run_pk"])
    op.create_table(
        "removed",
        sa.Column("run_id", _TEXT, primary_key=True),
        _number("removed_us"),
    )


def _add_tables_of_records() -> None:
    op.create_table(
        "hidden",
        _key("writer_pk", "writer.pk"),
        sa.Column("kind", _TEXT, primary_key=True),
        _number("sequence"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "chunk",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        _references("writer_pk", "writer.pk"),
        sa.Column("kind", _TEXT, nullable=False),
        _number("name_pk"),
        _number("first_sequence"),
        _number("last_sequence"),
        _number("step_low"),
        _number("step_high"),
        _number("count"),
        _number("codec"),
        sa.Column("rollup", sa.LargeBinary),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("chunk_by_series", "chunk", ["writer_pk", "kind", "name_pk", "first_sequence"])
    op.create_table(
        "frame",
        _key("writer_pk", "writer.pk"),
        sa.Column("first_number", _NUMBER, primary_key=True),
        _number("last_number"),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "damaged",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        _references("writer_pk", "writer.pk"),
        sa.Column("source", _TEXT, nullable=False),
        sa.Column("kind", _TEXT, nullable=False),
        _number("number"),
        _number("count"),
        sa.Column("reason", _TEXT, nullable=False),
        _number("found_us"),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )


def _add_tables_of_analyzers() -> None:
    op.create_table(
        "generation",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        _references("run_pk", "run.pk"),
        sa.Column("analyzer", _TEXT, nullable=False),
        _number("number"),
        _number("replaces"),
        _number("created_us"),
        sa.UniqueConstraint("run_pk", "analyzer", "number"),
    )
    op.create_table(
        "output",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        _references("generation_pk", "generation.pk"),
        sa.Column("kind", _TEXT, nullable=False),
        _number("count"),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("output_by_generation", "output", ["generation_pk", "kind"])


def _fill_attempts() -> None:
    op.execute(
        "INSERT INTO attempt (run_pk, number, from_step, started_us)"
        " SELECT run_pk, attempt, NULL, min(started_us) FROM writer GROUP BY run_pk, attempt"
    )
    # A run whose newest attempt has left no writer.
    op.execute(
        "INSERT INTO attempt (run_pk, number, from_step, started_us)"
        " SELECT pk, attempt, NULL, updated_us FROM run WHERE NOT EXISTS"
        " (SELECT 1 FROM attempt WHERE run_pk = run.pk AND number = run.attempt)"
    )
