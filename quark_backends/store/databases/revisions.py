"""Runs the migrations of `migrations/` over a connection of SQLAlchemy, to either database."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection


@contextmanager
def alembic_lock() -> Iterator[None]:
    """Around a transaction that migrates: Alembic keeps what it works on in globals."""
    with _lock:
        yield


def upgrade_tables(core: Connection, revision: str, *, stamped: str | None = None) -> None:
    """Bring the tables to a revision, inside the caller's transaction and `alembic_lock`.

    Args:
        core: The connection.
        revision: The revision.
        stamped: What a store has that does not say it; None where such a one is empty.
    """
    # It tells each of its steps at INFO; one line about a migration is enough.
    logger = logging.getLogger("alembic")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        from alembic import command
        from alembic.config import Config
        from sqlalchemy import inspect

        config = Config()
        config.attributes["connection"] = core
        place = str(Path(__file__).with_name("migrations"))
        # Alembic's options are read with interpolation.
        config.set_main_option("script_location", place.replace("%", "%%"))
        if stamped is not None and not inspect(core).has_table("alembic_version"):
            command.stamp(config, stamped)
        command.upgrade(config, revision)
    finally:
        logger.setLevel(level)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
# A fork copies a lock as it was held.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew_lock)
