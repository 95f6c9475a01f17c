"""What analyzers find reaches the run's mirrors; with the real CSV mirror and scripted ones."""

import csv
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

import quark
from quark_core import recovery
from quark_core.analysis.engine import AnalyzerEngine
from quark_core.analysis.outputs import open_analysis
from quark_core.analysis.phases import PhaseAnalyzer
from quark_core.backend import BackendDefinition
from quark_core.delivery.generation_journal import frame_outputs, split_generation
from quark_core.errors import BackendUnavailable
from quark_core.mirrors.generations import load_generations
from quark_core.query import Query
from quark_core.records import AlertRecord, EvidenceRecord
from quark_core.registry import default_registry
from quark_core.testing.faults import ScriptedBackend, define_scripted

KINDS = ("alerts", "health_scores", "phases")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("QUARK_"):
            monkeypatch.delenv(name)


@pytest.fixture
def add_backend(monkeypatch):
    def add(name, backend, **fields):
        definition = define_scripted(name, backend, **fields)
        monkeypatch.setitem(default_registry()._definitions, name, definition)
        return backend

    return add


class Choosy(ScriptedBackend):
    """Takes the run's records, and of what analyzers found nothing as long as there is a fault."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.asked = threading.Event()

    def write(self, batch):
        if self.fault is not None and split_generation(batch.writer_id) is not None:
            self.asked.set()
            if self.fault == "unavailable":
                raise BackendUnavailable("planted outage")
            self.release.wait()
        super().write(batch)


def start(path, **options):
    session = quark.start_run(project="p", storage_dir=path, **options)
    metrics = quark.MetricsLogger(session)
    for step in range(300):
        # The loss is lost at step 200, which no rule overlooks.
        metrics.log("train/loss", 1 / (step + 1) if step < 200 else float("nan"), step=step)
    return session


def reopen(path, session):
    """The run as another process sees it, with the backends that are installed now."""
    return quark.open_run(session.run_id, path)


def run_folder(path, session):
    return path / ".quark" / "runs" / session.run_id


def read_writers(folder):
    """Kind -> the generations in its CSV file, in order, each once."""
    found = {}
    for name in KINDS:
        file = folder / f"{name}.csv"
        lines = file.read_text().splitlines() if file.exists() else ()
        found[name] = list(dict.fromkeys(row["writer"] for row in csv.DictReader(lines)))
    return found


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_journals(path):
    return [folder.path.name for folder in recovery.find_folders(path)]


def list_records(backend, *kinds):
    found = [batch for batch in backend.stored if batch.kind in kinds]
    return [(batch.writer_id, batch.kind, batch.number) for batch in found]


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


def test_after_the_end_they_are_appended_and_each_generation_is_told_apart(tmp_path):
    with start(tmp_path, backends="csv") as session:
        pass
    folder = run_folder(tmp_path, session) / "csv"
    lifecycle = (folder / "lifecycle.csv").read_bytes()
    AnalyzerEngine(session).analyze()
    AnalyzerEngine(quark.open_run(session.run_id, tmp_path)).analyze()
    AnalyzerEngine(session.context).analyze(replace_existing=False)
    assert read_writers(folder)["health_scores"] == ["analyzer.1", "analyzer.2", "analyzer.3"]
    assert (folder / "lifecycle.csv").read_bytes() == lifecycle
    assert quark.open_run(session.run_id, tmp_path, backend="csv").status == "completed"
    assert list_journals(tmp_path) == []


def test_a_run_without_mirrors_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a run without mirrors must not come here")

    monkeypatch.setattr("quark_core.analysis.mirrored_outputs.journal_outputs", fail)
    with start(tmp_path) as session:
        assert AnalyzerEngine(session).analyze().stored
    assert AnalyzerEngine(session).analyze().stored
    assert AnalyzerEngine(quark.open_run(session.run_id, tmp_path)).analyze().generation == 3
    assert not run_folder(tmp_path, session).exists()


def test_a_mirror_that_is_down_gets_them_by_sync(tmp_path, add_backend, caplog):
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late,csv") as session:
        pass
    down = add_backend("late", ScriptedBackend(always="unavailable"))
    with caplog.at_level(logging.WARNING, logger="quark"):
        assert AnalyzerEngine(reopen(tmp_path, session)).analyze().stored
    assert "waits for the run's mirrors" in caplog.text
    assert f"quark sync {tmp_path}" in caplog.text
    assert list_journals(tmp_path) == ["analyzer.1"]
    assert down.stored == []
    assert read_writers(run_folder(tmp_path, session) / "csv")["alerts"] == ["analyzer.1"]
    up = add_backend("late", ScriptedBackend())
    recovery.sync(tmp_path)
    assert list_records(up, "alert", "health_score") == [
        ("analyzer.1", "alert", 0),
        ("analyzer.1", "health_score", 1),
    ]
    assert list_journals(tmp_path) == []
    recovery.sync(tmp_path)
    assert len(up.stored) == 2


def test_of_an_open_run_a_mirror_that_comes_back_gets_them_too(tmp_path, add_backend):
    flaky = add_backend("flaky", Choosy("unavailable"))
    session = start(tmp_path, backends="flaky")
    AnalyzerEngine(session).analyze()
    assert flaky.asked.wait(60)
    assert list_journals(tmp_path).count("analyzer.1") == 1
    flaky.fault = None
    wait_until(lambda: len(list_records(flaky, "alert", "health_score")) == 2)
    session.end_run()
    assert list_journals(tmp_path) == []


def test_sync_leaves_them_to_the_process_that_has_the_run_open(tmp_path, add_backend):
    flaky = add_backend("flaky", Choosy("unavailable"))
    session = start(tmp_path, backends="flaky")
    AnalyzerEngine(session).analyze()
    assert flaky.asked.wait(60)
    lanes = [lane for lane in recovery.sync(tmp_path) if lane.writer_id == "analyzer.1"]
    assert [(lane.state, lane.waiting) for lane in lanes] == [("held", 6)]
    assert f"process {os.getpid()} has the run open" in lanes[0].reason
    assert list_records(flaky, "alert") == []
    flaky.fault = None
    session.end_run()
    assert len(list_records(flaky, "alert")) == 1


def test_a_mirror_with_a_password_in_its_uri_is_opened_with_it(tmp_path, monkeypatch):
    places = []

    def open_it(config):
        places.append(config.location)
        return ScriptedBackend()

    definition = BackendDefinition(
        name="locked", summary="wants a password", open=open_it, schemes=("locked",)
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


def test_the_end_of_a_run_is_delivered_though_a_mirror_takes_no_outputs(
    tmp_path, monkeypatch, add_backend
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "2")
    hangs = add_backend("slow", Choosy("hang"))
    session = start(tmp_path, backends="slow")
    AnalyzerEngine(session).analyze()
    assert hangs.asked.wait(60)
    try:
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


def test_where_the_run_itself_waits_they_wait_with_it(tmp_path, add_backend, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    add_backend("late", ScriptedBackend(always="unavailable"))
    with start(tmp_path, backends="late") as session:
        pass
    up = add_backend("late", ScriptedBackend())
    AnalyzerEngine(quark.open_run(session.run_id, tmp_path)).analyze()
    assert up.stored == []
    assert "come first" in caplog.text
    recovery.sync(tmp_path)
    writers = list(dict.fromkeys(batch.writer_id for batch in up.stored))
    assert [split_generation(writer) for writer in writers] == [None, ("analyzer", 1)]


def test_generations_are_delivered_in_their_order_beyond_nine(tmp_path, add_backend):
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    for _ in range(11):
        AnalyzerEngine(reopen(tmp_path, session)).analyze()
    up = add_backend("late", ScriptedBackend())
    recovery.sync(tmp_path)
    writers = dict.fromkeys(batch.writer_id for batch in up.stored)
    assert list(writers) == [f"analyzer.{number}" for number in range(1, 12)]


def test_a_backend_that_cannot_tell_duplicates_is_never_sent_one_twice(tmp_path, add_backend):
    add_backend("once", ScriptedBackend(), idempotent=False)
    with start(tmp_path, backends="once") as session:
        pass
    # It takes the alerts and fails with the scores, which it may have stored or not.
    add_backend("once", ScriptedBackend(["ok"], always="unavailable"), idempotent=False)
    AnalyzerEngine(reopen(tmp_path, session)).analyze()
    up = add_backend("once", ScriptedBackend(), idempotent=False)
    (lane,) = recovery.sync(tmp_path)
    assert (lane.state, lane.unknown) == ("delivered", 5)
    assert up.stored == []
    assert list_journals(tmp_path) == []


def test_a_backend_that_fails_to_close_keeps_no_other_journal_waiting(tmp_path, add_backend):
    class Stubborn(ScriptedBackend):
        def close(self):
            raise BackendUnavailable("planted: files wait")

    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    for _ in range(2):
        AnalyzerEngine(reopen(tmp_path, session)).analyze()
    add_backend("late", Stubborn())
    lanes = recovery.sync(tmp_path)
    assert [(lane.writer_id, lane.state) for lane in lanes] == [
        ("analyzer.1", "delivered"),
        ("analyzer.2", "delivered"),
    ]
    assert all("files wait" in lane.reason for lane in lanes)


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


def test_a_rank_that_joined_the_run_sends_nothing(tmp_path):
    with start(tmp_path, backends="csv") as session:
        session.open_run.leads = False
        assert AnalyzerEngine(session).analyze().stored
        session.open_run.leads = True
    assert read_writers(run_folder(tmp_path, session) / "csv")["alerts"] == []


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
        assert AnalyzerEngine(quark.open_run(run_id, tmp_path)).analyze().generation == 1
        folder = tmp_path / ".quark" / "runs" / run_id / "csv"
        wait_until(lambda: read_writers(folder)["health_scores"] == ["analyzer.1"])
        # One process has written here, so there are no files of a second one.
        assert sorted(path.name for path in folder.glob("health_scores*")) == ["health_scores.csv"]
        other.stdin.close()
    assert list_journals(tmp_path) == []


def test_killed_before_the_journal_the_lack_is_seen_and_mended(tmp_path):
    script = f"""
import os, quark, signal, sys
from quark_core.analysis import mirrored_outputs
from quark_core.analysis.engine import AnalyzerEngine
session = quark.open_run(sys.argv[2], sys.argv[1])
mirrored_outputs.journal_outputs = lambda *_, **__: os.kill(os.getpid(), {int(signal.SIGKILL)})
AnalyzerEngine(session).analyze()
"""
    with start(tmp_path, backends="csv") as session:
        pass
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), session.run_id])
    assert done.returncode == -signal.SIGKILL
    assert open_analysis(session).read_outputs("health_score", "analyzer").count == 5
    assert list_journals(tmp_path) == []

    def call(*arguments):
        command = [sys.executable, "-m", "quark", "mirror", *arguments, session.run_id]
        found = subprocess.run([*command, "-d", str(tmp_path), "--json"], capture_output=True)
        return found.returncode, json.loads(found.stdout)

    status, states = call("status")
    assert (status, states[1]["outputs"]["health_score"]) == (1, [5, 0])
    status, (found,) = call("verify")
    assert (status, found["equal"], found["not_kept"]) == (1, False, [])
    assert found["kinds"]["health_score"] == [5, 0]
    assert call("replay")[0] == 0
    assert call("verify")[0] == call("status")[0] == 0
    assert read_writers(run_folder(tmp_path, session) / "csv")["alerts"] == ["analyzer.1"]


def test_killed_with_a_torn_journal_what_is_whole_is_delivered(tmp_path, add_backend):
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    AnalyzerEngine(reopen(tmp_path, session)).analyze()
    (segment,) = run_folder(tmp_path, session).glob("journal/analyzer.1/*.qj")
    segment.write_bytes(segment.read_bytes()[:-5])
    up = add_backend("late", ScriptedBackend())
    recovery.sync(tmp_path)
    assert list_records(up, "alert", "health_score") == [("analyzer.1", "alert", 0)]


def test_without_room_for_the_journal_the_analysis_is_stored_all_the_same(tmp_path, caplog):
    with start(tmp_path, backends="csv") as session:
        pass
    folder = run_folder(tmp_path, session) / "journal"
    folder.write_text("in the way")
    assert AnalyzerEngine(session).analyze().stored
    assert f"quark mirror replay {session.run_id}" in caplog.text


@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_a_store_that_is_its_journals_takes_no_outputs_for_records(
    tmp_path, monkeypatch, add_backend, journal_only
):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    AnalyzerEngine(reopen(tmp_path, session)).analyze()
    read = quark.open_run(session.run_id, tmp_path)
    assert read.open_run.read("alert", Query(all_attempts=True)).count == 0
    assert open_analysis(read).read_outputs("alert", "analyzer").count > 0


def test_batches_are_the_same_when_they_are_made_again(tmp_path):
    with start(tmp_path, backends="csv") as session:
        pass
    store = open_analysis(session)
    odd = EvidenceRecord("metric", "é", "", observed_value=3, threshold_value=0.1)
    alerts = [
        AlertRecord(
            None, "", 0, 0, 0, 7, "r", "runtime", "info", f"t{number}", "", "", "", evidence=(odd,)
        )
        for number in range(1200)
    ]
    number = store.write("analyzer", True, {"alert": alerts, "phase": []})
    again = load_generations(session.open_run.reader, session.run_id)
    assert list(again) == ["analyzer.1"]
    batches = again["analyzer.1"]
    assert [(b.number, b.kind, b.count) for b in batches] == [
        (0, "alert", 500),
        (1, "alert", 500),
        (2, "alert", 200),
    ]
    identified = [
        msgspec.structs.replace(
            alert, run_id=session.run_id, writer_id=f"analyzer.{number}", sequence=place
        )
        for place, alert in enumerate(alerts)
    ]
    assert frame_outputs({"alert": identified}) == batches


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
