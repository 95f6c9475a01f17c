"""`quark serve --notify`: people are told of the runs of workspaces, once over all restarts."""

import json
import signal
import subprocess
import sys

import pytest
from receivers import Receiver
from service_fixtures import serving, serving_process

import quark
from quark.cli.workspace_notices import WorkspaceNotices
from quark_backends.service.server.config import ServiceConfig, load_config
from quark_core.errors import SchemaValidationError

ALERT = {
    "rule_id": "dead_units",
    "title": "Units die",
    "message": "Half of the units give nothing.",
    "fact": "82% of 64 units",
    "culprit": "layers.3",
    "first_step": 40,
    "suggested_check": "the learning rate",
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(tmp_path / "server") as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default", "admin"))
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The end of a look waits until all is sent, however busy the machine is."""
    monkeypatch.setattr("quark.cli.workspace_notices._END_S", 60.0)


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setenv("QUARK_NOTIFY_SECRET", "a secret that both have")
    receiver = Receiver()
    yield receiver
    receiver.close()


def watch(server, *targets, on=""):
    return WorkspaceNotices(
        ServiceConfig(store_url=server.service.config.store_url, notify=targets, notify_on=on)
    )


def look(notices, times=1):
    for _ in range(times):
        notices.look()
    notices.close()


def list_sent(receiver):
    return [json.loads(body) for _, _, body in receiver.requests]


def webhook(receiver):
    return f"webhook+http://{receiver.address}/"


def fail(**options):
    with pytest.raises(ZeroDivisionError), quark.start_run(project="p", **options) as session:
        raise ZeroDivisionError("division by nothing")
    return session


@pytest.mark.long
def test_failed_and_lost_runs_and_alerts_are_told_once_over_all_restarts(server, receiver):
    look(watch(server, webhook(receiver)))
    fail(name="first")
    with quark.start_run(project="p", name="good") as session:
        events = quark.EventLogger(session)
        events.log("alert_raised", severity="error", payload=ALERT)
        events.log("alert_raised", severity="warning", payload={**ALERT, "rule_id": "slow"})
        events.flush()
        look(watch(server, webhook(receiver)), times=2)
    script = (
        "import quark, os, signal\n"
        "session = quark.start_run(project='p', name='killed')\n"
        "session.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    for _ in range(2):
        look(watch(server, webhook(receiver)), times=2)

    sent = list_sent(receiver)
    by_event = {each["event"]: each for each in sent}
    assert "division by nothing" in by_event["failed"]["text"]
    assert "Look at: the learning rate" in by_event["dead_units"]["text"]
    assert by_event["dead_units"]["step"] == 40
    assert by_event["lost"]["title"].startswith("p: run killed is lost")
    assert len(sent) == 3


def test_what_was_before_the_first_look_is_not_told(server, receiver):
    fail()
    look(watch(server, webhook(receiver)), times=2)
    assert list_sent(receiver) == []


def test_a_workspace_has_targets_of_its_own_and_chooses_what_is_told(server, receiver):
    other = Receiver()
    try:
        targets = (f"default={webhook(receiver)}", f"elsewhere={webhook(other)}")
        look(watch(server, *targets, on="finished"))
        with quark.start_run(project="p"):
            pass
        fail()
        look(watch(server, *targets, on="finished"))
        assert [each["event"] for each in list_sent(receiver)] == ["finished"]
        assert list_sent(other) == []
    finally:
        other.close()


@pytest.mark.parametrize(
    ("target", "said"),
    [("T1JJ/TIiajkdnlazk", "--notify must be a URL"), ("default=", "--notify must be a URL")],
)
def test_a_bad_target_is_refused_without_being_shown(tmp_path, target, said):
    config = ServiceConfig(store_url=f"sqlite:///{tmp_path}/service.db", notify=(target,))
    assert "TIiajkdnlazk" not in repr(config)
    with pytest.raises(SchemaValidationError, match=said) as caught:
        WorkspaceNotices(config)
    assert "TIiajkdnlazk" not in str(caught.value)


def test_targets_are_told_by_options_the_environment_and_a_file(tmp_path):
    several = "slack://a,b/c mailto://me:pw@example.org"
    of_environment = load_config({}, {"QUARK_SERVE_NOTIFY": several})
    assert of_environment.notify == ("slack://a,b/c", "mailto://me:pw@example.org")
    file = tmp_path / "quark.toml"
    file.write_text('notify = ["json://x/"]\nnotify_on = "critical"\n')
    of_file = load_config({"notify": ()}, {}, file)
    assert (of_file.notify, of_file.notify_on) == (("json://x/",), "critical")
    assert load_config({"notify": ("json://y/",)}, {}, file).notify == ("json://y/",)


@pytest.mark.long
def test_a_server_tells_and_shows_its_targets_nowhere(tmp_path, receiver, monkeypatch):
    environ = {
        "QUARK_SERVE_NOTIFY": f"{webhook(receiver)}very-secret",
        "QUARK_SERVE_NOTIFY_ON": "failed",
    }
    with serving_process(tmp_path / "server", "--migrate", environ=environ) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default", "admin"))
        monkeypatch.chdir(tmp_path)
        fail()
        receiver.wait()
    ((path, _, body),) = receiver.requests
    assert path == "/very-secret"
    assert json.loads(body)["event"] == "failed"
    assert "very-secret" not in server.log.read_text()
