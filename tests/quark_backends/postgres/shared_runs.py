"""Runs that are written through a `RunStore`, by whoever wants to."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

from stores import Store

from quark_backends.store.databases.sqlite import ensure_store
from quark_backends.store.run_store import PostgresRunStore, SqliteRunStore


class StoredRun(Store):
    """A run of a `RunStore`; `write` may be replaced by what delivers batches otherwise."""

    def __init__(self, run_store, run_id="run0", *, write=None, attempt=-1):
        self.run_store = self.reader = run_store
        self.ingest = SimpleNamespace(write=write or run_store.write_group)
        self.storage_dir = Path("/runs")
        self.layout = SimpleNamespace(run_path=lambda run_id: self.storage_dir / run_id)
        self.run_id = run_id
        self.attempt = attempt


@contextlib.contextmanager
def open_over_sqlite(folder):
    with contextlib.closing(SqliteRunStore(ensure_store(folder))) as store:
        yield store


@contextlib.contextmanager
def open_over_postgres(database):
    with contextlib.closing(PostgresRunStore(database)) as store:
        yield store
