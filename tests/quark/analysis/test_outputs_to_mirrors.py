"""What analyzers find reaches the mirrors of a run, open or ended; with the real CSV mirror."""

import subprocess
import sys
import threading

import pytest
from mirrored_runs import (
    Choosy,
    list_journals,
    list_records,
    read_writers,
    run_folder,
    start,
    wait_until,
)

import quark
from quark.analysis.engine import AnalyzerEngine
from quark.analysis.outputs import open_analysis
from quark.analysis.phases import PhaseAnalyzer
from quark_core.backends.contract import BackendDefinition
from quark_core.backends.registry import default_registry
from quark_core.delivery.journal import split_generation
from quark_core.records.query import Query
from quark_core.testing.fakes import ScriptedBackend

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.mark.long
def test_in_an_open_session_the_mirror_has_them_before_the_run_ends(tmp_path):
    session = start(tmp_path, backends="csv")
    folder = run_folder(tmp_path, session) / "csv"
    result = AnalyzerEngine(session).analyze()
    assert result.stored
    assert result.alerts
    wait_until(lambda: read_writers(folder)["health_scores"] == ["analyzer.1"])
    PhaseAnalyzer(session).analyze()
    session.end_run()
    assert read_writers(folder) == {
        "alerts": ["analyzer.1"],
        "health_scores": ["analyzer.1"],
        "phases": ["phases.1"],
    }
    assert list_journals(tmp_path) == []
    mirrored = quark.open_run(session.run_id, tmp_path, backend="csv")
    stored = open_analysis(session).read_outputs("alert", "analyzer").to_records()
    assert (
        mirrored.open_run.read("alert", Query(all_attempts=True)).to_records()
        == stored
        == result.alerts
    )


@pytest.mark.long
def test_the_training_thread_waits_for_no_mirror(tmp_path, add_backend):
    hangs = add_backend("slow", Choosy("hang"))
    session = start(tmp_path, backends="slow")
    try:
        AnalyzerEngine(session).analyze()
        assert hangs.asked.wait(60)
        # It hangs in there, and the run goes on.
        quark.MetricsLogger(session).log("train/loss", 1.0, step=301)
        session.flush()
        assert AnalyzerEngine(session).analyze().generation == 2
    finally:
        hangs.release.set()
    session.end_run()
    assert {writer for writer, _, _ in list_records(hangs, "alert")} == {"analyzer.1", "analyzer.2"}


class LateStart(ScriptedBackend):
    """Is asked for the run's start, and takes it only when it is released."""

    def __init__(self):
        super().__init__()
        self.asked = threading.Event()

    def write(self, batch):
        if split_generation(batch.writer_id) is None:
            self.asked.set()
            self.release.wait()
        super().write(batch)


@pytest.mark.long
def test_a_mirror_has_the_run_before_it_has_what_was_found(tmp_path, add_backend):
    mirror = add_backend("late", LateStart())
    session = start(tmp_path, backends="late")
    try:
        assert mirror.asked.wait(60)
        AnalyzerEngine(session).analyze()
        # The thread that delivers outputs has tried, and leaves this for later.
        wait_until(lambda: "quark-outputs" not in {thread.name for thread in threading.enumerate()})
        assert mirror.stored == []
    finally:
        mirror.release.set()
    session.end_run()
    first = mirror.stored[0]
    assert split_generation(first.writer_id) is None
    assert {writer for writer, _, _ in list_records(mirror, "alert")} == {"analyzer.1"}
    assert list_journals(tmp_path) == []


@pytest.mark.long
def test_after_the_end_they_are_appended_and_each_generation_is_told_apart(tmp_path):
    with start(tmp_path, backends="csv") as session:
        pass
    folder = run_folder(tmp_path, session) / "csv"
    lifecycle = (folder / "lifecycle.csv").read_bytes()
    AnalyzerEngine(session).analyze()
    AnalyzerEngine(quark.open_run(session.run_id, tmp_path)).analyze(store=True)
    AnalyzerEngine(session.context).analyze(replace_existing=False)
    assert read_writers(folder)["health_scores"] == ["analyzer.1", "analyzer.2", "analyzer.3"]
    assert (folder / "lifecycle.csv").read_bytes() == lifecycle
    assert quark.open_run(session.run_id, tmp_path, backend="csv").status == "completed"
    assert list_journals(tmp_path) == []


@pytest.mark.long
def test_a_run_without_mirrors_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a run without mirrors must not come here")

    monkeypatch.setattr("quark.analysis.outputs.journal_outputs", fail)
    with start(tmp_path) as session:
        assert AnalyzerEngine(session).analyze().stored
    assert AnalyzerEngine(session).analyze().stored
    assert (
        AnalyzerEngine(quark.open_run(session.run_id, tmp_path)).analyze(store=True).generation == 3
    )
    assert not run_folder(tmp_path, session).exists()


@pytest.mark.long
def test_a_mirror_with_a_password_in_its_uri_is_opened_with_it(tmp_path, monkeypatch):
    places = []

    def open_it(config):
        places.append(config.location)
        return ScriptedBackend()

    definition = BackendDefinition(
        name="locked",
        summary="wants a password",
        open=open_it,
        schemes=("locked",),
        own_process=False,
    )
    monkeypatch.setitem(default_registry()._definitions, "locked", definition)
    session = start(tmp_path, backends="locked+https://me:s3cret@mirror.example")
    AnalyzerEngine(session).analyze()
    session.end_run()
    AnalyzerEngine(session).analyze()
    assert len(places) == 3  # the lane's own, and one for each generation
    assert set(places) == {"https://me:s3cret@mirror.example"}
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if b"s3cret" in path.read_bytes()]


@pytest.mark.long
def test_the_end_of_a_run_is_delivered_though_a_mirror_takes_no_outputs(
    tmp_path, monkeypatch, add_backend
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "10")
    hangs = add_backend("slow", Choosy("hang"))
    session = start(tmp_path, backends="slow")
    AnalyzerEngine(session).analyze()
    assert hangs.asked.wait(60)
    try:
        session.flush()
        session.end_run()
        (status,) = [batch for batch in hangs.stored if "status" in list_actions(batch)]
        assert status.to_records()[-1].data == {"status": "completed"}
        assert session.report_delivery().complete
        assert list_journals(tmp_path) == ["analyzer.1"]
    finally:
        hangs.release.set()
    wait_until(lambda: not list_journals(tmp_path))


def list_actions(batch):
    return batch.decoded.to_list("action") if batch.kind == "lifecycle" else []


@pytest.mark.long
def test_a_monitor_sends_what_it_raises_and_takes_its_journals_for_no_writers(
    tmp_path, add_backend
):
    mirror = add_backend("flaky", Choosy("unavailable"))
    session = start(tmp_path, backends="flaky,csv")
    with quark.TrainingMonitor(session) as monitor:
        wait_until(lambda: monitor.alerts)
        assert mirror.asked.wait(60)
        assert "monitor.1" in list_journals(tmp_path)
        assert not monitor._feed.has_other_writers
        alerts = monitor.alerts
    mirror.fault = None
    session.end_run()
    assert "alert" in {kind for _, kind, _ in list_records(mirror, "alert")}
    mirrored = quark.open_run(session.run_id, tmp_path, backend="csv")
    kept = mirrored.open_run.read("alert", Query(all_attempts=True)).to_records()
    assert {one.rule_id for one in kept} >= {one.rule_id for one in alerts}


@pytest.mark.long
def test_a_rank_that_joined_the_run_sends_nothing(tmp_path):
    with start(tmp_path, backends="csv") as session:
        session.open_run.leads = False
        assert AnalyzerEngine(session).analyze().stored
        session.open_run.leads = True
    assert read_writers(run_folder(tmp_path, session) / "csv")["alerts"] == []


@pytest.mark.long
def test_the_run_of_another_process_is_served_by_that_process(tmp_path):
    script = (
        "import quark, sys; s = quark.start_run(project='p', storage_dir=sys.argv[1],"
        "backends='csv'); m = quark.MetricsLogger(s);"
        "[m.log('train/loss', float('nan'), step=i) for i in range(50)]; s.flush();"
        "print(s.run_id, flush=True); sys.stdin.read(); s.end_run()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        run_id = other.stdout.readline().strip()
        assert AnalyzerEngine(quark.open_run(run_id, tmp_path)).analyze(store=True).generation == 1
        folder = tmp_path / ".quark" / "runs" / run_id / "csv"
        wait_until(lambda: read_writers(folder)["health_scores"] == ["analyzer.1"])
        # One process has written here, so there are no files of a second one.
        assert sorted(path.name for path in folder.glob("health_scores*")) == ["health_scores.csv"]
        other.stdin.close()
    assert list_journals(tmp_path) == []


@pytest.mark.parametrize(
    ("writer_id", "expected"),
    [
        ("analyzer.1", ("analyzer", 1)),
        ("a.b.12", ("a.b", 12)),
        ("0123456789ab", None),
        ("analyzer.0", None),
        ("analyzer.", None),
        (".3", None),
    ],
)
def test_a_generation_is_told_from_a_process(writer_id, expected):
    assert split_generation(writer_id) == expected
