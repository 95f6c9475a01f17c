"""Sweeps, their trials, logs that workers share, and which trial a run has.

Adds tables and columns. Runs that are there have no trial.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError

revision = "0006"
down_revision = "0005"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the tables, the columns and their indexes."""
    op.add_column("run", sa.Column("sweep_id", _TEXT))
    op.add_column("run", sa.Column("trial_number", _NUMBER))
    op.add_column("run", sa.Column("trial_token", _NUMBER))
    op.create_index("run_by_trial", "run", ["sweep_id", "trial_number"])
    _add_trials()
    _add_logs()


def _add_trials() -> None:
    op.create_table(
        "sweep",
        sa.Column("id", _TEXT, primary_key=True),
        sa.Column("name_key", _TEXT, nullable=False),
        sa.Column("project", _TEXT, nullable=False),
        sa.Column("name", _TEXT, nullable=False),
        sa.Column("definition", _TEXT, nullable=False),
        sa.Column("max_failures", _NUMBER, nullable=False),
        sa.Column("state", _TEXT, nullable=False),
        sa.Column("created_us", _NUMBER, nullable=False),
        sa.Column("updated_us", _NUMBER, nullable=False),
    )
    op.create_index("sweep_by_name", "sweep", ["name_key"], unique=True)
    op.create_index("sweep_by_project", "sweep", ["project", "created_us"])
    op.create_table(
        "trial",
        sa.Column("sweep_id", _TEXT, sa.ForeignKey("sweep.id"), primary_key=True),
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("added_key", _TEXT, nullable=False),
        sa.Column("parameters", _TEXT, nullable=False),
        sa.Column("origin", _TEXT, nullable=False),
        sa.Column("state", _TEXT, nullable=False),
        sa.Column("token", _NUMBER, nullable=False),
        sa.Column("failures", _NUMBER, nullable=False),
        sa.Column("losses", _NUMBER, nullable=False),
        sa.Column("request_id", _TEXT),
        sa.Column("worker", _TEXT),
        sa.Column("claimed_us", _NUMBER),
        sa.Column("lease_s", sa.Double),
        sa.Column("lease_us", _NUMBER),
        sa.Column("run_id", _TEXT),
        sa.Column("objective_values", _TEXT),
        sa.Column("constraint_values", _TEXT),
        sa.Column("step", _NUMBER),
        sa.Column("reason", _TEXT),
        sa.Column("settled_us", _NUMBER),
        sqlite_with_rowid=False,
    )
    op.create_index("trial_by_state", "trial", ["sweep_id", "state", "number"])
    op.create_index("trial_by_key", "trial", ["sweep_id", "added_key"])
    op.create_index("trial_by_request", "trial", ["sweep_id", "request_id"], unique=True)


def _add_logs() -> None:
    op.create_table(
        "log",
        # PostgreSQL must make no sequence of it.
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("name", _TEXT, nullable=False, unique=True),
        sa.Column("count", _NUMBER, nullable=False),
    )
    op.create_table(
        "entry",
        sa.Column("log_pk", _NUMBER, sa.ForeignKey("log.pk"), primary_key=True),
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("text", _TEXT, nullable=False),
        sa.Column("request_id", _TEXT),
        sa.Column("appended", _NUMBER),
        sa.UniqueConstraint("log_pk", "request_id"),
    )


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")
