"""The store of `tests/store`, in PostgreSQL: what these tests say must hold there too."""

from pathlib import Path
from types import SimpleNamespace

from stores import Store

from quark_backends.store.ingest import BatchIngest
from quark_backends.store.reader import StoreReader
from quark_backends.store.tables import METADATA


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
        self.start()

    def connect(self):
        return self.database.connect()

    def connect_reader(self):
        return self.database.connect()


def empty_tables(connection):
    connection.begin_write()
    for table in reversed(METADATA.sorted_tables):
        connection.execute(f"DELETE FROM {table.name}")
    connection.commit()
