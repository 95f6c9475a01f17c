"""What analyzers find, in W&B's own files: of an open run, and of one that has ended."""

import json
import shutil
import time

import pytest
from click.testing import CliRunner

import quark
from quark.analysis import outputs
from quark.analysis.engine import AnalyzerEngine
from quark.analysis.outputs import open_analysis
from quark.analysis.phases import PhaseAnalyzer
from quark.cli.main import cli
from quark_core.delivery.delivery_state import Lease
from quark_core.records import PhaseRecord
from quark_core.runs import recovery


@pytest.fixture
def train(start):
    def begin(**arguments):
        session = start(**arguments)
        metrics = quark.MetricsLogger(session)
        for step in range(100):
            metrics.log("train/loss", 1 / (step + 1) if step < 60 else float("nan"), step=step)
        return session

    return begin


def list_generations(mirrored):
    """The generations that history rows are of, sorted, each once."""
    marks = [mark for row in mirrored.rows for mark in row.get("quark/seq", "").split()]
    writers = [mark.rsplit(".", 2)[0] for mark in marks]
    return sorted(writer for writer in set(writers) if "." in writer)


@pytest.mark.long
def test_of_an_open_run_they_are_in_its_own_file(train, deliver, read_mirror):
    session = train()
    deliver(session)
    result = AnalyzerEngine(session).analyze()
    phases = PhaseAnalyzer(session).analyze().phases
    session.end_run()
    mirrored = read_mirror(session.run_path)
    assert len(mirrored.paths) == 1
    assert mirrored.exit_codes == [0]
    assert list_generations(mirrored) == ["analyzer.1", "phases.1"]
    levels = {"info": 1, "warning": 2, "error": 3, "critical": 4}
    assert result.alerts
    for alert in result.alerts:
        (point,) = mirrored.points(f"quark/alerts/{alert.rule_id}")
        assert point == (alert.step, levels[alert.severity])
    for score in result.health_scores:
        points = [value for _, value in mirrored.points(f"quark/health/{score.score_key}")]
        assert points == ([pytest.approx(score.score)] if score.known else [])
    assert [index for _, index in mirrored.points("quark/phase_index")] == list(range(len(phases)))
    # A finding that is for information is no alert.
    told = {alert.title for alert in result.alerts if alert.severity != "info"}
    assert {alert.title for alert in mirrored.of("alert")} == told
    assert list(recovery.find_folders(session.context.storage_dir)) == []


@pytest.mark.long
@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 1)])
def test_after_the_end_the_same_file_has_them_and_the_exit_code_stays(
    train, read_mirror, status, code
):
    session = train()
    session.end_run(status)
    (before,) = read_mirror(session.run_path).paths
    first = read_mirror(session.run_path)
    AnalyzerEngine(quark.open_run(session.run_id, session.context.storage_dir)).analyze(store=True)
    deadline = time.monotonic() + 100
    while (mirrored := read_mirror(session.run_path)).paths != [before]:
        assert time.monotonic() < deadline, "its folders are not joined"
        time.sleep(0.1)
    assert list_generations(mirrored) == ["analyzer.1"]
    assert mirrored.exit_codes == [code]
    assert mirrored.summary["quark/status"] == status
    assert {run.run_id for run in mirrored.of("run")} == {session.run_id}
    # Nothing of the run itself is sent again.
    assert repr(mirrored.points("train/loss")) == repr(first.points("train/loss"))
    numbers = [row["_step"] for row in mirrored.rows]
    assert numbers == sorted(set(numbers))


@pytest.mark.long
def test_a_mirror_that_is_held_gets_each_row_once_by_sync(train, read_mirror):
    session = train()
    session.end_run()
    root = session.context.storage_dir
    folder = next(session.run_path.glob("mirrors/wandb/*"))
    lease = Lease(folder / "lease")
    assert lease.take()
    assert AnalyzerEngine(session).analyze().stored
    assert [one.path.name for one in recovery.find_folders(root)] == ["analyzer.1"]
    lease.release()
    for _ in range(2):
        recovery.sync(root)
    mirrored = read_mirror(session.run_path)
    assert list_generations(mirrored) == ["analyzer.1"]
    assert len(mirrored.points("quark/health/overall")) == 1


@pytest.mark.long
def test_a_journal_that_is_delivered_twice_is_there_once(train, read_mirror, monkeypatch):
    session = train()
    session.end_run()
    root = session.context.storage_dir
    monkeypatch.setattr(outputs, "deliver_outputs", lambda *_: None)
    AnalyzerEngine(session).analyze()
    journal = session.run_path / "journal" / "analyzer.1"
    shutil.copytree(journal, root / "kept")
    recovery.sync(root)
    assert not journal.exists()
    # As after a process that died between W&B's file and its own mark.
    shutil.copytree(root / "kept", journal)
    recovery.sync(root)
    assert len(read_mirror(session.run_path).points("quark/health/overall")) == 1


@pytest.mark.long
def test_what_never_was_sent_is_known_of_and_replayed_once(train, read_mirror, monkeypatch):
    session = train()
    session.end_run()
    root = str(session.context.storage_dir)
    # As after a process that was killed before the journal was there.
    monkeypatch.setattr(outputs, "journal_outputs", lambda *_, **__: None)
    result = AnalyzerEngine(session).analyze()

    def call(*arguments):
        done = CliRunner().invoke(cli, ["mirror", *arguments, session.run_id, "-d", root, "--json"])
        return done.exit_code, json.loads(done.stdout)

    status, (_, state) = call("status")
    assert (status, state["outputs"]["alert"]) == (3, [len(result.alerts), 0])
    for _ in range(2):
        assert call("replay")[0] == 0
        mirrored = read_mirror(session.run_path)
        assert list_generations(mirrored) == ["analyzer.1"]
        assert len(mirrored.points("quark/health/overall")) == 1
        assert mirrored.points("train/loss")[:1] == [(0, 1.0)]
        assert len(mirrored.points("train/loss")) == 100
    status, (_, state) = call("status")
    assert (status, state["outputs"]["alert"]) == (0, [len(result.alerts)] * 2)


@pytest.mark.long
def test_the_table_shows_the_newest_generation(train, deliver, read_mirror):
    session = train()
    deliver(session)
    target = open_analysis(session)
    for name in ("stagnation", "divergence"):
        phase = PhaseRecord(None, "", 0, 0, 0, 10**15, name, name.title(), "", 0, 9)
        target.write("phases", True, {"phase": [phase]})
    session.end_run()
    assert list_generations(read_mirror(session.run_path)) == ["phases.1", "phases.2"]
    (table,) = session.run_path.glob("mirrors/wandb/*/wandb/**/quark/tables/phases*.table.json")
    assert json.loads(table.read_text())["data"] == [["Divergence", 0, 9, ""]]
