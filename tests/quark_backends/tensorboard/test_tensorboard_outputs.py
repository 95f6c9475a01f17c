"""What analyzers find, in event files of their own beside those of the run."""

import shutil

import pytest

import quark
from quark.analysis import outputs
from quark.analysis.engine import AnalyzerEngine
from quark.analysis.phases import PhaseAnalyzer
from quark_core.runs import recovery
from quark_core.testing.fakes import BatchMaker


def train(start):
    session = start()
    metrics = quark.MetricsLogger(session)
    for step in range(100):
        metrics.log("train/loss", 1 / (step + 1) if step < 60 else float("nan"), step=step)
    return session


def list_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*tfevents*")}


@pytest.mark.long
def test_each_generation_has_an_event_file_of_its_own(start, read_events):
    session = train(start)
    result = AnalyzerEngine(session).analyze()
    session.end_run()
    folder = session.run_path / "tensorboard"
    before = list_files(folder)
    PhaseAnalyzer(quark.open_run(session.run_id, session.context.storage_dir)).analyze(store=True)
    AnalyzerEngine(session).analyze()
    after = list_files(folder)
    # What was there is as it was, bytes and all.
    assert {path: after[path] for path in before} == before
    assert {path.parent.name for path in after if path not in before} == {
        "writer-phases_1",
        "writer-analyzer_2",
    }
    for number in (1, 2):
        events = read_events(folder / f"writer-analyzer_{number}")
        for score in result.health_scores:
            points = [value for _, value in events.points(f"quark/health/{score.score_key}")]
            assert points == ([pytest.approx(score.score)] if score.known else [])
        (alert,) = result.alerts
        assert events.points(f"quark/alerts/{alert.rule_id}") == [(alert.step, 4.0)]
        ((_, text),) = events.texts(f"alerts/{alert.rule_id}")
        assert alert.title in text
    phases = read_events(folder / "writer-phases_1").points("quark/phase_index")
    assert [value for _, value in phases] == list(range(len(phases)))
    assert phases


@pytest.mark.long
def test_a_journal_that_is_delivered_twice_is_there_once(start, read_events, monkeypatch):
    session = train(start)
    session.end_run()
    root = session.context.storage_dir
    monkeypatch.setattr(outputs, "deliver_outputs", lambda *_: None)
    AnalyzerEngine(session).analyze()
    journal = session.run_path / "journal" / "analyzer.1"
    shutil.copytree(journal, root / "kept")
    recovery.sync(root)
    assert not journal.exists()
    # As after a process that died between the mirror's files and its own mark.
    shutil.copytree(root / "kept", journal)
    recovery.sync(root)
    events = read_events(session.run_path / "tensorboard" / "writer-analyzer_1")
    assert len(events.points("quark/health/overall")) == 1


def test_outputs_that_come_first_do_not_take_the_folder_of_the_run(backend, config, read_events):
    found, run = BatchMaker("run0", writer_id="analyzer.1"), BatchMaker("run0")
    backend.write(found.metrics(("early", 1, 1.0)))
    backend.write(run.metrics(("train/loss", 1, 2.0)))
    folder = config.run_path / "tensorboard"
    assert read_events(folder).scalars == ["train/loss"]
    assert read_events(folder / "writer-analyzer_1").scalars == ["early"]
