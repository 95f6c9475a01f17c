"""A run that broke off: each way to end against each place that says how a run was."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

import quark
from quark.cli.mcp_tools import Workbench, compare_runs, list_alerts, show_run, write_report
from quark.notifications.notices import describe_end
from quark.page.routes.analyses import AnalysisDesk
from quark.page.routes.curves import ChangeDesk
from quark.page.routes.page_source import open_source
from quark.page.routes.parameters import Parameters
from quark.page.routes.run_analysis import ComparedPair, LocalAnalyzer
from quark.page.routes.run_details import tell_run
from quark.page.routes.runs import list_standings
from quark_core.errors import StopRequested
from quark_core.records.runs import RunEnding, StopRequest

STEPS = 120
KILLED = """
import os, signal, sys, quark
session = quark.start_run(project="p", name="lost", config={"lr": 1}, storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
for step in range(60):
    metrics.log("val/loss", 1 / (step + 1), step=step)
metrics.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True)
class End:
    """How a run ends, and what is said of it.

    Attributes:
        state: Its state.
        cause: What every answer says of why, or None.
        severity: Of its alert; None where it completed.
        leave: What is raised in it, or the ending that it is given.
    """

    state: str
    cause: str | None = None
    severity: str | None = None
    leave: BaseException | RunEnding | None = None


STOP = StopRequested(
    "ada asked for it",
    StopRequest("ada", "enough", "2026-01-02T03:04:05.000000Z", 0),
)
ENDS = {
    "completed": End("completed"),
    "failed": End(
        "failed", "OSError: no space left", "critical", OSError("no space left.\n  at all")
    ),
    "failed_by_hand": End("failed", None, "critical"),
    "interrupted_by_hand": End("interrupted", None, "error"),
    "sigterm": End("interrupted", "SIGTERM", "critical", RunEnding("signal", "SIGTERM")),
    "memory": End(
        "interrupted", "out of memory", "critical", RunEnding("out_of_memory", "out of memory")
    ),
    "preempted": End("interrupted", "preempted", "error", RunEnding("preempted", "preempted")),
    "ctrl_c": End("interrupted", "SIGINT", "warning", KeyboardInterrupt()),
    "exit_3": End("interrupted", "exit status 3", "critical", SystemExit(3)),
    "exit_0": End("interrupted", "exit status 0", "warning", SystemExit(0)),
    "stopped": End("interrupted", "ada asked for it", "warning", STOP),
    "lost": End("lost", "has ended", "critical"),
}
BROKEN_OFF = [name for name in ENDS if name != "completed"]
HEALTH = {"critical": 30, "error": 60, "warning": 80}


def leave(session, end):
    if isinstance(end.leave, BaseException):
        with pytest.raises(type(end.leave)), session:
            raise end.leave
        return
    session.open_run.ending = end.leave
    session.end_run(end.state)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run for each end, and one that the others are held against."""
    folder = tmp_path_factory.mktemp("ends")
    for name, end in [("reference", ENDS["completed"]), *ENDS.items()]:
        if name == "lost":
            killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
            assert killed.returncode == -signal.SIGKILL
            continue
        session = quark.start_run(
            project="p", name=name, config={"lr": 1}, storage_dir=folder, system_metrics=False
        )
        metrics = quark.MetricsLogger(session)
        for step in range(STEPS if end.state == "completed" else STEPS // 2):
            metrics.log("val/loss", 1 / (step + 1), step=step)
        leave(session, end)
    return folder


@pytest.fixture(scope="module")
def source(store):
    source = open_source(store)
    yield source
    source.close()


@pytest.fixture(scope="module")
def bench(store):
    bench = Workbench(store, None)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def desk(source):
    desk = AnalysisDesk(source, LocalAnalyzer(source.open_run))
    yield desk
    desk.close(60.0)


def find_id(source, name):
    return next(run.run.id for run in source.reader.list_runs() if run.run.name == name)


def tells(text, end):
    """Whether a text says how the run ended, and why."""
    words = " ".join(str(text).split())
    return end.state in words and (end.cause is None or end.cause in words)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ENDS)
def test_runs_lists_how_each_ended(invoke, store, name):
    end = ENDS[name]
    lines = invoke("runs", "-d", store).stdout.splitlines()
    (row,) = [line for line in lines if line.split()[1:2] == [name]]
    assert tells(row, end)
    (told,) = json.loads(invoke("runs", "-d", store, "-w", f"name == '{name}'", "--json").stdout)
    assert told["state"] == end.state
    assert (told["ending"] is None) == (end.cause is None)
    if end.cause is not None:
        assert end.cause in told["ending"]["message"]


@pytest.mark.parametrize("name", ENDS)
def test_show_says_why_and_where_the_traceback_is(invoke, store, source, name):
    end, run_id = ENDS[name], find_id(source, name)
    shown = invoke("show", name, "-d", store).stdout
    status = next(line for line in shown.splitlines() if "status" in line)
    assert tells(status, end)
    command = f"quark logs {run_id} --events"
    assert (command in shown) == isinstance(end.leave, BaseException)
    if command in shown:
        printed = invoke(*command.split()[1:], "-d", store).stdout
        assert "Traceback (most recent call last)" in printed
        assert type(end.leave).__name__ in printed


@pytest.mark.sampled
@pytest.mark.parametrize("name", ENDS)
def test_analyze_tells_the_end_first_and_no_gate_passes(invoke, store, name):
    end = ENDS[name]
    for level in ("warning", "error", "critical"):
        result = invoke("analyze", name, "-d", store, "--fail-on", level, "--no-store")
        assert result.exit_code == (0 if end.severity is None else 3)
    assert tells(result.output, end)
    told = json.loads(invoke("analyze", name, "-d", store, "--json", "--no-store").stdout)
    overall = told["health_scores"][0]
    if end.severity is None:
        assert told["alerts"] == []
        # It was never validated beside a training loss, and nothing speaks against it.
        assert "No problem found" in overall["summary"]
        return
    first = told["alerts"][0]
    assert (first["rule_id"], first["severity"]) == ("broken_off", end.severity)
    assert first["step"] == STEPS // 2 - 1
    assert tells(first["fact"], end)
    assert "\n" not in first["fact"]
    assert first["fact"] in overall["summary"]
    assert overall["score"] == HEALTH[end.severity]
    assert overall["status"] != "healthy"
    # Whatever is asked for or left out, it is no result.
    only = ("--rule", "plateau", "--allow-unknown")
    assert invoke("analyze", name, "-d", store, "--fail-on", "critical", *only).exit_code == 3


@pytest.mark.sampled
@pytest.mark.parametrize("name", ENDS)
def test_compare_passes_on_neither_side(invoke, store, name):
    end = ENDS[name]
    for sides in ((name, "reference"), ("reference", name)):
        result = invoke("compare", *sides, "-d", store, "--fail-on-worse")
        assert result.exit_code == (0 if end.severity is None else 3)
        if end.severity is None:
            assert "did not" not in result.stderr
            continue
        assert tells(result.stderr, end)
        assert f"after step {STEPS // 2 - 1}" in result.stderr
        assert tells(result.stdout, end)
        told = json.loads(invoke("compare", *sides, "-d", store, "--json").stdout)
        assert name in told["notes"][0]
        assert tells(told["notes"][0], end)
        assert told["summary"].startswith(told["notes"][0])
        looks_good = {"better", "equivalent"} if sides[1] == name else {"worse", "equivalent"}
        assert not {diff["verdict"] for diff in told["metric_diffs"]} & looks_good


@pytest.mark.parametrize("name", ENDS)
def test_why_says_first_which_run_broke_off(invoke, store, name):
    end = ENDS[name]
    for sides, word in (((name, "reference"), "first"), (("reference", name), "second")):
        result = invoke("why", *sides, "-d", store, "--fail-on-worse")
        assert result.exit_code == (0 if end.severity is None else 3)
        if end.severity is not None:
            line = result.stdout.splitlines()[0]
            assert line.startswith(f"The {word} ({name})")
            assert tells(line, end)
            assert "no change beyond seed noise" not in result.stdout


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_a_run_that_broke_off_is_no_reference(invoke, store, name):
    held = invoke("why", name, "-d", store).stdout
    assert ENDS[name].state in held.splitlines()[1]
    reference = held.splitlines()[0].partition('"')[2].partition('"')[0]
    assert reference in ("reference", "completed")


@pytest.mark.parametrize("name", ENDS)
def test_the_page_says_it_in_the_list_and_on_the_run(source, desk, name):
    end, run_id = ENDS[name], find_id(source, name)
    desk.request(source.summarize(run_id))
    told = tell_run(source, desk, ChangeDesk(source, desk), run_id)
    standing = list_standings(source, desk, Parameters([("run", run_id)]))["standings"][run_id]
    for said in (told["run"], standing):
        assert said["state"] == end.state
        assert (said["ending"] is None) == (end.cause is None)
        if end.cause is not None:
            assert end.cause in said["ending"]["message"]


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_the_page_says_first_why_it_is_not_as_another(source, name):
    sides = {"primary": (find_id(source, name),), "reference": (find_id(source, "reference"),)}
    found = LocalAnalyzer(source.open_run).compare(ComparedPair(**sides, explains=True))
    assert found["headline"].startswith(f"The second ({name}) ")
    assert tells(found["headline"], ENDS[name])


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_a_report_begins_with_it(source, name):
    end = ENDS[name]
    report = quark.report(find_id(source, name), storage_dir=source.storage_dir)
    lines = str(report).splitlines()
    assert tells(lines[0], end)
    found = report.contents[0].data["analysis"]["findings"][0]
    assert found["rule"] == "broken_off"
    for text in (str(report), report.to_markdown(), report.to_html()):
        assert end.cause is None or end.cause in text


@pytest.mark.sampled
@pytest.mark.parametrize("name", ENDS)
def test_tools_of_mcp_say_it(bench, name):
    end = ENDS[name]
    shown = json.loads(show_run(bench, run=name))
    assert shown["state"] == end.state
    assert end.cause is None or end.cause in shown["ending"]["message"]
    alerts = json.loads(list_alerts(bench, run=name))["alerts"]
    assert [alert["rule"] for alert in alerts][:1] == (
        [] if end.severity is None else ["broken_off"]
    )
    compared = json.loads(compare_runs(bench, primary=[name], reference=["reference"]))
    text = write_report(bench, run=name)
    if end.severity is not None:
        assert tells(compared["notes"][0], end)
        assert tells(text.splitlines()[0], end)


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_a_notice_says_why(source, name):
    end = ENDS[name]
    stored = source.reader.load_run(find_id(source, name))
    reason = None if stored.ending is None else stored.ending.describe()
    notice = describe_end(stored.run, stored.state, reason)
    assert end.state in notice.title
    assert end.cause is None or end.cause in notice.text


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_follow_ends_with_it(invoke, store, name):
    end = ENDS[name]
    result = invoke("follow", name, "-d", store, "--lines", "--no-analyze")
    assert result.exit_code in (3, 4, 5)
    assert tells(result.stdout.splitlines()[-1], end)


def test_groups_sum_up_results_alone(invoke, store):
    told = json.loads(invoke("runs", "-d", store, "--group-by", "config", "--json").stdout)
    (group,) = told
    results = [name for name, end in ENDS.items() if end.severity in (None, "warning")]
    assert group["count"] == len(ENDS) + 1
    assert group["measured"] == len(results) + 1


def test_an_analysis_that_was_stored_while_the_run_went_on_is_told_the_end(invoke, tmp_path):
    session = quark.start_run(project="p", name="late", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    for step in range(STEPS):
        metrics.log("val/loss", 1 / (step + 1), step=step)
    result = quark.AnalyzerEngine(session).analyze(store=True)
    assert result.stored
    assert result.alerts == ()
    leave(session, ENDS["failed"])
    source = open_source(tmp_path)
    desk = AnalysisDesk(source, LocalAnalyzer(source.open_run))
    found = desk.find(source.summarize(str(session.run_id)))
    assert found is not None
    assert (found.state, found.alerts[0].rule_id) == ("stored", "broken_off")
    assert (found.scores[0].score, found.scores[0].status) == (30, "critical")
    desk.close(60.0)
    source.close()
    assert "alerts: 1 (1 critical)" in invoke("show", "late", "-d", tmp_path).stdout
    told = json.loads(invoke("compare", "late", "late", "-d", tmp_path, "--json").stdout)
    assert told["alert_diff"]["shared"][0]["primary"]["rule_id"] == "broken_off"


def test_an_end_that_was_taken_up_again_is_forgotten(invoke, tmp_path):
    session = quark.start_run(project="p", name="back", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    for step in range(STEPS):
        metrics.log("val/loss", 1 / (step + 1), step=step)
    leave(session, ENDS["failed"])
    assert invoke("analyze", "back", "-d", tmp_path).exit_code == 0  # stored, with the end
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path):
        pass
    stored = open_source(tmp_path).reader.load_run(str(session.run_id))
    assert (stored.state, stored.ending, stored.is_broken_off) == ("completed", None, False)
    shown = invoke("show", "back", "-d", tmp_path).stdout
    assert "alerts: " not in shown
    assert "traceback" not in shown
    source = open_source(tmp_path)
    desk = AnalysisDesk(source, LocalAnalyzer(source.open_run))
    assert desk.find(source.summarize(str(session.run_id))) is None
    desk.close(60.0)
    source.close()
    assert invoke("analyze", "back", "-d", tmp_path, "--fail-on", "warning").exit_code == 0


def test_a_run_that_goes_on_is_judged_by_its_alerts_alone(invoke, tmp_path):
    session = quark.start_run(project="p", name="on", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    for step in range(STEPS):
        metrics.log("val/loss", 1 / (step + 1), step=step)
    metrics.flush()
    result = invoke("analyze", "on", "-d", tmp_path, "--fail-on", "warning", "--no-store")
    assert result.exit_code == 0
    # What is not through yet passes no comparison: it may still go wrong.
    gate = invoke("compare", "on", "on", "-d", tmp_path, "--fail-on-worse")
    assert gate.exit_code == 3
    assert "is still running at step" in gate.stderr
    assert invoke("compare", "on", "on", "-d", tmp_path).exit_code == 0
    session.end_run()
