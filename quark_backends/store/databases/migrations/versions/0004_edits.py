"""What is said of a run from elsewhere: that it is archived, and that it shall stop.

Adds two columns, which runs that are there have not, and makes the indexes of lists anew with
one of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError

revision = "0004"
down_revision = "0003"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the columns, and what hides a run to the indexes that lists need."""
    op.add_column("run", sa.Column("archived_us", _NUMBER))
    op.add_column("run", sa.Column("stop", _TEXT))
    for name, columns in (
        ("run_by_creation", ["created_us"]),
        ("run_by_project", ["project_id", "created_us"]),
        ("run_by_store", ["store_name", "created_us"]),
    ):
        op.drop_index(name, "run")
        op.create_index(name, "run", [*columns, "trashed_us", "archived_us"])


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")
