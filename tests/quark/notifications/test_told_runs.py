"""People are told of a run: its alerts and its end, once, and at no cost to the training."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading

import pytest

import quark
from quark_core.errors import SchemaValidationError

URL_SECRET = "TIiajkdnlazkcOXrIdevi7FQ"
FAST = {"every_n_steps": 20, "min_interval_s": 0.02}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """What is waited for at the end is waited for however busy the machine is."""
    monkeypatch.setattr("quark.analysis.monitor._LAST_LOOK_S", 60.0)
    monkeypatch.setattr("quark.notifications.notifier._END_WAIT_S", 60.0)
    monkeypatch.setattr("quark.notifications.notifier._NOTE_WAIT_S", 60.0)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")


def break_down(session):
    with quark.MetricsLogger(session) as metrics:
        for step in range(200):
            metrics.log("train/loss", math.exp(-step / 60) + 0.01 * (step % 3), step=step)
        metrics.log("train/loss", math.nan, step=200)


def list_events(got):
    return [each.event for each in got]


def test_a_monitor_tells_of_alerts_and_of_a_failed_run(tmp_path):
    got = []
    with (
        pytest.raises(ZeroDivisionError),
        quark.start_run(project="digits", name="first", storage_dir=tmp_path) as session,
    ):
        quark.monitor(session, notify=got.append, **FAST)
        break_down(session)
        raise ZeroDivisionError("of ghp_abcdefghijklmnopqrstuvwxyz0123456789")

    alert, end = got
    assert (alert.kind, alert.event, alert.severity) == ("alert", "non_finite_values", "critical")
    assert alert.title.startswith("digits: run first: ")
    assert alert.run_id == end.run_id == session.run_id
    assert end.title == "digits: run first has failed"
    assert "ZeroDivisionError: of" in end.text
    assert "ghp_" not in end.text
    told = quark.EventLogger(quark.open_run(session.run_id, tmp_path)).read(event_type="notified")
    assert [each.payload["key"] for each in told] == [alert.key]


def test_an_alert_of_ones_own_is_told_at_each_step_with_or_without_a_monitor(
    tmp_path, receive, monkeypatch
):
    receiver = receive()
    monkeypatch.setenv("QUARK_NOTIFY", f"json://{receiver.address}/")
    monkeypatch.setattr("quark.notifications.notifier._HOUR_S", 3600.0)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        events = quark.EventLogger(session)
        said = {"title": "Slow", "message": "the loader waits"}
        for step in (1, 1, 2):
            events.log("alert_raised", severity="error", step=step, payload=said)
        events.log("alert_raised", severity="warning", step=3, payload={"title": "Not chosen"})
        events.log("slow", severity="error", step=3, payload=said)
        raised = events.read(event_type="alert_raised")
    assert [event.payload["rule_id"] for event in raised] == [
        *["user_alert_slow"] * 3,
        "user_alert_not_chosen",
    ]
    bodies = [json.loads(body) for _, _, body in receiver.requests]
    # The second one comes with the digest of what came too soon after the first.
    assert [each["title"].endswith("Slow") for each in bodies] == [True, True]
    assert "the loader waits" in bodies[0]["message"]


def test_an_alert_is_not_told_again_in_the_next_attempt(tmp_path):
    got = []
    session = quark.start_run(project="p", storage_dir=tmp_path)
    for attempt in range(3):
        if attempt:
            session = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)
        quark.monitor(session, notify=got.append, notify_on="critical, interrupted", **FAST)
        break_down(session)
        session.end_run("interrupted")
        if attempt == 1:
            # As on another machine, which has the run's records alone.
            (tmp_path / ".quark" / "notified" / f"{session.run_id}.jsonl").unlink()

    assert list_events(got) == ["non_finite_values", "interrupted", "interrupted", "interrupted"]


def test_the_environment_says_who_is_told_of_every_run(tmp_path, receive, monkeypatch):
    receiver = receive()
    monkeypatch.setenv(
        "QUARK_NOTIFY", f"webhook+http://{receiver.address}/ json://{receiver.address}/"
    )
    monkeypatch.setenv("QUARK_NOTIFY_ON", "finished")
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    sent = [json.loads(body) for _, _, body in receiver.requests]
    titles = {each["title"] for each in sent}
    assert titles == {f"p: run {session.run_id[:8]} has finished"}
    assert len(sent) == 2


def test_a_bad_environment_costs_a_warning_and_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_NOTIFY", URL_SECRET)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    assert session.status == "completed"
    assert "notifications are off: QUARK_NOTIFY must be a URL" in caplog.text
    assert URL_SECRET not in caplog.text


def test_a_bad_argument_is_refused_before_anything_begins(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with pytest.raises(SchemaValidationError, match=r"^notify must be a URL"):
            quark.monitor(session, notify=URL_SECRET)
        with pytest.raises(SchemaValidationError, match=r"^notify_on must be"):
            quark.monitor(session, notify=print, notify_on="loud")
        quark.monitor(session).close()


def test_an_address_stands_nowhere_in_what_a_run_leaves(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    url = f"json://127.0.0.1:9/{URL_SECRET}"
    monkeypatch.setenv("QUARK_NOTIFY", url)
    with quark.start_run(
        project="p", storage_dir=tmp_path, config={"notify": f"slack://T1/B1/{URL_SECRET}"}
    ) as session:
        handler = quark.LoggingHandler(session, level=logging.DEBUG)
        logging.getLogger().addHandler(handler)
        monkeypatch.setattr(
            "quark.notifications.notifier.Pacing.__init__.__kwdefaults__",
            {"topic_s": 600.0, "per_hour": 20, "timeout_s": 20.0, "pauses_s": ()},
        )
        watch = quark.monitor(session, notify=url, **FAST)
        break_down(session)
        watch.close()
        shown = f"{session.extensions!r} {watch!r} {session.to_dict()!r}"
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert URL_SECRET not in shown
    assert URL_SECRET not in caplog.text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert URL_SECRET.encode() not in file.read_bytes(), file


def test_a_target_that_hangs_costs_the_loop_nothing_and_the_end_a_bounded_wait(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("quark.notifications.notifier._END_WAIT_S", 0.2)
    release, entered = threading.Event(), threading.Event()

    def hang(_):
        entered.set()
        release.wait(120)

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.monitor(session, notify=hang, **FAST)
        break_down(session)
        assert entered.wait(60)
        metrics = quark.MetricsLogger(session)
        for step in range(1000):
            metrics.log("train/loss", 0.5, step=300 + step)
    assert session.status == "completed"
    release.set()


def test_what_is_in_a_name_calls_nobody_and_shows_no_secret(tmp_path):
    got = []
    with quark.start_run(
        project="p", name="<!channel> @everyone \x1b[31m", storage_dir=tmp_path
    ) as session:
        quark.monitor(session, notify=got.append, notify_on="finished")
    (end,) = got
    assert "<!" not in end.title
    assert "@everyone" not in end.title
    assert "\x1b" not in end.title


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_tells_nothing(tmp_path):
    got = []
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.monitor(session, notify=got.append, notify_on="finished")
        child = os.fork()
        if not child:
            os._exit(1 if session.extensions else 0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(got) == 1


SCRIPT = """
import sys, time, math, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
print(session.run_id, flush=True)
quark.monitor(
    session, notify=sys.argv[2], notify_on="critical", every_n_steps=20, min_interval_s=0.02
)
metrics = quark.MetricsLogger(session)
for step in range(10**6):
    metrics.log("train/loss", math.exp(-step / 60) if step < 200 else math.nan, step=step)
    time.sleep(0.001)
"""


def test_a_killed_training_that_is_resumed_tells_its_alert_once(tmp_path, receive):
    receiver = receive()
    url = f"webhook+http://{receiver.address}/"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), url], stdout=subprocess.PIPE, text=True
    ) as process:
        run_id = process.stdout.readline().strip()
        receiver.wait()
        process.send_signal(signal.SIGKILL)
    got = []
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path) as session:
        quark.monitor(session, notify=got.append, notify_on="critical, finished", **FAST)
        break_down(session)
    assert list_events(got) == ["finished"]
    assert len(receiver.requests) == 1
