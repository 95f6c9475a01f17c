"""Trials of Track, out of a file that the real Track has written (by its own client)."""

import json
import math
import os
from pathlib import Path

import pytest

import quark
from quark.importing.neutral_run import ImportFailure
from quark_core.records.query import Query

FILE = Path(__file__).with_name("files") / "track.json"


def read(store, run_id, kind):
    return quark.open_run(run_id, storage_dir=store).open_run.read(kind, Query()).to_records()


def load(store, run_id):
    from quark_core.runs.backend_choice import open_reader

    reader = open_reader(store)
    try:
        return reader.load_run(run_id)
    finally:
        reader.close()


@pytest.fixture
def trials():
    return json.loads(FILE.read_text())[0]["trials"]


def write(path, trials, **facts):
    project = {"dtype": "project", "uid": "P", "name": "P", "groups": [], "metadata": {}, **facts}
    path.write_text(json.dumps([{**project, "trials": trials}]))
    return path


def make_trial(**facts):
    return {
        "dtype": "trial", "uid": "abc_0", "revision": 0, "hash": "abc", "name": "t",
        "metadata": {"_last_change": 1_700_000_000.0}, "status": {"value": 302}, **facts,
    }  # fmt: skip


def test_what_a_trial_says_of_itself_comes(store, take):
    runs = take("track", FILE)
    assert [run["failure"] for run in runs] == [None] * 3
    found = [load(store, run["run_id"]) for run in runs]
    assert {each.project.name for each in found} == {"Vision"}
    assert [each.run.status for each in found] == ["completed", "failed", "completed"]
    assert [each.run.tags for each in found] == [
        ("gpu=V100", f"seed={number}") for number in range(3)
    ]
    assert [each.config.values["lr"] for each in found] == [0.1, 0.01, 0.1]
    assert found[0].config.values["optim"] == {"name": "sgd"}
    assert [each.run.groups for each in found] == [("lr sweep",)] * 3
    assert found[0].fields == {"host": "a1", "note": "slow", "version": "v1"}
    track = found[2].environment.values["track"]
    assert (track["revision"], track["status"]) == (1, "Parked")
    assert track["project"] == {
        "description": "all of it",
        "metadata": {"lab": "mila", "year": 2019},
    }


def test_metrics_come_with_their_steps_or_their_places(store, take, read_points):
    run_id = take("track", FILE)[0]["run_id"]
    points = {
        key: [(step, value) for step, value, _ in read_points(run_id, key)]
        for key in ("loss", "batch_loss", "acc", "ring")
    }
    assert points["loss"] == [(step, 1.0 / (step + 1)) for step in range(5)]
    assert points["batch_loss"] == [(step, float(step)) for step in range(5)]
    assert points["ring"] == [(place, 10.0 + place) for place in range(4)]
    # A single value stands where the others have come to.
    assert points["acc"] == [(4, 0.5)]


def test_statistics_are_what_track_itself_says_of_them(store, take, trials):
    run_id = take("track", FILE)[0]["run_id"]
    found = {record.key: record for record in read(store, run_id, "aggregate")}
    assert set(found) == {"stat", "chrono/forward", "chrono/runtime"}
    # Of 0 … 13 Track has skipped the first one, but for its least.
    stat = found["stat"]
    assert (stat.count, stat.mean, stat.low, stat.high, stat.last) == (13, 7.0, 0.0, 13.0, 13.0)
    assert stat.m2 == pytest.approx(sum((value - 7.0) ** 2 for value in range(1, 14)))
    forward = found["chrono/forward"]
    assert (forward.count, forward.unit, forward.keep) == (4, "s", "timer")
    assert forward.mean == pytest.approx(0.001926720142364502)
    assert math.sqrt(forward.m2 / forward.count) == pytest.approx(0.0004479767214849171)
    assert found["chrono/runtime"].mean == trials[0]["chronos"]["runtime"]


def test_errors_are_events(store, take):
    run_id = take("track", FILE)[1]["run_id"]
    (error,) = [e for e in read(store, run_id, "event") if e.event_type == "track_error"]
    assert (error.severity, error.payload["message"]) == ("error", "ValueError: boom")


def test_an_import_again_brings_what_is_new_alone(tmp_path, store, take, read_points, trials):
    path = write(tmp_path / "a.json", [trials[0]])
    (first,) = take("track", path)
    (again,) = take("track", path)
    assert (again["points"], again["records"], again["run_id"]) == (0, 0, first["run_id"])
    more = json.loads(json.dumps(trials[0]))
    more["metrics"]["loss"]["5"] = 0.125
    more["metrics"]["batch_loss"] += [5.0, 6.0]
    stat = more["metrics"]["stat"]
    stat |= {"sum": 78.0 + 99.0, "sum_sqr": 650.0 + 99.0**2, "current_count": 15, "max": 100.0}
    more["metadata"] |= {"_last_change": 1_700_000_009.0, "note": "quick"}
    write(path, [more])
    (third,) = take("track", path)
    assert (third["points"], third["records"]) == (3, 1)
    assert read_points(first["run_id"], "loss")[-1][:2] == (5, 0.125)
    added = [r for r in read(store, first["run_id"], "aggregate") if r.key == "stat"][-1]
    assert (added.count, added.mean) == (1, pytest.approx(100.0))
    assert added.m2 == pytest.approx(0.0, abs=1e-6)
    assert load(store, first["run_id"]).fields["note"] == "quick"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "[1, 2]", '[{"dtype": "statstream"}]', "[" * 100_000, '{"dtype": "project"}'],
)
def test_a_file_of_another_kind_is_refused(tmp_path, take, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ImportFailure, match="not a Track file"):
        take("track", tmp_path / "a.json")
    with pytest.raises(ImportFailure, match="no runs of track found"):
        take("track", tmp_path)


def test_what_is_no_number_costs_itself_alone(tmp_path, take, read_points):
    trial = make_trial(
        metrics={
            "loss": {"0": 1.0, "1": "text", "x": 2.0, "1.5": 3.0, "2": math.nan, "3": 10**400},
            "row": [[7, 0.5], [8, None], {"a": 1}, 4.0],
            "flag": True,
            "none": None,
            "stat": {"dtype": "statstream", "sum": "x"},
            "wild": {
                "dtype": "statstream", "sum": 1e308, "sum_sqr": 1e308, "first_obs": 1e308,
                "min": -math.inf, "max": math.inf, "current_count": 10**30, "current_obs": 1,
                "drop_obs": 0,
            },
        },
        chronos={"forward": "soon", "runtime": None},
        tags=["a"],
        parameters=7,
        errors="boom",
        status="odd",
        metadata={"_last_change": 1e300},
    )  # fmt: skip
    (run,) = take("track", write(tmp_path / "a.json", [trial]))
    assert run["failure"] is None
    values = [(step, value) for step, value, _ in read_points(run["run_id"], "loss")]
    assert values[0] == (0, 1.0)
    assert math.isnan(values[1][1])
    assert [step for step, _, _ in read_points(run["run_id"], "row")] == [7, 3]
    kinds = {loss["kind"] for loss in run["losses"]}
    assert {"metric", "statistic", "chrono"} <= kinds


def test_names_that_are_hostile_stay_what_they_are(tmp_path, store, take):
    trial = make_trial(
        name="../../x\x1b[31m",
        metadata={"a\nb": 1, "../x": 2, "api_key": "hunter2hunter2"},
        group_id="g",
    )
    groups = [{"dtype": "trial_group", "uid": "g", "name": "//bad//", "trials": []}]
    (run,) = take("track", write(tmp_path / "a.json", [trial], groups=groups))
    assert run["failure"] is None
    found = load(store, run["run_id"])
    assert found.run.groups == ()
    assert "hunter2hunter2" not in str(found.fields)
    assert {"group", "field"} <= {loss["kind"] for loss in run["losses"]}
    kept = [path for path in store.rglob("*") if path.is_file()]
    assert [path for path in kept if b"hunter2hunter2" in path.read_bytes()] == []


def test_nobody_waits_for_a_pipe(tmp_path, take):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ImportFailure, match="no runs of track found"):
        take("track", tmp_path)
