"""Where a run belongs and what it was made of: groups, fields, fingerprints and digests.

Adds tables and columns. Runs that are there get the digests of their configuration and
environment, and are in no group.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from quark_core.errors import SchemaMigrationError
from quark_core.records.runs import make_digests

revision = "0005"
down_revision = "0004"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_RUN: dict[str, sa.types.TypeEngine[Any]] = {
    "group_paths": _TEXT,
    "fields": _TEXT,
    "config_digest": _TEXT,
    "structure_digest": _TEXT,
    "code_digest": _TEXT,
    "environment_digest": _TEXT,
    "fork_run_id": _TEXT,
    "fork_step": _NUMBER,
    "progress": _TEXT,
}
_INDEXED = ("config_digest", "structure_digest", "code_digest", "environment_digest")
_AT_ONCE = 500


def upgrade() -> None:
    """Add the tables, the columns and their indexes, and fill in the digests."""
    for name in ("description", "fields", "tags"):
        op.add_column("project", sa.Column(name, _TEXT))
    for name, kind in _RUN.items():
        op.add_column("run", sa.Column(name, kind))
    for name in _INDEXED:
        op.create_index(f"run_by_{name}", "run", [name])
    _add_tables()
    _fill_digests()


def _add_tables() -> None:
    op.create_table(
        "run_field",
        sa.Column("run_pk", _NUMBER, sa.ForeignKey("run.pk"), primary_key=True),
        sa.Column("key", _TEXT, primary_key=True),
        sa.Column("type", _TEXT, nullable=False),
        sa.Column("number", sa.Double),
        sa.Column("text", _TEXT),
        sqlite_with_rowid=False,
    )
    op.create_index("run_field_by_key", "run_field", ["key"])
    op.create_table(
        "run_group",
        sa.Column("project_id", _TEXT, sa.ForeignKey("project.id"), primary_key=True),
        sa.Column("path", _TEXT, primary_key=True),
        sa.Column("description", _TEXT),
        sa.Column("fields", _TEXT),
        sa.Column("tags", _TEXT),
        sa.Column("created_us", _NUMBER, nullable=False),
        sa.Column("updated_us", _NUMBER, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "run_group_member",
        sa.Column("run_pk", _NUMBER, sa.ForeignKey("run.pk"), primary_key=True),
        sa.Column("path", _TEXT, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("run_group_member_by_path", "run_group_member", ["path"])
    op.create_table(
        "run_fingerprint",
        sa.Column("run_pk", _NUMBER, sa.ForeignKey("run.pk"), primary_key=True),
        sa.Column("subject", _TEXT, primary_key=True),
        sa.Column("key", _TEXT, primary_key=True),
        sa.Column("digest", _TEXT, nullable=False),
        sa.Column("level", _TEXT, nullable=False),
        sa.Column("step", _NUMBER),
        sa.Column("sketch", _TEXT),
        sa.Column("attempt", _NUMBER, nullable=False),
        sa.Column("rank", _NUMBER, nullable=False),
        sa.Column("time_us", _NUMBER, nullable=False),
        sa.Column("sequence", _NUMBER, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("run_fingerprint_by_digest", "run_fingerprint", ["digest"])
    op.create_index("run_fingerprint_by_key", "run_fingerprint", ["key"])


def _fill_digests() -> None:
    bind = op.get_bind()
    run = sa.table("run", *(sa.column(name) for name in ("pk", "config", "environment", *_INDEXED)))
    pks = list(bind.scalars(sa.select(run.c.pk).order_by(run.c.pk)))
    update = (
        sa.update(run)
        .where(run.c.pk == sa.bindparam("run"))
        .values({name: sa.bindparam(f"new_{name}") for name in _INDEXED if name != "code_digest"})
    )
    for start in range(0, len(pks), _AT_ONCE):
        part = pks[start : start + _AT_ONCE]
        rows = bind.execute(
            sa.select(run.c.pk, run.c.config, run.c.environment).where(run.c.pk.in_(part))
        ).all()
        values = [_digest(*row) for row in rows]
        if values:
            bind.execute(update, values)


def _digest(pk: int, config: str | None, environment: str | None) -> dict[str, object]:
    found = make_digests(
        None if config is None else json.loads(config)["values"],
        None if environment is None else json.loads(environment),
    )
    return {
        "run": pk,
        "new_config_digest": found.config,
        "new_structure_digest": found.structure,
        "new_environment_digest": found.environment,
    }


def downgrade() -> None:
    """A store is never taken back: an older Quark could not keep what this one knows."""
    raise SchemaMigrationError("a store is not taken back to an older version")
