"""Runs the migrations over the connection, and in the transaction, that it is handed."""

from __future__ import annotations

from alembic import context

from quark_backends.store.databases.tables import METADATA

# Alembic loads this file by its path, so it does its work when it is loaded.
context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
