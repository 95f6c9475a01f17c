"""The store of `tests/quark_backends/store`, in PostgreSQL: what these say must hold there too."""

from pathlib import Path
from types import SimpleNamespace

from stores import Store, list_tables

from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.writing.ingest import BatchIngest


class PostgresStore(Store):
    """A store with one run in a schema, which is emptied first."""

    def __init__(self, database, run_id="run0"):
        self.database = database
        self.storage_dir = Path("/runs")
        self.layout = SimpleNamespace(run_path=lambda run_id: self.storage_dir / run_id)
        self.connection = self.connect()
        empty_tables(self.connection)
        self.ingest = BatchIngest(self.connection)
        self.reader = StoreReader(self.connect_reader)
        self.run_id = run_id
        self.attempt = -1
        self.writers = {}
        self.writer = self.start()

    def connect(self):
        return self.database.connect()

    def connect_reader(self):
        return self.database.connect()


def empty_tables(connection):
    connection.begin_write()
    for table in reversed(list_tables()):
        connection.execute(f"DELETE FROM {table}")
    connection.commit()
