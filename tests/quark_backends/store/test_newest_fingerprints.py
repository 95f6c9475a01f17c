"""The newest fingerprint of each subject and key, over ranks, attempts, batches and chunks."""

import json

import pytest

from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_backends.store.upkeep.compaction import Compactor, Work
from quark_backends.store.writing.ingest import BatchIngest
from quark_backends.store.writing.summaries import rebuild_fingerprints
from quark_core.backends.stored_batches import describe_run
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.testing.fakes import BatchMaker

RUN = "run0"


class Store:
    def __init__(self, root):
        self.connection = connect(ensure_store(root))
        self.ingest = BatchIngest(self.connection)
        self.batches = []

    def write(self, *batches):
        self.batches += batches
        self.ingest.write(list(batches))

    def fingerprints(self):
        rows = self.connection.execute(
            "SELECT subject, key, digest, step, sketch FROM run_fingerprint ORDER BY subject, key"
        )
        return {(row[0], row[1]): tuple(row[2:]) for row in rows.fetchall()}

    def code_digest(self):
        return self.connection.execute("SELECT code_digest FROM run").fetchone()[0]


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    yield made
    made.connection.close()


def fingerprints(maker, *given):
    records = [
        FingerprintRecord(*maker._head("fingerprint"), subject, key, digest, "full", step, sketch)
        for subject, key, digest, step, sketch in given
    ]
    return maker.batch(records)


def test_of_one_writer_the_last_one_counts(store):
    maker = BatchMaker(RUN)
    store.write(maker.start())
    sketch = JsonObject({"mean": 0.5})
    store.write(
        fingerprints(
            maker,
            ("data", "train", "d1", None, None),
            ("output", "p", "o1", 1, sketch),
            ("output", "p", "o2", 2, sketch),
        )
    )
    store.write(fingerprints(maker, ("code", "sources", "c1", None, None)))
    assert store.fingerprints() == {
        ("code", "sources"): ("c1", None, None),
        ("data", "train"): ("d1", None, None),
        ("output", "p"): ("o2", 2, json.dumps({"mean": 0.5})),
    }
    store.write(fingerprints(maker, ("code", "sources", "c2", None, None)))
    assert store.code_digest() == "c2"
    assert describe_run(store.batches).digests.code == "c2"


@pytest.mark.parametrize("first", [0, 1])
def test_of_ranks_the_lowest_counts_whichever_comes_first(store, first):
    store.write(BatchMaker(RUN).start())
    for rank in (first, 1 - first):
        maker = BatchMaker(RUN, writer_id=f"rank{rank}", rank=rank)
        store.write(fingerprints(maker, ("code", "sources", f"c{rank}", None, None)))
    assert store.code_digest() == "c0"
    assert describe_run(store.batches).digests.code == "c0"


@pytest.mark.parametrize("compacted", [False, True])
def test_what_a_resumed_run_hides_counts_no_more(store, compacted):
    maker = BatchMaker(RUN)
    store.write(maker.start())
    for step in range(40):
        store.write(
            fingerprints(
                maker,
                ("output", "p", f"o{step}", step, JsonObject({"n": step})),
                ("data", "train", "d1", None, None),
            )
        )
    before = store.fingerprints()
    if compacted:
        compactor = Compactor(store.connection)
        while compactor.compact(Work(1, "fingerprint", 40)):
            pass
        kinds = store.connection.execute("SELECT DISTINCT kind FROM chunk").fetchall()
        assert ("fingerprint",) in kinds
    rebuild_fingerprints(store.connection, 1)
    assert store.fingerprints() == before
    second = BatchMaker(RUN, writer_id="second", attempt=1)
    store.write(second.start(from_step=10))
    assert store.fingerprints()["output", "p"] == ("o9", 9, json.dumps({"n": 9}))
    store.write(fingerprints(second, ("output", "p", "late", 10, None)))
    assert store.fingerprints()["output", "p"] == ("late", 10, None)
    # What comes late of the first attempt changes nothing.
    store.write(fingerprints(maker, ("output", "p", "hidden", 41, None)))
    assert store.fingerprints()["output", "p"] == ("late", 10, None)
