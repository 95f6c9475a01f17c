"""What is imported may be anybody's: it costs itself alone, in bounded time and memory."""

import contextlib
import json
import os
import sqlite3
import zipfile

import pytest

from quark.importing.neutral_run import ImportFailure, Losses
from quark.importing.sources import clearml, comet
from quark_core.runs.backend_choice import open_reader

SECRET = "hunter2hunter2"
ENDLESS = 10**15


def make_zip(path, entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def make_comet(path, messages=(), **facts):
    known = {"offline_id": path.stem, "project_name": "proj", **facts}
    lines = "".join(f"{json.dumps(message)}\n" for message in messages)
    make_zip(path, {"experiment.json": json.dumps(known), "messages.json": lines, "f": b"x" * 10})


def make_metric(value, step):
    metric = {"metricName": "loss", "metricValue": value, "step": step}
    payload = {"local_timestamp": 1_700_000_000_000, "metric": metric}
    return {"payload": payload, "type": "metric_msg"}


def make_trackio(path, rows, config=None):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT,"
            " step INTEGER, metrics TEXT)"
        )
        database.execute("CREATE TABLE configs (run_name TEXT, config TEXT)")
        for row in rows:
            database.execute(
                "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, 'a', 0, ?)",
                ("2024-01-01T00:00:00+00:00", json.dumps(row)),
            )
        database.execute(
            "INSERT INTO configs (run_name, config) VALUES ('a', ?)", (json.dumps(config or {}),)
        )
        database.commit()


def write_events(folder, *events):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for event in events:
        writer.add_event(event if isinstance(event, Event) else Event(**event))
    writer.close()


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("comet", "a.zip"),
        ("clearml", "a.zip"),
        ("csv", "a.csv"),
        ("wandb", "run-a.wandb"),
        ("wandb", "a.csv"),
        ("neptune", "a.parquet"),
        ("trackio", "a.db"),
        ("tensorboard", "events.out.tfevents.1"),
    ],
)
def test_nobody_waits_for_a_pipe(tool, name, tmp_path, take):
    place = tmp_path / "place"
    place.mkdir()
    os.mkfifo(place / name)
    if tool == "trackio":
        with pytest.raises(ImportFailure, match=r"not contain a .* database"):
            take(tool, place)
    else:
        with pytest.raises(ImportFailure, match=f"no runs of {tool} found"):
            take(tool, place)


def test_a_pipe_beside_a_table_is_no_configuration(tmp_path, take):
    (tmp_path / "a.csv").write_text("step,loss\n0,1\n")
    os.mkfifo(tmp_path / "run.json")
    os.mkfifo(tmp_path / "hparams.yaml")
    (run,) = take("csv", tmp_path / "a.csv")
    assert run["points"] == 1


def test_ids_of_others_that_are_paths_name_no_place(tmp_path, take, store):
    run = {"id": "../../../outside", "project": {"name": "p"}, "name": "n", "notes": None}
    run |= {"tags": [], "status": "completed", "created_us": 1, "ended_us": 2, "git_commit": None}
    place = tmp_path / "place"
    place.mkdir()
    (place / "run.json").write_text(json.dumps(run))
    (place / "metrics_long.csv").write_text("step,loss\n0,1\n")
    (found,) = take("csv", place)
    assert found["points"] == 1
    assert found["run_id"].isalnum()
    assert not [*tmp_path.rglob("*outside*")]


def test_a_step_beyond_int64_costs_itself_alone(tmp_path, take, read_points):
    make_comet(tmp_path / "a.zip", [make_metric(1.0, 10**30), make_metric(2.0, 1)])
    (run,) = take("comet", tmp_path)
    assert [value for _, value, _ in read_points(run["run_id"], "loss")] == [2.0]
    assert [one["kind"] for one in run["losses"]] == ["point"]


def test_a_histogram_has_as_many_edges_as_it_has_counts(tmp_path, take):
    bomb = {"_type": "trackio.histogram", "packedBins": {"min": 0, "size": 1, "count": ENDLESS}}
    make_trackio(tmp_path / "a.db", [{"h": {**bomb, "values": [1, 2]}, "loss": 1}])
    (run,) = take("trackio", tmp_path)
    assert (run["points"], run["failure"]) == (1, None)
    assert [one["kind"] for one in run["losses"]] == ["histogram"]


def test_a_tensor_is_not_made_larger_than_what_it_holds(tmp_path, take):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    value = Summary.Value(tag="t")
    value.tensor.dtype = 1
    value.tensor.tensor_shape.dim.add().size = ENDLESS
    value.tensor.float_val.append(1.0)
    plain = Summary.Value(tag="loss", simple_value=1.0)
    write_events(tmp_path, Event(wall_time=1e9, step=1, summary=Summary(value=[value, plain])))
    (run,) = take("tensorboard", tmp_path)
    assert (run["points"], run["failure"]) == (1, None)
    assert "tensor" in {one["kind"] for one in run["losses"]}


def test_moments_that_are_none_are_not_believed(tmp_path, take):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    plain = Summary(value=[Summary.Value(tag="loss", simple_value=1.0)])
    for moment in (float("inf"), float("nan"), -1e300):
        write_events(tmp_path, Event(wall_time=moment, step=1, summary=plain))
    write_events(tmp_path, Event(wall_time=1e9, step=2, summary=plain))
    (run,) = take("tensorboard", tmp_path)
    assert run["failure"] is None
    (again,) = take("tensorboard", tmp_path)
    assert (again["points"], again["failure"]) == (0, None)


def test_an_event_that_is_none_costs_its_own_run(tmp_path, take):
    from tensorboard.summary.writer.record_writer import RecordWriter

    write_events(tmp_path, {"wall_time": 1e9, "step": 1})
    (tmp_path / "loss_train").mkdir()
    with (tmp_path / "loss_train" / "events.out.tfevents.9").open("wb") as file:
        RecordWriter(file).write(b"\xff\xff\xff\xff")
    runs = take("tensorboard", tmp_path, status=1)
    assert sorted(run["failure"] is None for run in runs) == [False, True]


def test_no_secret_is_in_what_an_import_notes_of_itself(tmp_path, take, store):
    from tensorboard.plugins.hparams import summary_v2

    folder = tmp_path / "events"
    summary = summary_v2.hparams_pb({"api_key": SECRET, "lr": 0.1})
    from tensorboard.compat.proto.event_pb2 import Event

    write_events(folder, Event(wall_time=1e9, step=1, summary=summary))
    take("tensorboard", folder)
    make_trackio(tmp_path / "a.db", [{"loss": 1}], {"api_key": SECRET})
    take("trackio", tmp_path)
    other = {"type": "log_other", "payload": {"key": "token", "value": SECRET}}
    make_comet(tmp_path / "a.zip", [other])
    take("comet", tmp_path)
    kept = [path for path in store.rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []


def test_a_commit_that_is_no_text_is_none(tmp_path, take, store):
    task = {"id": "t1", "name": "n", "script": {"version_num": {"a": ["x"] * 3}}}
    make_zip(tmp_path / "a.zip", {"task.json": json.dumps(task)})
    (run,) = take("clearml", tmp_path)
    assert open_reader(store).load_run(run["run_id"]).run.git_commit is None


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE VIEW metrics AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)"
        " SELECT id, 'a' AS run_name, '' AS timestamp, 0 AS step, '{}' AS metrics FROM n",
        "CREATE VIRTUAL TABLE metrics USING fts5(run_name, timestamp, step, text)",
    ],
)
def test_a_database_whose_tables_are_programs_is_not_asked(schema, tmp_path, take):
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute(schema)
    with pytest.raises(ImportFailure, match="is not a table"):
        take("trackio", tmp_path)


def test_what_unfolds_without_end_is_refused(tmp_path, take, monkeypatch):
    monkeypatch.setattr("quark.importing.safe_files.DOCUMENT_BYTES", 1000)
    make_zip(tmp_path / "a.zip", {"experiment.json": b" " * 10_000, "messages.json": b""})
    make_comet(tmp_path / "b.zip", [make_metric(1.0, 1), {"x": "y" * 10_000}, make_metric(1.0, 2)])
    first, second = take("comet", tmp_path, status=1)
    assert "1000" in first["failure"]
    assert "1000" in second["failure"]
    make_zip(tmp_path / "c" / "a.zip", {"task.json": b" " * 10_000})
    (third,) = take("clearml", tmp_path / "c", status=2)
    assert "1000" in third["failure"]


def test_a_file_of_an_archive_that_cannot_be_unpacked_costs_itself_alone(tmp_path, take):
    place = {"additional_params": {"fileName": "n"}, "file_path": "f", "upload_type": "file"}
    make_comet(tmp_path / "a.zip", [make_metric(1.0, 1), {"type": "file_upload", "payload": place}])
    data = bytearray((tmp_path / "a.zip").read_bytes())
    at = data.rindex(b"PK\x03\x04")
    begin = at + 30 + 1
    data[begin : begin + 3] = b"\xff\xff\xff"
    (tmp_path / "a.zip").write_bytes(data)
    (run,) = take("comet", tmp_path)
    assert (run["points"], run["files"], run["failure"]) == (1, 0, None)


def read_broken_off(run):
    """What comes of a run of which each portion is the last one before somebody ends the import."""
    position, files, points = {}, [], 0
    while portion := next(iter(run.read(position, Losses())), None):
        position = portion.position
        files += [one.name for one in portion.files]
        points += 0 if portion.points is None else len(portion.points.values)
    return files, points


def test_an_import_that_is_broken_off_again_and_again_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("quark.importing.neutral_run.PORTION_POINTS", 2)
    messages = []
    for step in range(7):
        named = {"fileName": f"n{step}"}
        upload = {"additional_params": named, "file_path": "f", "upload_type": "file"}
        messages += [{"type": "file_upload", "payload": upload}, make_metric(1.0, step)]
    make_comet(tmp_path / "a.zip", messages)
    (run,) = comet.find_runs(tmp_path)
    assert read_broken_off(run) == ([f"n{step}" for step in range(7)], 7)
    events = [[{"metric": "single", "iter": -(2**31), "type": "training_stats_scalar", "value": 1}]]
    for step in range(7):
        plot = {"metric": f"n{step}", "iter": step, "type": "plot", "plot_str": "{}"}
        scalar = {"metric": "loss", "iter": step, "type": "training_stats_scalar", "value": 1}
        events.append([plot, scalar])
    lines = "\n".join(map(json.dumps, events))
    make_zip(tmp_path / "c" / "a.zip", {"task.json": '{"id": "t"}', "metrics.jsonl": lines})
    (run,) = clearml.find_runs(tmp_path / "c")
    assert read_broken_off(run) == ([f"n{step}" for step in range(7)], 8)


def test_a_configuration_that_unfolds_without_end_is_short(tmp_path, take):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 14):
        inner = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{inner}]")
    (tmp_path / "hparams.yaml").write_text("\n".join(lines))
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1\n")
    (run,) = take("csv", tmp_path)
    assert (run["points"], run["failure"]) == (1, None)
