"""Parquet files of the schema that Neptune's exporter writes."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quark
from quark_core.runs.backend_choice import open_reader

MOMENT = pa.timestamp("ms", tz="UTC")
SCHEMA = pa.schema(
    [
        ("project_id", pa.string()),
        ("run_id", pa.string()),
        ("attribute_path", pa.string()),
        ("attribute_type", pa.string()),
        ("step", pa.decimal128(18, 6)),
        ("timestamp", MOMENT),
        ("int_value", pa.int64()),
        ("float_value", pa.float64()),
        ("string_value", pa.string()),
        ("bool_value", pa.bool_()),
        ("datetime_value", MOMENT),
        ("string_set_value", pa.list_(pa.string())),
        ("file_value", pa.struct([("path", pa.string())])),
        (
            "histogram_value",
            pa.struct(
                [
                    ("type", pa.string()),
                    ("edges", pa.list_(pa.float64())),
                    ("values", pa.list_(pa.float64())),
                ]
            ),
        ),
    ]
)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
BEGIN_US = round(BEGIN.timestamp() * 1e6)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def row(path, form, step=None, **values):
    moment = None if step is None else BEGIN + timedelta(seconds=float(step))
    return {
        "project_id": "ws/proj",
        "run_id": "RUN-1",
        "attribute_path": path,
        "attribute_type": form,
        "step": None if step is None else Decimal(str(step)),
        "timestamp": moment,
        **values,
    }


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "exports" / "data" / "ws_proj"
    folder.mkdir(parents=True)
    files = tmp_path / "exports" / "files"
    (files / "ws_proj").mkdir(parents=True)
    (files / "ws_proj" / "a.png").write_bytes(PNG)
    (tmp_path / "exports" / "secret.txt").write_text("secret")
    histogram = {"type": "COUNTING", "edges": [0.0, 1.0, 2.0], "values": [3.0, 4.0]}
    first = [
        row("sys/name", "string", string_value="digits"),
        row("sys/description", "string", string_value="a note"),
        row("sys/tags", "string_set", string_set_value=["base"]),
        row("sys/creation_time", "datetime", datetime_value=BEGIN),
        row("sys/failed", "bool", bool_value=True),
        row("config/lr", "float", float_value=0.1),
        row("config/layers", "int", int_value=3),
        row("config/api_key", "string", string_value="hunter2hunter2"),
        *(row("metrics/loss", "float_series", s, float_value=1 / (s + 1)) for s in range(50)),
        row("metrics/half", "float_series", 1.5, float_value=2.0),
    ]
    second = [
        *(row("metrics/loss", "float_series", s, float_value=-s) for s in range(50, 60)),
        row("hist", "histogram_series", 4, histogram_value=histogram),
        row("img", "file_series", 5, file_value={"path": "ws_proj/a.png"}),
        row("bad", "file", file_value={"path": "../secret.txt"}),
        row("log", "string_series", 1, string_value="hello"),
    ]
    for number, rows in enumerate((first, second)):
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        pq.write_table(table, folder / f"RUN-1_part_{number}.parquet", row_group_size=20)
    return folder.parent


def test_everything_comes_once(data, take, read_points, store, monkeypatch):
    monkeypatch.setattr("quark.importing.sources.neptune.PORTION_POINTS", 7)
    (run,) = take("neptune", data)
    assert (run["name"], run["project"]) == ("digits", "ws/proj")
    expected = [(s, 1 / (s + 1) if s < 50 else float(-s), BEGIN_US + s * 10**6) for s in range(60)]
    assert read_points(run["run_id"], "metrics/loss") == expected
    stored = open_reader(store).load_run(run["run_id"])
    assert dict(stored.config.values) == {
        "config": {"lr": 0.1, "layers": 3, "api_key": "[redacted]"}
    }
    record = stored.run
    assert (record.notes, record.tags, record.status) == ("a note", ("base",), "failed")
    artifacts = quark.ArtifactStore(quark.open_run(run["run_id"], storage_dir=store))
    (image,) = artifacts.read(artifact_type="image")
    assert (artifacts.load(image), image.step) == (PNG, 5)
    (histogram,) = artifacts.read(artifact_type="histogram")
    assert artifacts.load(histogram) == {"bins": [0.0, 1.0, 2.0], "counts": [3.0, 4.0]}
    (table,) = artifacts.read(artifact_type="table")
    assert artifacts.load(table)["rows"][0][:2] == [1, "hello"]
    assert {(one["kind"], one["name"]) for one in run["losses"]} == {
        ("point", "metrics/half"),
        ("file", "bad"),
    }
    (again,) = take("neptune", data)
    assert (again["points"], again["files"]) == (0, 0)


def test_steps_with_a_fraction_are_made_whole_by_a_multiplier(data, take, read_points):
    (run,) = take("neptune", data, "--step-multiplier", 2)
    assert [step for step, *_ in read_points(run["run_id"], "metrics/half")] == [3]


def test_what_is_no_export_fails_alone(tmp_path, take):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_bytes(b"no parquet")
    first, second = take("neptune", tmp_path, status=2)
    assert "no column project_id" in first["failure"]
    assert "cannot be read" in second["failure"]
