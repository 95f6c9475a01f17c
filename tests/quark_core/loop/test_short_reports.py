"""What Track's report and capture_output have of a run, from the session and from outside."""

import json
import math

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.runs.run_report import read_summaries


@pytest.fixture
def session(tmp_path):
    with quark.start_run(
        project="p",
        storage_dir=tmp_path,
        name="final",
        notes="almost\x1b[31m",
        config={"lr": 0.1, "model": {"depth": 2}},
        tags=["hpo"],
        capture="sys",
    ) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(3):
            with metrics.timer("batch_time"):
                metrics.log("epoch_loss", 1.0 / (step + 1), step=step)
            metrics.aggregate("norm", float(step))
        metrics.log("broken", math.nan, step=1)
        session.log_error(MemoryError("out of memory"), "failed")
        yield session


def run_cli(tmp_path, *arguments):
    done = CliRunner().invoke(cli, [*arguments, "-d", str(tmp_path)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.output


def test_report_in_short_has_what_the_report_of_track_has(session):
    report = session.report(short=True)
    has = report.to_dict()
    assert (has["id"], has["name"], has["project"]) == (session.run_id, "final", "p")
    assert (has["status"], has["tags"], has["attempts"]) == ("running", ["hpo"], 1)
    assert has["parameters"] == {"lr": 0.1, "model": {"depth": 2}}
    assert has["metrics"]["epoch_loss"]["last"] == pytest.approx(1 / 3)
    assert has["timers"]["batch_time"]["count"] == 2
    assert has["aggregates"]["norm"]["mean"] == 1.0
    assert any("out of memory" in each["message"] for each in has["errors"])
    assert json.loads(report.to_json())["metrics"]["broken"]["last"] is None
    text = str(report)
    for part in ("final", "running", "lr: 0.1", "epoch_loss: 0.333333", "batch_time", "norm"):
        assert part in text
    assert "\x1b" not in text


def test_quark_report_prints_the_same(session, tmp_path):
    inside = session.report(short=True)
    assert run_cli(tmp_path, "report", session.run_id, "--short").strip() == str(inside)
    printed = json.loads(run_cli(tmp_path, "report", session.run_id, "--short", "--json"))
    assert printed == json.loads(inside.to_json())


def test_show_has_a_table_of_timers(session, tmp_path):
    session.flush()
    said = run_cli(tmp_path, "show", session.run_id)
    assert "timer" in said
    assert "batch_time" in said
    assert "aggregate" in said
    rows = json.loads(run_cli(tmp_path, "show", session.run_id, "--json"))["aggregates"]
    assert {row["key"] for row in rows} == {"batch_time", "norm"}
    assert read_summaries(session.open_run.reader, session.run_id)["norm"].count == 3


def test_capture_output_gives_the_newest_lines(session):
    for number in range(60):
        print(f"line {number}")
    import sys

    print("to the other", file=sys.stderr)
    print("not yet", end="")
    lines = session.capture_output()
    assert len(lines) == 50
    assert session.capture_output(last=2, stream="stdout")[-1] in ("not yet", "line 59")
    assert session.capture_output(last=1, stream="stderr") == ["to the other"]
    assert session.capture_output(last=0) == []
    with pytest.raises(quark.SchemaValidationError, match="stream must be"):
        session.capture_output(stream="stdin")
    with pytest.raises(quark.SchemaValidationError, match="last"):
        session.capture_output(last=-1)
