"""The tables of the first version: projects, runs, writers and batches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Make the tables in an empty database; a store of version 1 has them."""
    op.create_table(
        "project",
        sa.Column("id", _TEXT, primary_key=True),
        sa.Column("name", _TEXT, nullable=False, unique=True),
        sa.Column("root_path", _TEXT, nullable=False),
        sa.Column("created_us", _NUMBER, nullable=False),
        sa.Column("updated_us", _NUMBER, nullable=False),
    )
    op.create_table(
        "run",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("id", _TEXT, nullable=False, unique=True),
        sa.Column("project_id", _TEXT, sa.ForeignKey("project.id"), nullable=False),
        sa.Column("name", _TEXT),
        sa.Column("notes", _TEXT),
        sa.Column("status", _TEXT, nullable=False),
        sa.Column("attempt", _NUMBER, nullable=False),
        sa.Column("parent_run_id", _TEXT),
        sa.Column("lineage_root_run_id", _TEXT),
        sa.Column("run_path", _TEXT, nullable=False),
        sa.Column("git_commit", _TEXT),
        sa.Column("strict_mode", _NUMBER, nullable=False),
        sa.Column("tags", _TEXT, nullable=False),
        sa.Column("process", _TEXT, nullable=False),
        sa.Column("config", _TEXT),
        sa.Column("environment", _TEXT),
        sa.Column("created_us", _NUMBER, nullable=False),
        sa.Column("updated_us", _NUMBER, nullable=False),
        sa.Column("ended_us", _NUMBER),
        sa.Column("heartbeat_us", _NUMBER, nullable=False),
    )
    op.create_index("run_by_creation", "run", [sa.text("created_us DESC")])
    op.create_index("run_by_project", "run", ["project_id", sa.text("created_us DESC")])
    op.create_table(
        "writer",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("run_pk", _NUMBER, sa.ForeignKey("run.pk"), nullable=False),
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("attempt", _NUMBER, nullable=False),
        sa.Column("rank", _NUMBER, nullable=False),
        sa.Column("started_us", _NUMBER, nullable=False),
        sa.Column("head", _NUMBER, nullable=False),
        sa.UniqueConstraint("run_pk", "id"),
    )
    op.create_table(
        "batch",
        sa.Column("pk", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("writer_pk", _NUMBER, sa.ForeignKey("writer.pk"), nullable=False),
        sa.Column("kind", _TEXT, nullable=False),
        sa.Column("number", _NUMBER, nullable=False),
        sa.Column("count", _NUMBER, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("writer_pk", "kind", "number"),
    )


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")
