"""The CSV mirror has records of every kind, exactly, in tables of their own."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import count_examples

import quark
from quark_backends.csv.backend import CsvBackend
from quark_backends.csv.files import AppendOnlyTable, encode_rows, find_form
from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.errors import BackendRejected
from quark_core.records import RECORD_TYPES, MetricRecord, Record
from quark_core.records.codec import decode_body, encode_records
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import split_name
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

ALL = Query(all_attempts=True)
STREAM_KINDS = sorted(set(RECORD_TYPES) - {"lifecycle"})
NASTY = st.sampled_from(
    ["", '"', '""', '"""', ",", "\n", "\r", "\r\n", "\0", "a,b", 'a"b', " x ", "nan", "é\t两"]
)
TEXTS = NASTY | st.text(max_size=6)
JSON = st.dictionaries(
    TEXTS, st.none() | st.booleans() | st.integers() | st.floats() | TEXTS, max_size=3
).map(lambda values: normalize_object(values, "payload"))
PLAIN = {
    int: st.integers(0, 2**62),
    str: TEXTS,
    bool: st.booleans(),
    JsonObject: JSON,
}
FLOATS = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324])
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def values_of(annotation, floats=FLOATS):
    if get_origin(annotation) in (Union, UnionType):
        return st.one_of([values_of(option, floats) for option in get_args(annotation)])
    if annotation is type(None):
        return st.none()
    if get_origin(annotation) is tuple:
        return st.lists(values_of(get_args(annotation)[0], FINITE), max_size=3).map(tuple)
    if isinstance(annotation, type) and issubclass(annotation, Record):
        hints = get_type_hints(annotation)
        names = annotation.__struct_fields__
        return st.builds(annotation, **{name: values_of(hints[name], FINITE) for name in names})
    return floats if annotation is float else PLAIN[annotation]


def records_of(kind):
    hints = get_type_hints(RECORD_TYPES[kind])
    head = {"run_id": "run0", "writer_id": "writer0", "attempt": 0, "rank": 0, "sequence": 0}
    fields = {name: st.just(value) for name, value in head.items()}
    for name in RECORD_TYPES[kind].__struct_fields__:
        fields.setdefault(name, values_of(hints[name]))
    fields["time_us"] = st.integers(FIRST_TIME_US, FIRST_TIME_US + 10**12)
    if kind == "metric":
        keys = st.sampled_from(["m", "train/loss", "a/b/c"])
        return st.builds(make_metric, key=keys, **fields)
    return st.builds(RECORD_TYPES[kind], **fields)


def make_metric(key, **fields):
    namespace, name = split_name(key)
    return MetricRecord(
        **{**fields, "metric_key": key, "namespace": namespace, "metric_name": name}
    )


def number(records):
    return [msgspec.structs.replace(record, sequence=index) for index, record in enumerate(records)]


def same(found, expected):
    """Equal in every field, NaN and the sign of zero included."""
    return list(map(repr, found)) == list(map(repr, expected))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
@settings(max_examples=count_examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_rows_come_back_as_the_records_they_were(tmp_path_factory, kind, data):
    records = number(data.draw(st.lists(records_of(kind), min_size=1, max_size=4)))
    form = find_form(kind)
    rows = form.encode(decode_body(encode_records(records)), writer_id="writer0", attempt=0, rank=0)
    path = tmp_path_factory.mktemp("rows") / "table.csv"
    path.write_bytes(encode_rows([form.header, *rows]))
    # Any CSV reader finds the same rows.
    with path.open(newline="", encoding="utf-8") as file:
        plain = list(csv.DictReader(file))
    assert same([form.decode("run0", row) for row in plain], records)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", STREAM_KINDS)
@settings(max_examples=count_examples(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_mirror_reads_what_the_embedded_store_reads(tmp_path_factory, kind, data):
    records = number(data.draw(st.lists(records_of(kind), min_size=1, max_size=4)))
    root = tmp_path_factory.mktemp("both")
    config = BackendConfig(storage_dir=root, run_id="run0", location="out")
    (definition,) = quark_register_backends()
    store = definition.open(BackendConfig(storage_dir=root, run_id="run0", project="p"))
    mirror = CsvBackend(config)
    maker = BatchMaker("run0")
    batches = [maker.start(), maker.batch(records)]
    for batch in batches:
        store.write(batch)
        mirror.write(batch)
    expected = store.read("run0", kind, ALL).to_records()
    found = mirror.read("run0", kind, ALL).to_records()
    store.close()
    mirror.close()
    assert same(expected, records)
    assert same(found, expected)


@pytest.fixture
def config(tmp_path):
    return BackendConfig(storage_dir=tmp_path, run_id="run0", location="out")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "run0"


def test_a_cell_of_any_length_is_read(config):
    backend, maker = CsvBackend(config), BatchMaker("run0")
    text = "x" * 300_000
    backend.write(maker.start())
    backend.write(maker.events("long", payload=JsonObject({"text": text})))
    (record,) = backend.read("run0", "event", ALL).to_records()
    assert record.payload == {"text": text}
    backend.close()


def test_a_row_that_was_cut_anywhere_is_not_read(config, folder):
    backend, maker = CsvBackend(config), BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.events("first", status="ok"))
    whole = (folder / "events.csv").read_bytes()
    backend.write(maker.events("second", status='line\nof "two",\r\nand more'))
    longer = (folder / "events.csv").read_bytes()
    for end in range(len(whole), len(longer)):
        (folder / "events.csv").write_bytes(longer[:end])
        found = backend.read("run0", "event", ALL).to_records()
        assert [record.event_type for record in found] == ["first"], longer[len(whole) : end]
    backend.close()


def test_a_time_that_no_calendar_has_is_refused(config):
    backend, maker = CsvBackend(config), BatchMaker("run0", started_us=-(2**60))
    with pytest.raises(BackendRejected):
        backend.write(maker.events("early"))
    backend.close()


def narrow(path, dropped):
    """Take a column out of a table, as an older version of Quark would have written it."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    place = rows[0].index(dropped)
    path.write_bytes(encode_rows([*row[:place], *row[place + 1 :]] for row in rows))


def make_older(config, folder):
    backend, maker = CsvBackend(config), BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.events("first", status="ok", payload=JsonObject({"a": "b,c"})))
    backend.close()
    narrow(folder / "events.csv", "payload")
    state = json.loads((folder / "state.json").read_text())
    state["sizes_bytes"]["event"] = (folder / "events.csv").stat().st_size
    del state["widths"]["event"]
    (folder / "state.json").write_text(json.dumps(state))
    return maker


def test_a_table_of_an_older_version_is_given_its_columns(config, folder):
    maker = make_older(config, folder)
    backend = CsvBackend(config)
    assert backend.read("run0", "event", ALL).to_records()[0].payload is None
    backend.write(maker.events("second", payload=JsonObject({"a": 1})))
    found = backend.read("run0", "event", ALL).to_records()
    assert [(r.event_type, r.status, r.payload) for r in found] == [
        ("first", "ok", None),
        ("second", None, {"a": 1}),
    ]
    header = (folder / "events.csv").read_text().splitlines()[0].split(",")
    assert (sorted(header), header[-1]) == (sorted(find_form("event").header), "writer")
    backend.close()


KILLED = """
import os, pathlib, sys
from quark_backends.csv import backend as module, files
from quark_core.backends.contract import BackendConfig
from quark_core.testing.fakes import BatchMaker
config = BackendConfig(storage_dir=pathlib.Path(sys.argv[1]), run_id="run0", location="out")
left = int(sys.argv[2])
def dying(name, act):
    def step(*arguments):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return act(*arguments)
    return step
for name in ("replace", "ftruncate", "write", "fsync"):
    setattr(os, name, dying(name, getattr(os, name)))
maker = BatchMaker("run0")
maker.start(); maker.events("first")
module.CsvBackend(config).write(maker.events("second"))
os._exit(0)
"""


@pytest.mark.long
def test_a_table_survives_a_kill_at_every_step_of_being_widened(tmp_path):
    ended = False
    for step in range(1, 40):
        place = tmp_path / str(step)
        config = BackendConfig(storage_dir=place, run_id="run0", location="out")
        folder = place / "out" / "run0"
        make_older(config, folder)
        done = subprocess.run([sys.executable, "-c", KILLED, str(place), str(step)], check=False)
        again, maker = CsvBackend(config), BatchMaker("run0")
        maker.start()
        maker.events("first")
        again.write(maker.events("second"))
        again.write(maker.events("third"))
        found = again.read("run0", "event", ALL).to_records()
        assert [record.event_type for record in found] == ["first", "second", "third"], step
        again.close()
        if done.returncode == 0:
            ended = True
            break
        assert done.returncode == 9
    assert ended


def test_rows_go_to_the_columns_that_a_newer_version_has_added(tmp_path):
    path = tmp_path / "t.csv"
    table = AppendOnlyTable(path, ["a", "new", "b", "writer"])
    table.size_bytes = table.append([[1, 2, 3, "w"]])
    older = AppendOnlyTable(path, ["b", "a", "writer"])
    older.size_bytes, older.width = table.size_bytes, table.width
    assert not older.widen()
    older.append([[5, 4, "w"]])
    assert path.read_text() == "a,new,b,writer\n1,2,3,w\n4,,5,w\n"


def test_artifacts_have_their_payloads_as_files(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:out") as session:
        store = quark.ArtifactStore(session)
        text = store.store("note", "notes/first", "hello", step=3)
        table = store.log_table("eval/table", [[1, "a,b"], [None, 'q"']], columns=["n", "text"])
        empty = store.store("blob", "empty", b"")
        expected = store.read()
    folder = tmp_path / "out" / session.run_id
    for record in (text, table, empty):
        copy = folder / record.payload_relative_path
        original = Path(session.run_path) / record.payload_relative_path
        assert copy.read_bytes() == original.read_bytes()
        # Nobody writes to either, so that they share their place on the disk.
        assert os.path.samefile(copy, original)
        described = json.loads((folder / record.metadata_relative_path).read_text())
        assert described["sha256"] == record.sha256
    with (folder / "tables" / "eval" / "table.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["n", "text"], ["1", "a,b"], ["", 'q"']]
    mirrored = quark.open_run(session.run_id, tmp_path, backend="csv:out")
    found = quark.ArtifactStore(mirrored)
    assert found.read() == expected
    assert found.load(text.id) == "hello"


@pytest.mark.parametrize("path", ["../../escaped.json", "/tmp/escaped", "state.json", "a/../x"])
def test_a_path_in_a_record_cannot_lead_out_of_the_artifacts(config, folder, tmp_path, path):
    maker = BatchMaker("run0")
    backend = CsvBackend(config)
    backend.write(maker.start())
    before = set(tmp_path.rglob("*"))
    record = RECORD_TYPES["artifact"](
        *("run0", "writer0", 0, 0, 0, FIRST_TIME_US),
        *("t", "k", None, "k", "text", 1, "ab" * 32),
        payload_relative_path=path,
        metadata_relative_path=path,
    )
    backend.write(maker.batch([record]))
    assert set(tmp_path.rglob("*")) - before == {folder / "artifacts.csv"}
    backend.close()
