"""Outputs that a mirror did not get at once: outages, kills, and what `sync` makes of them."""

import json
import logging
import os
import signal
import subprocess
import sys

import msgspec
import pytest
from mirrored_runs import (
    Choosy,
    list_journals,
    list_records,
    read_writers,
    reopen,
    run_folder,
    start,
    wait_until,
)

import quark
from quark.analysis.engine import AnalyzerEngine
from quark.analysis.outputs import open_analysis
from quark.mirrors import load_generations
from quark_core.delivery.journal import frame_outputs, split_generation
from quark_core.errors import BackendUnavailable
from quark_core.records import AlertRecord, EvidenceRecord
from quark_core.records.query import Query
from quark_core.runs import recovery
from quark_core.testing.fakes import ScriptedBackend

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.mark.long
def test_a_mirror_that_is_down_gets_them_by_sync(tmp_path, add_backend, caplog):
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late,csv") as session:
        pass
    down = add_backend("late", ScriptedBackend(always="unavailable"))
    with caplog.at_level(logging.WARNING, logger="quark"):
        assert AnalyzerEngine(reopen(tmp_path, session)).analyze(store=True).stored
    assert "wait for the run's mirrors" in caplog.text
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_where_the_run_itself_waits_they_wait_with_it(tmp_path, add_backend, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "2")
    add_backend("late", ScriptedBackend(always="unavailable"))
    with start(tmp_path, backends="late") as session:
        session.flush()  # the short end is for the mirror
    up = add_backend("late", ScriptedBackend())
    AnalyzerEngine(quark.open_run(session.run_id, tmp_path)).analyze(store=True)
    assert up.stored == []
    assert "come first" in caplog.text
    recovery.sync(tmp_path)
    writers = list(dict.fromkeys(batch.writer_id for batch in up.stored))
    assert [split_generation(writer) for writer in writers] == [None, ("analyzer", 1)]


@pytest.mark.long
def test_generations_are_delivered_in_their_order_beyond_nine(tmp_path, add_backend):
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    for _ in range(11):
        AnalyzerEngine(reopen(tmp_path, session)).analyze(store=True)
    up = add_backend("late", ScriptedBackend())
    recovery.sync(tmp_path)
    writers = dict.fromkeys(batch.writer_id for batch in up.stored)
    assert list(writers) == [f"analyzer.{number}" for number in range(1, 12)]


@pytest.mark.long
def test_a_backend_that_cannot_tell_duplicates_is_never_sent_one_twice(tmp_path, add_backend):
    add_backend("once", ScriptedBackend(), idempotent=False)
    with start(tmp_path, backends="once") as session:
        pass
    # It takes the alerts and fails with the scores, which it may have stored or not.
    add_backend("once", ScriptedBackend(["ok"], always="unavailable"), idempotent=False)
    AnalyzerEngine(reopen(tmp_path, session)).analyze(store=True)
    up = add_backend("once", ScriptedBackend(), idempotent=False)
    (lane,) = recovery.sync(tmp_path)
    assert (lane.state, lane.unknown) == ("delivered", 5)
    assert up.stored == []
    assert list_journals(tmp_path) == []


@pytest.mark.long
def test_a_backend_that_fails_to_close_keeps_no_other_journal_waiting(tmp_path, add_backend):
    class Stubborn(ScriptedBackend):
        def close(self):
            raise BackendUnavailable("planted: files wait")

    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    for _ in range(2):
        AnalyzerEngine(reopen(tmp_path, session)).analyze(store=True)
    add_backend("late", Stubborn())
    lanes = recovery.sync(tmp_path)
    assert [(lane.writer_id, lane.state) for lane in lanes] == [
        ("analyzer.1", "delivered"),
        ("analyzer.2", "delivered"),
    ]
    assert all("files wait" in lane.reason for lane in lanes)


@pytest.mark.long
def test_killed_before_the_journal_the_lack_is_seen_and_mended(tmp_path):
    script = f"""
import os, quark, signal, sys
from quark.analysis import outputs
from quark.analysis.engine import AnalyzerEngine
session = quark.open_run(sys.argv[2], sys.argv[1])
outputs.journal_outputs = lambda *_, **__: os.kill(os.getpid(), {int(signal.SIGKILL)})
AnalyzerEngine(session).analyze(store=True)
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
    assert (status, states[1]["outputs"]["health_score"]) == (3, [5, 0])
    status, (found,) = call("verify")
    assert (status, found["equal"], found["not_kept"]) == (3, False, [])
    assert found["kinds"]["health_score"] == [5, 0]
    assert call("replay")[0] == 0
    assert call("verify")[0] == call("status")[0] == 0
    assert read_writers(run_folder(tmp_path, session) / "csv")["alerts"] == ["analyzer.1"]


@pytest.mark.long
def test_killed_with_a_torn_journal_what_is_whole_is_delivered(tmp_path, add_backend):
    add_backend("late", ScriptedBackend())
    with start(tmp_path, backends="late") as session:
        pass
    add_backend("late", ScriptedBackend(always="unavailable"))
    AnalyzerEngine(reopen(tmp_path, session)).analyze(store=True)
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
    AnalyzerEngine(reopen(tmp_path, session)).analyze(store=True)
    read = quark.open_run(session.run_id, tmp_path)
    assert read.open_run.read("alert", Query(all_attempts=True)).count == 0
    assert open_analysis(read).read_outputs("alert", "analyzer").count > 0


@pytest.mark.long
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
