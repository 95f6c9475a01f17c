"""Stores to put batches into, without a session in front of them."""

import contextlib
import itertools

import msgspec

from quark_backends.store.databases.sqlite import connect, connect_memory, ensure_store
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.upkeep.compaction import Compactor
from quark_backends.store.writing.ingest import BatchIngest
from quark_core.backends.contract import Batch
from quark_core.records import LayerSummaryRecord, LifecycleRecord, MetricRecord
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.names import split_name
from quark_core.system.process import current_process

START_US = 1_767_225_600_000_000


def list_tables():
    """Names of all tables; none refers to one behind it."""
    with contextlib.closing(connect_memory()) as memory:
        rows = memory.execute(
            "SELECT name FROM sqlite_master "
            "WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        )
        return [name for (name,) in rows]


class Store:
    """An embedded store with one run, written to and compacted by hand."""

    def __init__(self, storage_dir, run_id="run0", *, begins=True):
        self.storage_dir = storage_dir
        self.layout = ensure_store(storage_dir)
        self.connection = self.connect()
        self.ingest = BatchIngest(self.connection)
        self.reader = StoreReader(self.connect_reader)
        self.run_id = run_id
        self.attempt = -1
        self.writers = {}
        self.writer = self.start() if begins else None

    def connect(self):
        """A connection that writes."""
        return connect(self.layout)

    def connect_reader(self):
        """A connection that reads."""
        return connect(self.layout, read_only=True)

    def start(self, *, from_step=None, **run):
        """Begin the next attempt; returns its writer."""
        self.attempt += 1
        return self.begin(self.attempt, from_step=from_step, **run)

    def begin(self, attempt, *, from_step=None, offline=None, trial=None, writer=None, **run):
        """Begin any attempt, as one of a new writer by default; returns its writer."""
        writer = Writer(self, attempt) if writer is None else writer
        data = {
            "project": {"id": "p0", "name": "project", "root_path": str(self.storage_dir)},
            "run": {
                "name": None,
                "notes": None,
                "parent_run_id": None,
                "lineage_root_run_id": self.run_id,
                "run_path": str(self.layout.run_path(self.run_id)),
                "git_commit": None,
                "strict_mode": False,
                "tags": [],
                **run,
            },
            "process": msgspec.to_builtins(current_process()),
            "from_step": from_step,
            "offline": offline,
            "trial": trial,
        }
        writer.lifecycle("start", data)
        return writer

    def compact(self, *, codec=None, minimum=1):
        """Compact all there is; returns how many turns it took."""
        compactor = Compactor(self.connection, codec=codec)
        turns = 0
        stuck = set()
        while work := [w for w in compactor.find_work(minimum=minimum) if w not in stuck]:
            for item in work:
                if compactor.compact(item) == 0:
                    stuck.add(item)
                turns += 1
        return turns

    def count(self, table):
        return self.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    def close(self):
        self.reader.close()
        self.connection.close()


class Writer:
    """One process's stream into the store's run."""

    _ids = itertools.count()

    def __init__(self, store, attempt, rank=0):
        self.store, self.attempt, self.rank = store, attempt, rank
        self.id = f"w{next(self._ids):08x}"
        self.number = 0
        self.sequences = {}
        self.batches = []

    def head(self, kind, time_us=None, sequence=None):
        if sequence is None:
            sequence = self.sequences.get(kind, 0)
            self.sequences[kind] = sequence + 1
        time_us = START_US + 1000 * sequence if time_us is None else time_us
        return (self.store.run_id, self.id, self.attempt, self.rank, sequence, time_us)

    def lifecycle(self, action, data=None):
        data = None if data is None else JsonObject(data)
        self.write([LifecycleRecord(*self.head("lifecycle"), action, data)])

    def metric(self, key, value, step=None, epoch=None, **fields):
        sequence, time_us = fields.pop("sequence", None), fields.pop("time_us", None)
        namespace, name = split_name(key)
        head = self.head("metric", time_us, sequence)
        return MetricRecord(*head, key, namespace, name, value, step, epoch, **fields)

    def layer(self, module, step, **fields):
        head = self.head("layer")
        return LayerSummaryRecord(
            *head, module, "Linear", "activation", "forward", 0, 64, step, **fields
        )

    def log(self, *points):
        """One batch of metrics: (key, value, step), each."""
        return self.write([self.metric(*point) for point in points])

    def batch(self, records):
        batch = Batch(
            self.store.run_id,
            self.id,
            self.attempt,
            self.rank,
            self.number,
            records[0].KIND,
            len(records),
            encode_records(records),
        )
        self.number += 1
        return batch

    def write(self, records):
        self.batches.append(self.batch(records))
        self.store.ingest.write(self.batches[-1:])
        return records
