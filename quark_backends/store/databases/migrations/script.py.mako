"""${message}."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """What this version adds; see docs/reference/migrations.md for what it may not do."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")
