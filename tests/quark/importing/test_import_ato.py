"""Experiments of Ato, out of a database that the real Ato 2.2.1 has written (as SQL)."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

import quark
from quark.importing.neutral_run import ImportFailure
from quark_core.records.query import Query
from quark_core.runs.backend_choice import open_reader

DUMP = Path(__file__).with_name("files") / "ato.sql"


@pytest.fixture
def database(tmp_path):
    folder = tmp_path / "place"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "model.bin").write_bytes(b"abc")
    change(folder / "experiments.db", DUMP.read_text())
    return folder / "experiments.db"


def change(path, script):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        connection.commit()


def load(store, run_id):
    reader = open_reader(store)
    try:
        return reader.load_run(run_id)
    finally:
        reader.close()


def read(store, run_id, kind):
    return quark.open_run(run_id, storage_dir=store).open_run.read(kind, Query()).to_records()


def test_what_an_experiment_says_of_itself_comes(database, store, take):
    runs = take("ato", database)
    found = [load(store, run["run_id"]) for run in runs]
    assert [each.run.status for each in found] == ["completed", "failed", "interrupted"]
    assert [each.run.tags for each in found] == [("base", f"n{n}") for n in range(3)]
    assert [each.config.values["lr"] for each in found] == [0.1, 0.05, 0.1 / 3]
    assert {each.fields["ato_structural_hash"] for each in found} == {
        "7bd89e4aa7935aff7aaf9711abf65ec298772e07"
    }
    assert found[0].project.name == "vision"
    assert found[0].run.created_at.startswith("2026-11-24T19:35:56.21311")
    assert found[0].run.ended_at.startswith("2026-11-24T19:35:56.388265")


def test_metrics_traces_and_artifacts_come_once(database, store, take, read_points):
    run_id = take("ato", database)[0]["run_id"]
    points = [(step, value) for step, value, _ in read_points(run_id, "loss")]
    assert points == [(step, 1.0 / (step + 1)) for step in range(4)]
    prints = read(store, run_id, "fingerprint")
    assert [(p.subject, p.key, p.digest, p.level) for p in prints] == [
        ("code", "train_step", "ab" * 32, "ato"),
        ("output", "predict", "cd" * 32, "ato"),
    ]
    opened = quark.open_run(run_id, storage_dir=store)
    (artifact,) = quark.ArtifactStore(opened).read()
    assert (artifact.artifact_key, artifact.artifact_type) == ("out/model.bin", "model")
    # What lies elsewhere on this machine is told of and not read.
    (told,) = [e for e in read(store, run_id, "event") if e.event_type == "ato_artifact"]
    assert told.payload["path"] == "/etc/hostname"
    again = take("ato", database)
    assert [(r["points"], r["records"], r["files"]) for r in again] == [(0, 0, 0)] * 3


def test_an_import_again_brings_what_is_new_alone(database, store, take, read_points):
    run_id = take("ato", database)[2]["run_id"]
    change(
        database,
        "INSERT INTO metrics (run_id, key, value, step, timestamp) VALUES"
        " (3, 'loss', 0.25, 99, '2026-11-24 20:00:00.000000');"
        "UPDATE experiments SET status = 'completed', end_time = '2026-11-24 20:00:01'"
        " WHERE id = 3;",
    )
    again = take("ato", database)[2]
    assert (again["run_id"], again["points"]) == (run_id, 1)
    assert read_points(run_id, "loss")[-1][:2] == (99, 0.25)
    assert load(store, run_id).run.status == "completed"


def test_links_out_of_the_folder_are_not_followed(database, store, take, tmp_path):
    (tmp_path / "secret.txt").write_text("hunter2hunter2")
    (database.parent / "link").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(database.parent / "pipe")
    change(
        database,
        "INSERT INTO artifacts (run_id, path, data_type) VALUES (1, 'link', 'file');"
        "INSERT INTO artifacts (run_id, path, data_type) VALUES (1, '../secret.txt', 'file');"
        "INSERT INTO artifacts (run_id, path, data_type) VALUES (1, 'pipe', '../../x');"
        "INSERT INTO artifacts (run_id, path, data_type) VALUES (1, char(0) || 'x', 'x');",
    )
    first = take("ato", database)[0]
    assert (first["failure"], first["files"]) == (None, 1)
    kept = [path for path in store.rglob("*") if path.is_file()]
    assert [path for path in kept if b"hunter2hunter2" in path.read_bytes()] == []


def test_rows_that_are_nonsense_cost_themselves_alone(database, take, read_points):
    change(
        database,
        "INSERT INTO metrics (run_id, key, value, step, timestamp) VALUES"
        " (1, 'loss', 'text', 1, NULL), (1, 'loss', 1.0, 'x', 7), (1, x'00', 2.0, 3, 'never'),"
        " (1, 'loss', 5.0, 77, 'never'), (1, 'loss', 9e999, 78, NULL), (1, 'loss', 1.0, -5, NULL);"
        "INSERT INTO fingerprints (run_id, trace_id, trace_type, fingerprint) VALUES"
        " (1, 'a', 'odd', 'ff'), (1, 'b', 'static', ''), (1, '', 'static', 'ff');"
        "UPDATE experiments SET config = '[1', tags = '{', status = x'ff', start_time = 'x',"
        " end_time = 5 WHERE id = 1;",
    )
    first = take("ato", database)[0]
    assert first["failure"] is None
    assert [step for step, _, _ in read_points(first["run_id"], "loss")] == [0, 1, 2, 3, 77, 78]
    assert {"metric", "fingerprint"} <= {loss["kind"] for loss in first["losses"]}


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE VIEW metrics AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)"
        " SELECT id, 1 AS run_id, 'a' AS key, 0 AS value, 0 AS step, '' AS timestamp FROM n",
        "CREATE VIRTUAL TABLE metrics USING fts5(run_id, key, value, step, timestamp)",
        "",
    ],
)
def test_a_database_whose_tables_are_programs_is_not_asked(schema, database, take):
    change(database, f"DROP TABLE metrics; {schema}")
    with pytest.raises(ImportFailure, match=r"not a table|no table"):
        take("ato", database)
    with pytest.raises(ImportFailure, match=r"not (contain )?an Ato database"):
        take("ato", database.parent)


def test_what_is_no_database_is_refused(tmp_path, take):
    (tmp_path / "a.db").write_bytes(b"x" * 5000)
    with pytest.raises(ImportFailure, match="cannot be read"):
        take("ato", tmp_path / "a.db")
    with pytest.raises(ImportFailure, match="does not exist"):
        take("ato", tmp_path / "absent.db")
