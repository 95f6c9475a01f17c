"""log_table: columns and rows of every kind come back as the same table."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import quark

MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)


@pytest.fixture
def tabulate(artifacts, session):
    """Log a table, and return its columns and rows as they are read back."""

    def log(data, **arguments):
        record = artifacts.log_table("t", data, **arguments)
        table = artifacts.load(record)
        assert list(table) == ["columns", "rows"]
        assert (record.artifact_type, record.payload_format) == ("table", "json")
        said = dict(record.metadata)
        assert len(said.pop("column_types")) == len(table["columns"])
        assert said == {
            "media_type": "application/json",
            "rows": len(table["rows"]),
            "columns": len(table["columns"]),
        }
        assert record.payload_relative_path.endswith(".json")
        return table["columns"], table["rows"]

    return log


@pytest.mark.sampled
@pytest.mark.parametrize(
    "rows",
    [
        [[1, "x"], [2, "y"]],
        [(1, "x"), (2, "y")],
        ([n, c] for n, c in ((1, "x"), (2, "y"))),
        np.array([[1, "x"], [2, "y"]], dtype=object),
        [np.array([1, "x"], dtype=object), [2, "y"]],
        [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
        {"a": [1, 2], "b": ["x", "y"]},
        {"a": np.array([1, 2]), "b": pd.Series(["x", "y"])},
        {"a": torch.tensor([1, 2]), "b": pl.Series(["x", "y"])},
        {"a": range(1, 3), "b": iter("xy")},
        pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}, index=[7, 8]),
        pl.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
        pa.table({"a": [1, 2], "b": ["x", "y"]}),
        pa.RecordBatch.from_pydict({"a": [1, 2], "b": ["x", "y"]}),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_tables_of_all_kinds(tabulate, rows):
    assert tabulate(rows, columns=["a", "b"]) == (["a", "b"], [[1, "x"], [2, "y"]])


@pytest.mark.parametrize(
    "table",
    [
        {"a": [1], "b": [2], "c": [3]},
        [{"a": 1, "b": 2, "c": 3}],
        pd.DataFrame({"a": [1], "b": [2], "c": [3]}),
        pl.DataFrame({"a": [1], "b": [2], "c": [3]}),
        pa.table({"a": [1], "b": [2], "c": [3]}),
    ],
    ids=lambda table: type(table).__name__,
)
def test_columns_of_a_table_may_be_chosen(tabulate, artifacts, table):
    assert tabulate(table) == (["a", "b", "c"], [[1, 2, 3]])
    assert tabulate(table, columns=["c", "a"]) == (["c", "a"], [[3, 1]])
    assert tabulate(table, columns=("b",)) == (["b"], [[2]])
    assert tabulate(table, columns=[]) == ([], [[]])
    with pytest.raises(quark.SchemaValidationError, match=r"^columns: 'x' is not a column"):
        artifacts.log_table("t", table, columns=["a", "x"])
    with pytest.raises(quark.SchemaValidationError, match=r"^columns contains 'a' twice"):
        artifacts.log_table("t", table, columns=["a", "a"])


def test_missing_keys_become_none(tabulate):
    rows = [{"a": 1}, {"b": 2}, {}, {"c": None, "a": 3}]
    assert tabulate(rows) == (
        ["a", "b", "c"],
        [[1, None, None], [None, 2, None], [None] * 3, [3, None, None]],
    )


def test_what_is_missing_in_pandas_becomes_none(tabulate):
    frame = pd.DataFrame(
        {
            "float": [0.5, np.nan, np.inf],
            "when": pd.to_datetime(["2026-01-02", None, "2026-01-03T04:05:06.5"], format="ISO8601"),
            "zone": pd.to_datetime(["2026-01-02", None, None]).tz_localize("UTC"),
            "kind": pd.Categorical(["x", None, "y"]),
            "Int64": pd.array([1, None, 2**60], dtype="Int64"),
            "boolean": pd.array([True, None, False], dtype="boolean"),
            "string": pd.array(["s", None, ""], dtype="string"),
            "object": [None, [1, 2], {"k": 1.5}],
        }
    )
    columns, rows = tabulate(frame)
    assert columns == list(frame.columns)
    assert rows == [
        [0.5, "2026-01-02T00:00:00", "2026-01-02T00:00:00+00:00", "x", 1, True, "s", None],
        [None, None, None, None, None, None, None, [1, 2]],
        ["Infinity", "2026-01-03T04:05:06.500000", None, "y", 2**60, False, "", {"k": 1.5}],
    ]


def test_names_of_pandas_that_are_no_texts(tabulate, artifacts):
    assert tabulate(pd.DataFrame([[1, 2]])) == (["0", "1"], [[1, 2]])
    deep = pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "x"), ("a", "y")]))
    assert tabulate(deep) == (["('a', 'x')", "('a', 'y')"], [[1, 2]])
    assert tabulate({1: [1], 2: [2]}) == (["1", "2"], [[1, 2]])


def test_values_of_polars_and_arrow(tabulate):
    columns = {
        "when": [MOMENT, None],
        "day": [MOMENT.date(), None],
        "time": [MOMENT.time(), None],
        "money": [Decimal("1.50"), None],
        "list": [[1, 2], None],
        "float": [float("nan"), None],
        "flag": [True, None],
    }
    expected = [
        [MOMENT.isoformat(), "2026-01-02", "03:04:05.000678", "1.50", [1, 2], "NaN", True],
        [None] * 7,
    ]
    for table in (pl.DataFrame(columns), pa.table(columns), columns):
        assert tabulate(table) == (list(columns), expected)


def test_values_of_plain_rows(tabulate):
    values = [None, True, 2**63 - 1, 2**70, -0.5, float("-inf"), "\ud800", np.float32(0.5)]
    values += [torch.tensor(3), {"a": (1, 2)}, "2026", MOMENT.date()]
    expected = [None, True, 2**63 - 1, str(2**70), -0.5, "-Infinity", "?", 0.5]
    expected += [3, {"a": [1, 2]}, "2026", "2026-01-02"]
    names = [f"c{index}" for index in range(len(values))]
    assert tabulate([values], columns=names) == (names, [expected])


@pytest.mark.parametrize(
    ("data", "columns", "expected"),
    [
        ([], ["a"], (["a"], [])),
        ({}, None, ([], [])),
        ({"a": []}, None, (["a"], [])),
        (pd.DataFrame(), None, ([], [])),
        (pd.DataFrame({"a": []}), None, (["a"], [])),
        (pl.DataFrame({"a": []}), None, (["a"], [])),
        (pa.table({"a": []}), None, (["a"], [])),
        (np.zeros((0, 2)), ["a", "b"], (["a", "b"], [])),
    ],
)
def test_empty_tables(tabulate, data, columns, expected):
    assert tabulate(data, columns=columns) == expected


BAD = [
    ({"a": [1, 2], "b": [1]}, None, r"data has columns of unequal length: 'a': 2, 'b': 1"),
    ({"a": 5}, None, r"data\['a'\]"),
    ({"a": "text"}, None, r"data\['a'\]"),
    ({1: [1], "1": [2]}, None, "data has two columns named '1'"),
    ([{1: 1, "1": 2}], None, r"rows\[0\]"),
    ([[1, 2], [1]], ["a", "b"], r"rows\[1\] has 1 values"),
    ([[1, 2, 3]], ["a", "b"], r"rows\[0\] has 3 values"),
    ([[1, 2]], None, "columns is required"),
    ([], None, "columns is required"),
    (np.zeros((2, 2)), None, "columns is required"),
    (["ab"], ["a", "b"], r"rows\[0\] must be a sequence"),
    ([{1, 2}], ["a", "b"], r"rows\[0\] must be a sequence"),
    ([{"a": 1}, [1]], ["a"], r"rows\[0\] must be a sequence"),
    (np.zeros(2), ["a"], r"rows\[0\] must be a sequence"),
    (np.zeros(()), ["a"], "data must be"),
    (5, ["a"], "data must be"),
    (None, ["a"], "data must be"),
    ("text", ["a"], "data must be"),
    (pl.LazyFrame({"a": [1]}), None, "data must be"),
    ([[1]], "a", "columns must be a sequence of str"),
    ([[1]], 5, "columns must be a sequence of str"),
    ([[1]], [1], r"columns\[0\] must be a str"),
    ([[1, 2]], ["a", "a"], "columns contains 'a' twice"),
    (pd.DataFrame([[1, 2]], columns=["a", "a"]), None, "columns contains 'a' twice"),
    (pa.table([[1], [2]], names=["a", "a"]), None, "columns contains 'a' twice"),
    ([[object()]], ["a"], r"rows\[0\]\.a is of type object"),
    ([[1], [b"bytes"]], ["a"], r"rows\[1\]\.a is of type bytes"),
    ({"a": [1, 1j]}, None, r"rows\[1\]\.a is of type complex"),
]


def test_what_is_no_table(artifacts, session):
    for data, columns, named in BAD:
        with pytest.raises(quark.SchemaValidationError, match=f"^{named}"):
            artifacts.log_table("t", data, columns=columns)
    assert artifacts.read() == ()
    assert not (session.run_path / "artifacts").exists()


def test_a_table_comes_back_as_the_frame_it_was(artifacts):
    frame = pd.DataFrame({"step": range(1000), "loss": np.linspace(1, 0, 1000)})
    table = artifacts.load(artifacts.log_table("t", frame))
    back = pd.DataFrame(table["rows"], columns=table["columns"])
    pd.testing.assert_frame_equal(back, frame)


def test_metadata_of_the_caller_comes_first(artifacts):
    record = artifacts.log_table("t", {"a": [1]}, metadata={"rows": "mine", "k": [1]}, step=3)
    assert record.metadata["rows"] == "mine"
    assert (record.metadata["columns"], record.metadata["k"], record.step) == (1, [1], 3)


def test_an_index_that_says_something_is_a_column(artifacts):
    frame = pd.DataFrame({"class": ["a", "b", "a"], "value": [1.0, 2.0, 3.0]})
    means = frame.groupby("class")["value"].mean()
    for data in (means, means.to_frame()):
        table = artifacts.load(artifacts.log_table("t", data))
        assert table == {"columns": ["class", "value"], "rows": [["a", 2.0], ["b", 2.0]]}
    described = artifacts.load(artifacts.log_table("t", frame.describe()))
    assert described["columns"] == ["index", "value"]
    assert described["rows"][0] == ["count", 3.0]
    lasted = pd.DataFrame({"a": [pd.Timedelta("1s")]})
    assert artifacts.load(artifacts.log_table("t", lasted))["rows"] == [["0 days 00:00:01"]]
