"""A database as Trackio 0.43 makes it: its tables and rows, with nothing of Trackio installed."""

import json
import sqlite3
from contextlib import closing

import pytest

import quark
from quark_core.runs.backend_choice import open_reader

TABLES = """
CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
  timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
  run_name TEXT NOT NULL, config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id));
CREATE TABLE system_metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
  timestamp TEXT NOT NULL, run_name TEXT NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE alerts (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
  timestamp TEXT NOT NULL, run_name TEXT NOT NULL, title TEXT NOT NULL, text TEXT,
  level TEXT NOT NULL DEFAULT 'warn', step INTEGER, alert_id TEXT);
"""
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def moment(second):
    return f"2026-01-01T00:00:{second:02}+00:00"


def add(path, run_id, step, values):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?,?,?,?,?)",
            (run_id, moment(step), f"name-{run_id}", step, json.dumps(values).encode()),
        )


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "trackio"
    (folder / "media" / "proj" / "r").mkdir(parents=True)
    (folder / "media" / "proj" / "r" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    path = folder / "proj.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(TABLES)
        config = {"lr": 0.1, "api_key": "hunter2hunter2", "_Group": "g", "_Created": moment(0)}
        connection.execute(
            "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?,?,?,?)",
            ("r", "name-r", json.dumps(config).encode(), moment(0)),
        )
        connection.execute(
            "INSERT INTO alerts (run_id, timestamp, run_name, title, text) VALUES (?,?,?,?,?)",
            ("r", moment(3), "name-r", "careful", "it diverges"),
        )
    for step in range(10):
        add(path, "r", step, {"loss": 1 / (step + 1), "deep": {"a": step}, "bad": "NaN"})
    add(path, "other", 0, {"loss": 7.0})
    image = {"_type": "trackio.image", "file_path": "proj/r/a.png", "caption": "c"}
    table = {"_type": "trackio.table", "_value": [{"a": 1}, {"a": 2, "b": "x"}]}
    histogram = {"_type": "trackio.histogram", "bins": [0, 1, 2], "values": [3, 4]}
    escape = {"_type": "trackio.image", "file_path": "../../secret.png"}
    values = {"img": image, "table": table, "hist": histogram, "escape": escape}
    add(path, "r", 10, values)
    return folder


def test_everything_comes_once(folder, take, read_points, store):
    run, other = take("trackio", folder)
    assert (run["name"], run["project"]) == ("name-r", "proj")
    start_us = 1_767_225_600_000_000
    assert read_points(run["run_id"], "loss") == [
        (step, 1 / (step + 1), start_us + step * 1_000_000) for step in range(10)
    ]
    assert len(read_points(run["run_id"], "deep/a")) == 10
    assert len(read_points(run["run_id"], "bad", include_non_finite=True)) == 10
    assert [value for _, value, _ in read_points(other["run_id"], "loss")] == [7.0]
    stored = open_reader(store).load_run(run["run_id"])
    assert dict(stored.config.values) == {"lr": 0.1, "api_key": "[redacted]"}
    assert stored.run.tags == ("group=g",)
    artifacts = quark.ArtifactStore(quark.open_run(run["run_id"], storage_dir=store))
    (image,) = artifacts.read(artifact_type="image")
    assert (artifacts.load(image), image.step) == (PNG, 10)
    (table,) = artifacts.read(artifact_type="table")
    assert artifacts.load(table) == {"columns": ["a", "b"], "rows": [[1, None], [2, "x"]]}
    (histogram,) = artifacts.read(artifact_type="histogram")
    assert artifacts.load(histogram) == {"bins": [0.0, 1.0, 2.0], "counts": [3.0, 4.0]}
    assert [(one["kind"], one["name"]) for one in run["losses"]] == [("image", "escape")]
    add(folder / "proj.db", "r", 11, {"loss": 0.5})
    again, _ = take("trackio", folder)
    assert (again["points"], again["files"]) == (1, 0)


def test_what_is_no_database_of_trackios_is_refused(tmp_path, store):
    from click.testing import CliRunner

    from quark.cli.main import cli

    (tmp_path / "x.db").write_bytes(b"no database" * 100)
    for place, why in ((tmp_path / "x.db", "cannot be read"), (tmp_path / "no", "does not exist")):
        with pytest.raises(quark.QuarkError, match=why):
            CliRunner().invoke(
                cli, ["import", "trackio", str(place), "-d", str(store)], catch_exceptions=False
            )
