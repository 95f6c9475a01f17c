"""The tables of workspaces and keys, and how they came to be: one step for each version."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
)

__all__ = ["CONTROL_VERSION", "STEPS", "control_version", "key", "workspace"]

_METADATA = MetaData()
_Number = BigInteger().with_variant(Integer(), "sqlite")

control_version = Table("control_version", _METADATA, Column("version", _Number, nullable=False))

workspace = Table(
    "workspace",
    _METADATA,
    Column("name", Text, primary_key=True),
    Column("created_us", _Number, nullable=False),
)

key = Table(
    "api_key",
    _METADATA,
    Column("id", Text, primary_key=True),
    Column("workspace", Text, nullable=False),
    Column("name", Text, nullable=False),
    # SHA-256 of the secret, in hexadecimal: a secret of 32 random bytes needs no slower hash.
    Column("digest", Text, nullable=False),
    # Sorted, with commas between them.
    Column("scopes", Text, nullable=False),
    Column("created_us", _Number, nullable=False),
    Column("expires_us", _Number),
    Column("revoked_us", _Number),
    Column("last_used_us", _Number),
    Index("api_key_by_workspace", "workspace"),
)


def _make_first(connection: Connection) -> None:
    _METADATA.create_all(connection, [control_version, workspace, key])


STEPS: tuple[Callable[[Connection], None], ...] = (_make_first,)
"""Make version 1 of nothing, version 2 of version 1, and so on; they add, and take nothing away."""

CONTROL_VERSION = len(STEPS)
"""Version that this Quark knows."""
