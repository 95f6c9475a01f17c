"""The storage root that a run was started for, in a store that holds those of many.

Adds two columns and an index; runs that are there have neither.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError

revision = "0003"
down_revision = "0002"

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the columns and the index that lists need."""
    op.add_column("run", sa.Column("store_name", _TEXT))
    op.add_column("run", sa.Column("store_path", _TEXT))
    op.create_index("run_by_store", "run", ["store_name", "created_us", "trashed_us"])


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")
