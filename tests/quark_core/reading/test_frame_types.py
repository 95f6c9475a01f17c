"""Columns become tables of pandas, Polars and Arrow, and nothing is lost on the way."""

import datetime
import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_core.records import RECORD_TYPES, LayerSummaryRecord, MetricRecord
from quark_core.records.columns import Columns, table_fields
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.records.schema import CURRENT_SCHEMA_VERSION

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
LIBRARIES = ("arrow", "pandas", "polars")


def list_rows(columns, library):
    """Rows of a table as dicts of plain values, read with the library's own means."""
    if library == "arrow":
        return columns.to_arrow().to_pylist()
    if library == "polars":
        return columns.to_polars().to_dicts()
    frame = columns.to_pandas()
    lists = []
    for name in frame:
        series = frame[name]
        if isinstance(series.dtype, (pd.Int64Dtype, pd.Float64Dtype)):
            values, nulls = series.array._data.tolist(), series.isna().tolist()
            # pandas counts NaN as missing in isna(); the mask alone tells them apart.
            nulls = series.array._mask.tolist()
            lists.append([None if null else v for v, null in zip(values, nulls, strict=True)])
        else:
            lists.append(series.tolist())
    return [dict(zip(frame, row, strict=True)) for row in zip(*lists, strict=True)]


def same(left, right):
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return type(left) is type(right) and left == right


def check_rows(rows, records):
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        assert list(row) == [
            "timestamp" if name == "time_us" else name for name in record.__struct_fields__
        ]
        for field in table_fields(record.KIND):
            found, value = row[field.name], getattr(record, field.source)
            if field.encoding == "u":
                assert (found - EPOCH) // datetime.timedelta(microseconds=1) == value
                assert found.utcoffset() == datetime.timedelta()
            elif field.encoding == "j":
                found = json.loads(found) if isinstance(found, str) else found
                assert found == (None if value is None else dict(value)), field
            elif field.encoding == "l":
                assert (None if found is None else tuple(found)) == value
            else:
                assert same(found, value), (field, found, value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_field_comes_back(records, library):
    columns = Columns.from_records(records[0].KIND, records)
    check_rows(list_rows(columns, library), records)


@pytest.mark.parametrize("library", LIBRARIES)
def test_parts_and_slices_convert_like_the_whole(records, library):
    kind = records[0].KIND
    columns = Columns.concatenate(
        kind, [Columns.from_records(kind, records[:2]), Columns.from_records(kind, records[2:])]
    )
    check_rows(list_rows(columns.take(slice(1, None)), library), records[1:])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_no_rows_have_the_same_types_as_rows(kind, library, all_records):
    empty = getattr(Columns.empty(kind), f"to_{library}")()
    assert len(empty) == 0
    some = [record for record in all_records if kind == record.KIND]
    if some:
        full = getattr(Columns.from_records(kind, some), f"to_{library}")()
        if library == "arrow":
            assert empty.schema.equals(full.schema, check_metadata=True)
        elif library == "polars":
            assert empty.schema == full.schema
        else:
            assert empty.dtypes.equals(full.dtypes)


def test_columns_that_are_all_none_keep_their_types():
    record = LayerSummaryRecord("r", "w", 0, 0, 0, 0, "m", "t", "gradient", "backward", 0, 1)
    columns = Columns.from_records("layer", [record, record])
    table = columns.to_arrow()
    for name, kind in (("step", pa.int64()), ("mean", pa.float64()), ("metadata", pa.string())):
        assert table.schema.field(name).type == kind
        assert table[name].null_count == 2
    assert table["tensor_shape"].type == pa.list_(pa.int64())
    assert columns.to_pandas()["step"].dtype == "Int64"
    assert columns.to_pandas()["mean"].isna().all()
    frame = columns.to_polars()
    assert frame.schema["tensor_shape"] == pl.List(pl.Int64)
    assert frame.null_count()["std"].item() == 2


def test_types_of_metrics(all_records):
    columns = Columns.from_records("metric", [r for r in all_records if r.KIND == "metric"])
    schema = columns.to_arrow().schema
    version = str(CURRENT_SCHEMA_VERSION).encode()
    assert schema.metadata == {b"quark.kind": b"metric", b"quark.schema_version": version}
    text = pa.dictionary(pa.int32(), pa.string())
    assert schema.field("metric_key") == pa.field("metric_key", text, nullable=False)
    assert schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert schema.field("step") == pa.field("step", pa.int64())
    assert schema.field("value") == pa.field("value", pa.float64(), nullable=False)
    assert schema.field("metadata").metadata == {b"quark.encoding": b"json"}
    assert "finite" not in schema.names
    dtypes = columns.to_pandas().dtypes.astype(str)
    assert dtypes[["timestamp", "step", "epoch", "value", "sequence", "metric_key"]].tolist() == [
        "datetime64[us, UTC]",
        "Int64",
        "Int64",
        "float64",
        "int64",
        "object",
    ]
    assert columns.to_polars().schema["timestamp"] == pl.Datetime("us", "UTC")


def test_json_is_canonical_text():
    one = JsonObject({"b": [1, 2], "a": {"ü": None}})
    other = JsonObject({"a": {"ü": None}, "b": [1, 2]})
    records = [
        MetricRecord("r", "w", 0, 0, 0, 0, "m", None, "m", 1.0, 0, metadata=value)
        for value in (one, other)
    ]
    columns = Columns.from_records("metric", records)
    texts = columns.to_arrow()["metadata"].to_pylist()
    assert texts == ['{"a":{"ü":null},"b":[1,2]}'] * 2
    assert columns.to_polars()["metadata"].to_list() == texts


def test_changing_a_table_changes_no_columns(all_records):
    columns = Columns.from_records("metric", [r for r in all_records if r.KIND == "metric"])
    before = columns.to_records()
    frame = columns.to_pandas()
    frame.loc[:, "value"] = 7.0
    frame.loc[:, "step"] = 7
    frame.loc[:, "metric_key"] = "other"
    frame["metadata"].iloc[0]["b"] = "changed"
    table = columns.to_polars()
    table[0, "value"] = 9.0
    arrow = columns.to_arrow()
    held = arrow["value"].chunk(0).to_numpy(zero_copy_only=True)
    assert not np.shares_memory(held, columns["value"])
    for left, right in zip(columns.to_records(), before, strict=True):
        assert str(left) == str(right)


finite_or_not = st.none() | st.floats()
counters = st.none() | st.integers(0, 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
layers = st.builds(
    LayerSummaryRecord,
    run_id=st.none() | texts,
    writer_id=texts,
    attempt=st.integers(0, 9),
    rank=st.integers(0, 9),
    sequence=st.integers(0, 2**62),
    time_us=st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
    module_name=texts,
    module_type=texts,
    summary_type=st.just("activation"),
    hook_direction=st.just("forward"),
    call_index=st.integers(0, 3),
    element_count=st.integers(0, 2**40),
    step=counters,
    epoch=counters,
    tensor_shape=st.none() | st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    mean=finite_or_not,
    std=finite_or_not,
    metadata=st.none() | st.dictionaries(texts, json_values, max_size=2).map(JsonObject),
)


@pytest.mark.long
@given(st.lists(layers, max_size=5))
def test_any_rows_come_back(rows):
    columns = Columns.from_records("layer", rows)
    for library in LIBRARIES:
        check_rows(list_rows(columns, library), rows)


@pytest.mark.filterwarnings("ignore:metric 'größe':RuntimeWarning")
def test_what_a_store_gives_back_converts_too(session, all_records):
    session.write(r for r in all_records if r.KIND != "event")
    for kind in ("metric", "layer"):
        columns = session.open_run.read(kind, Query())
        written = [r for r in all_records if kind == r.KIND]
        stored = columns.to_records()
        assert [r.time_us for r in stored] == [r.time_us for r in written]
        for library in LIBRARIES:
            check_rows(list_rows(columns, library), stored)


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from quark_core.records.columns import Columns
from quark_core.errors import QuarkError
from quark_core.records import EventRecord, MetricRecord
columns = Columns.from_records("metric", [
    MetricRecord("r", "w", 0, 0, 0, 0, "m", None, "m", 1.0, 0),
    MetricRecord("r", "w", 0, 0, 1, 0, "m", None, "m", 1.0, None, 2),
])
try:
    print(len(columns.{call}()))
except ImportError as error:
    assert isinstance(error, QuarkError)
    print(error, "|", error.name)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("call", "blocked", "printed"),
    [
        (
            "to_pandas",
            ["pandas"],
            'to_pandas() needs pandas, which is not installed: pip install "quark-tracker[pandas]"'
            " | pandas",
        ),
        (
            "to_polars",
            ["polars"],
            'to_polars() needs polars, which is not installed: pip install "quark-tracker[polars]"'
            " | polars",
        ),
        (
            "to_arrow",
            ["pyarrow"],
            'to_arrow() needs pyarrow, which is not installed: pip install "quark-tracker[arrow]"'
            " | pyarrow",
        ),
        ("to_pandas", ["pyarrow", "polars"], "2"),
        ("to_polars", ["pyarrow", "pandas"], "2"),
        ("to_arrow", ["pandas", "polars"], "2"),
    ],
)
def test_each_library_is_needed_by_its_own_call_alone(call, blocked, printed):
    program = BLOCKED.format(call=call, blocked=blocked)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (printed, "")
