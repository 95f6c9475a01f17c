"""A record that is none of its kind is set aside alone: its neighbours in the batch are read."""

import msgspec
import pytest

from quark_backends.store.batch_bodies import digest_body
from quark_backends.store.reading.reader import write_generation
from quark_backends.store.upkeep.compaction import Compactor
from quark_core.backends.contract import Generation
from quark_core.records import RECORD_TYPES, EventRecord
from quark_core.records.codec import Column, decode_body, encode_records
from quark_core.records.query import Query
from quark_core.records.schema import column_types
from quark_core.testing.fakes import make_samples

KINDS = [
    kind
    for kind in sorted(RECORD_TYPES)
    if "j" in column_types(kind).values() and kind != "lifecycle"
]


def damage(records, name, text):
    """The body of some records, of which the second has this text in a column of JSON."""
    body = decode_body(encode_records(records))
    columns = []
    for each in column_types(body.kind):
        column = body.column(each)
        if each == name:
            texts = [b"null" if column.head is None else column.head] * len(records)
            texts = list(column.head) if column.encoding == "j" else texts
            column = Column(each, "j", [texts[0], text, *texts[2:]])
        columns.append(column)
    return b"\x00" + msgspec.msgpack.encode([body.version, body.kind, body.count, columns])


def plant(store, writer_id, kind, body):
    """Store a batch of three records as an older version took it, without a look into it."""
    pk = store.connection.insert(
        "INSERT INTO writer (pk, run_pk, id, attempt, rank, started_us, head)"
        " VALUES (?, (SELECT pk FROM run), ?, 0, 0, 1, 0)",
        (writer_id,),
    )
    store.connection.insert(
        "INSERT INTO batch (pk, writer_pk, kind, number, count, digest, body)"
        " VALUES (?, ?, ?, 0, 3, ?, ?)",
        (pk, kind, digest_body(body), body),
    )


def make_records(kind, run_id):
    sample = make_samples(kind, run_id)[0]
    return [msgspec.structs.replace(sample, sequence=sequence) for sequence in range(3)]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [b"3", b"{", b'[{"a":9223372036854775808}]'], ids=repr)
def test_its_neighbours_are_read(store, caplog, kind, text):
    records = make_records(kind, store.run_id)
    names = [name for name, encoding in column_types(kind).items() if encoding == "j"]
    for number, name in enumerate(names):
        plant(store, f"other{number}", kind, damage(records, name, text))
    left = [0, 2] * len(names)
    rows = store.reader.read(store.run_id, kind, Query())
    assert [record.sequence for record in rows.to_records()] == left
    parts = store.reader.iterate(store.run_id, kind, Query(), rows=1_000)
    assert [record.sequence for part in parts for record in part.to_records()] == left
    found = store.reader.read(store.run_id, kind, Query(equals={"writer_id": "other0"}))
    assert found["sequence"].tolist() == [0, 2]
    changes = store.reader.read_changes(store.run_id, {}, kinds=[kind], max_rows=100)
    assert changes.records[kind]["sequence"].tolist() == left
    told = {text for text in caplog.messages if "its 1 records are omitted" in text}
    assert len(told) == len(names)


def test_outputs_beside_it_are_read(store, caplog):
    records = make_records(EventRecord.KIND, store.run_id)
    outputs = {EventRecord.KIND: records}
    write_generation(
        store.connection,
        Generation(run_id=store.run_id, analyzer="a", replaces=True, outputs=outputs),
    )
    store.connection.execute("UPDATE output SET body = ?", (damage(records, "payload", b"[1]"),))
    found = store.reader.read_outputs(store.run_id, "event")
    assert [record.sequence for record in found.to_records()] == [0, 2]
    assert "1 records are omitted" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_compaction_sets_it_aside_and_goes_on(store, caplog, kind):
    records = make_records(kind, store.run_id)
    name = next(name for name, encoding in column_types(kind).items() if encoding == "j")
    plant(store, "other", kind, damage(records, name, b"3"))
    for number in range(1, 4):
        later = [
            msgspec.structs.replace(each, sequence=3 * number + each.sequence) for each in records
        ]
        body = encode_records(later)
        store.connection.insert(
            "INSERT INTO batch (pk, writer_pk, kind, number, count, digest, body)"
            " VALUES (?, (SELECT pk FROM writer WHERE id = 'other'), ?, ?, 3, ?, ?)",
            (kind, number, digest_body(body), body),
        )
    compactor = Compactor(store.connection)
    (work,) = [each for each in compactor.find_work(minimum=4) if each.kind == kind]
    assert compactor.compact(work) == 4
    assert not [each for each in compactor.find_work(minimum=1) if each.kind == kind]
    found = store.reader.read(store.run_id, kind, Query(equals={"writer_id": "other"}))
    assert found["sequence"].tolist() == [0, *range(2, 12)]
    (row,) = store.connection.execute("SELECT source, number, count, body FROM damaged").fetchall()
    assert tuple(row[:3]) == ("batch", 0, 1)
    # All of it is kept as it was written.
    assert bytes(row[3]) == damage(records, name, b"3")
    assert "1 records are damaged and moved away" in caplog.text
