"""`quark report` writes one file, and `quark analyze` one beside its verdict."""

import json

import pytest
from diagnosed_runs import overfit, succeed

from quark_core.formatting import format_bytes


@pytest.fixture
def store(tmp_path, log_run):
    log_run(tmp_path, "over-1", values=overfit(), name="overfit")
    log_run(tmp_path, "good-1", values=succeed(), name="good")
    return tmp_path


def test_a_report_of_two_runs(store, invoke):
    path = store / "r.html"
    result = invoke("report", "overfit", "good", "-d", store, "-o", path)
    assert result.exit_code == 0, result.output
    assert result.output == f"Wrote {path} ({format_bytes(path.stat().st_size)}).\n"
    assert path.read_text().startswith("<!doctype html>")
    told = invoke("report", "over", "-d", store, "-o", path, "--json", "--no-config", "--no-logs")
    said = json.loads(told.output)
    assert (said["path"], said["size_bytes"]) == (str(path), path.stat().st_size)
    assert said["runs"][0]["config"] is None


@pytest.mark.parametrize(("level", "status"), [("error", 3), (None, 0)])
def test_the_report_of_an_analysis_is_there_also_where_the_check_fails(
    store, invoke, level, status
):
    page, summary = store / "report.html", store / "summary.md"
    summary.write_text("before\n")
    check = [] if level is None else ["--fail-on", level]
    run = "overfit" if status else "good"
    result = invoke(
        "analyze", run, "-d", store, "--no-store", "--report", page, "--summary", summary, *check
    )
    assert result.exit_code == status, result.output
    assert page.read_text().startswith("<!doctype html>")
    text = summary.read_text()
    assert text.startswith("before\n### ")
    assert ("critical" in text or "error" in text) == bool(status)


def test_json_stays_json_beside_a_report(store, invoke):
    page = store / "report.html"
    result = invoke("analyze", "good", "-d", store, "--no-store", "--json", "--report", page)
    assert json.loads(result.stdout)["run_id"] == "good-1"
    assert page.exists()


def test_a_file_that_cannot_be_written_is_told_in_one_line(store, invoke):
    (store / "file").write_text("no folder")
    path = store / "file" / "r.html"
    for option, command in (
        ("-o", ("report", "good")),
        ("--report", ("analyze", "good", "--no-store")),
        ("--summary", ("analyze", "good", "--no-store")),
    ):
        result = invoke(*command, "-d", store, option, path)
        assert result.exit_code == 1
        [line] = [line for line in result.output.splitlines() if str(path) in line]
        assert line.startswith("quark: ")
        assert "cannot be written" in line
        assert line.endswith(f"Pass another file with {option}.")
    assert (store / "file").read_text() == "no folder"
