"""A resumed run reads as one curve and says once that it repeats steps; a checkpoint starts it."""

import csv
import json
import logging
import subprocess
import sys

import pytest

import quark
from quark_core.backends.curves import CurveQuery
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.following import read_series, read_series_many


@pytest.fixture
def told(caplog):
    """What was said of repeated steps."""
    caplog.set_level(logging.WARNING, "quark")
    return lambda: [
        r.getMessage() for r in caplog.records if "was already logged" in r.getMessage()
    ]


def log_steps(session, steps, value=0.0, key="loss"):
    with quark.MetricsLogger(session) as metrics:
        for step in steps:
            metrics.log(key, value, step=step)
    session.flush()


def read_steps(session, folder, **filters):
    found = quark.open_run(session.id, folder)
    rows = quark.MetricsLogger(found).columns(metric_key="loss", **filters)
    return rows["step"].tolist()


@pytest.fixture
def first(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, config={"lr": 0.1}) as session:
        log_steps(session, range(100))
        session.end_run("interrupted")
    return session


def resume(first, folder, **arguments):
    return quark.resume_run(run_id=first.id, storage_dir=folder, reopen=True, **arguments)


def test_a_hundred_steps_resumed_three_times_are_a_hundred_points(tmp_path, first, told):
    for number in range(3):
        with resume(first, tmp_path) as session:
            log_steps(session, range(60 + 10 * number, 80 + 10 * number), number + 1.0)
        assert len(told()) == number + 1
        # Also in between, where the attempt has not come as far as the one before.
        assert sorted(read_steps(session, tmp_path)) == list(range(100))
    assert read_steps(first, tmp_path) == list(range(100))
    assert len(read_steps(first, tmp_path, all_attempts=True)) == 160
    message = told()[0]
    assert f"run {first.id}" in message
    assert "logs loss from step 60 on, but step 99 was already logged" in message
    assert "all_attempts=True" in message
    assert "from_step=60" in message
    reader = open_reader(tmp_path)
    curves = read_series_many(reader, first.id, CurveQuery.build(["loss"], entries=None)).curves
    assert [step for curve in curves for step in curve.step.tolist()] == list(range(100))
    assert read_series(reader, first.id, "loss", 10).points == 100
    metrics = quark.MetricsLogger(quark.open_run(first.id, tmp_path))
    assert sum(part.count for part in metrics.iterate(rows=7)) == 100
    (found,) = quark.search_runs(where="loss == 3.0", storage_dir=tmp_path)
    summary = found.metrics["loss"]
    assert (summary.count, summary.last, summary.last_step) == (100, 3.0, 99)
    reader.close()


def test_exports_have_each_step_once_and_all_attempts_on_demand(tmp_path, first):
    with resume(first, tmp_path) as session:
        log_steps(session, range(60, 100), 1.0)

    def export(name, *options):
        target = tmp_path / name
        command = [sys.executable, "-m", "quark", "export", first.id, "--kind", "metric"]
        command += ["--format", "csv", "--output", str(target), "--storage-dir", str(tmp_path)]
        subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        rows = csv.DictReader(target.read_text("utf-8").splitlines())
        return [int(row["step"]) for row in rows if row["metric_key"] == "loss"]

    assert export("visible.csv") == list(range(100))
    assert len(export("all.csv", "--all-attempts")) == 140


def test_an_analysis_sees_each_step_once(tmp_path, first):
    with resume(first, tmp_path) as session:
        log_steps(session, range(60, 100), 1.0)
    command = [sys.executable, "-m", "quark", "analyze", first.id, "--json"]
    done = subprocess.run(
        [*command, "--storage-dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("begin", [None, 100])
def test_where_nothing_is_repeated_nothing_is_said(tmp_path, first, told, begin):
    with resume(first, tmp_path, from_step=60 if begin is None else None) as session:
        log_steps(session, range(begin or 60, 120))
        log_steps(session, range(5), key="new")
    # Within an attempt steps go back on purpose.
    with resume(first, tmp_path) as session:
        log_steps(session, [120, 7, 130])
    assert told() == []
    assert read_steps(first, tmp_path)[-3:] == [120, 7, 130]
    assert read_steps(first, tmp_path).count(7) == 2


def test_a_start_goes_on_with_the_run_of_its_checkpoint(tmp_path, first, told):
    state = json.loads(json.dumps(first.state_dict(step=69)))
    with quark.start_run(project="p", storage_dir=tmp_path, state=state) as session:
        assert (session.id, session.context.run.attempt) == (first.id, 1)
        assert dict(session.config)["lr"] == 0.1
        log_steps(session, [70, 71], 1.0)
    assert read_steps(first, tmp_path) == list(range(72))
    assert len(read_steps(first, tmp_path, all_attempts=True)) == 102
    assert told() == []
    (event,) = quark.EventLogger(quark.open_run(first.id, tmp_path)).read(event_type="run_resumed")
    assert event.payload == {"from_step": 70}
    with pytest.raises(quark.InvalidRunStateError, match="completed"):
        quark.start_run(project="p", storage_dir=tmp_path, state=state)


def test_a_start_with_a_configuration_gives_it_to_the_run(tmp_path, first):
    state = first.state_dict()
    with quark.start_run(project="p", storage_dir=tmp_path, state=state, config={"lr": 1}):
        pass
    assert quark.open_run(first.id, tmp_path).config["lr"] == 1
    assert read_steps(first, tmp_path) == list(range(100))


@pytest.mark.parametrize(
    ("change", "arguments", "error", "words"),
    [
        ({"run_id": "0123456789abcdef"}, {}, quark.RunNotFoundError, "0123456789abcdef"),
        ({}, {"project": "other"}, quark.SchemaValidationError, "of project 'p', not of 'other'"),
        ({}, {"if_exists": "skip"}, quark.SchemaValidationError, "cannot be combined"),
        ({}, {"parent_run_id": "0123456789abcdef"}, quark.SchemaValidationError, "combined"),
        ({"step": -1}, {}, quark.SchemaValidationError, r"state\['step'\]"),
        ({"run_id": "../x"}, {}, quark.SchemaValidationError, r"state\['run_id'\]"),
        ({"run_id": None}, {}, quark.SchemaValidationError, "state_dict"),
    ],
)
def test_a_start_says_why_it_cannot_go_on(tmp_path, first, change, arguments, error, words):
    state = {**first.state_dict(step=9), **change}
    with pytest.raises(error, match=words):
        quark.start_run(**{"project": "p", "storage_dir": tmp_path, "state": state, **arguments})
    assert len(quark.search_runs(storage_dir=tmp_path)) == 1


def test_a_run_that_is_alive_is_not_taken_up(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        code = (
            "import quark, sys, json; quark.start_run(project='p', storage_dir=sys.argv[1], "
            "state=json.loads(sys.argv[2]))"
        )
        command = [sys.executable, "-c", code, str(tmp_path), json.dumps(session.state_dict())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "InvalidRunStateError" in done.stderr


def test_state_in_a_folder_without_the_run_makes_no_store(tmp_path, first):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(quark.SessionStoreError, match="no Quark store in"):
        quark.start_run(project="p", storage_dir=elsewhere, state=first.state_dict())
    assert list(elsewhere.iterdir()) == []
