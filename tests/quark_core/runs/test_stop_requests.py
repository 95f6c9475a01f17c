"""A training learns that somebody has asked it to stop, in a process of its own."""

import os
import signal
import subprocess
import time

import pytest
from kit.programs import start_code

import quark
from quark_core.errors import InvalidRunStateError, SchemaValidationError

# Heartbeats of a tenth of a second, so that a test need not wait ten.
TRAINING = """
import sys, time
import quark
from quark_core.delivery import stream
stream.HEARTBEAT_S = {heartbeat_s}
with quark.start_run(project="p", storage_dir=sys.argv[1], on_stop={on_stop!r}) as session:
    metrics = quark.MetricsLogger(session)
    print(session.run_id, flush=True)
    step = 0
    while {condition}:
        metrics.log("loss", 1.0, step=step)
        step += 1
        time.sleep(0.01)
    print(session.stop_requested.by, session.stop_requested.reason, flush=True)
"""
FLAGGED = "not session.stop_requested"
PATIENCE_S = 120.0


@pytest.fixture
def train(tmp_path):
    """Starts a training; its process and the id of its run."""
    started = []

    def start(*, on_stop="flag", condition=FLAGGED, heartbeat_s=0.1):
        script = TRAINING.format(heartbeat_s=heartbeat_s, on_stop=on_stop, condition=condition)
        process = start_code(script, tmp_path, stderr=subprocess.PIPE)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def list_events(run_id, storage_dir, *types):
    events = quark.EventLogger(quark.open_run(run_id, storage_dir)).read()
    return [event for event in events if event.event_type in types]


def load(run_id, storage_dir):
    return quark.open_run(run_id, storage_dir).open_run.reader.load_run(run_id)


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_a_training_sees_who_asks_it_to_stop(train, tmp_path, monkeypatch, journal_only):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    process, run_id = train()
    request = quark.stop_run(run_id, reason="it diverges", storage_dir=tmp_path)
    assert "@" in request.by
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert output.split() == [request.by, "it", "diverges"]
    stored = load(run_id, tmp_path)
    assert (stored.state, stored.stop.id) == ("completed", request.id)
    assert stored.stop.seen_at >= request.at
    (asked,) = list_events(run_id, tmp_path, "stop_requested")
    assert (asked.severity, asked.payload["reason"]) == ("warning", "it diverges")
    (seen,) = list_events(run_id, tmp_path, "stop_seen")
    assert seen.payload["request"] == request.id


def test_a_training_that_wants_it_so_is_ended_by_an_exception(train, tmp_path):
    process, run_id = train(on_stop="raise", condition="True")
    quark.stop_run(run_id, reason="enough", storage_dir=tmp_path)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "StopRequested" in errors
    assert ": enough" in errors
    assert load(run_id, tmp_path).state == "interrupted"
    (ended,) = list_events(run_id, tmp_path, "runtime_interruption")
    assert "StopRequested" in ended.payload["message"]


def test_who_asks_twice_gets_the_first_request(train, tmp_path):
    process, run_id = train(heartbeat_s=1e9)
    first = quark.stop_run(run_id, reason="one", storage_dir=tmp_path)
    again = quark.stop_run(run_id, reason="two", storage_dir=tmp_path)
    assert again == first
    reasons = [e.payload["reason"] for e in list_events(run_id, tmp_path, "stop_requested")]
    assert reasons == ["one", "two"]
    assert process.poll() is None


def test_a_training_that_is_killed_before_it_has_seen_the_request(train, tmp_path):
    process, run_id = train(heartbeat_s=1e9)
    request = quark.stop_run(run_id, reason="enough", storage_dir=tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    stored = load(run_id, tmp_path)
    assert (stored.state, stored.stop, stored.stop.seen_at) == ("lost", request, None)
    with pytest.raises(InvalidRunStateError, match="is lost"):
        quark.stop_run(run_id, storage_dir=tmp_path)
    # The next attempt is not the one that was meant.
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path) as session:
        beat(session)
        assert session.stop_requested is None
        assert load(run_id, tmp_path).stop is None
        newer = quark.stop_run(run_id, reason="this one too", storage_dir=tmp_path)
        beat(session)
        assert wait_for(lambda: session.stop_requested).id == newer.id
    assert [e.attempt for e in list_events(run_id, tmp_path, "stop_requested")] == [0, 1]
    assert [e.attempt for e in list_events(run_id, tmp_path, "stop_seen")] == [1]


def beat(session):
    """What the delivery thread does every ten seconds, and the wait for what comes of it."""
    from quark_core.runs.open_run import StopLookout

    lookout = StopLookout(session.open_run)
    lookout.look()
    if lookout._thread is not None:
        lookout._thread.join()


def test_a_run_that_has_ended_cannot_be_stopped(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    with pytest.raises(InvalidRunStateError, match=r"has ended \(completed\)"):
        quark.stop_run(session, storage_dir=tmp_path)
    assert list_events(session.run_id, tmp_path, "stop_requested") == []


def test_the_exception_comes_once_and_the_run_goes_on(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, on_stop="raise") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("loss", 1.0, step=0)
        quark.stop_run(session, reason="enough")
        beat(session)
        with pytest.raises(quark.StopRequested, match="enough") as raised:
            metrics.log("loss", 1.0, step=1)
        assert raised.value.request == session.stop_requested
        metrics.log("loss", 1.0, step=2)
    assert [r.step for r in metrics.read()] == [0, 2]


def test_only_known_ways_to_stop_are_taken(tmp_path):
    with pytest.raises(SchemaValidationError, match="on_stop must be 'flag' or 'raise'"):
        quark.start_run(project="p", storage_dir=tmp_path, on_stop="exit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_every_rank_that_keeps_records_sees_the_request(tmp_path):
    """Each asks for itself; a rank that keeps none knows of nothing."""
    script = TRAINING.format(heartbeat_s=0.1, on_stop="flag", condition=FLAGGED)
    launch = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "stopped", "QUARK_RANKS": "all"}
    ranks = [
        start_code(
            script,
            tmp_path,
            env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        ids = {rank.stdout.readline().strip() for rank in ranks}
        (run_id,) = ids
        wait_for(lambda: len(list_events(run_id, tmp_path, "rank_joined")) == 2)
        request = quark.stop_run(run_id, reason="both", storage_dir=tmp_path)
        outputs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
        assert outputs == [f"{request.by} both\n"] * 2
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    seen = list_events(run_id, tmp_path, "stop_seen")
    assert sorted(event.rank for event in seen) == [0, 1]
