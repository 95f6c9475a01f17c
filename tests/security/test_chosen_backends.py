"""Records in a run's folder go to backends that this user has chosen, and to no other."""

import json
import logging
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hostile_folders import EMBEDDED, make_journal
from kit.programs import call, wait_for_adoption
from service_fixtures import serving

import quark
from quark_core.backends.contract import BackendDefinition
from quark_core.backends.registry import default_registry
from quark_core.delivery.journal_folder import LaneEntry
from quark_core.errors import BackendUnavailable
from quark_core.runs import backend_choice, recovery

KEY = "qk_own_0123456789abcdef0123456789abcdef"
SECRETS = {
    "QUARK_USER_KEY": KEY,
    "MLFLOW_TRACKING_TOKEN": "mlflow-token-of-the-reader",
    "WANDB_API_KEY": "f" * 40,
}


class Listener:
    """A host that writes down whatever it is told; it answers 404, or sends elsewhere."""

    def __init__(self, location=None):
        self.requests = requests = []

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                requests.append((self.path, dict(self.headers), body))
                self.send_response(404 if location is None else 307)
                if location is not None:
                    self.send_header("Location", location + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = do_PUT = do_PATCH = do_HEAD = do_DELETE = answer

            def log_message(self, *_arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def heard(self):
        return "\n".join(f"{path}\n{headers}\n{body!r}" for path, headers, body in self.requests)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def listen():
    opened = []

    def make(**arguments):
        opened.append(Listener(**arguments))
        return opened[-1]

    yield make
    for listener in opened:
        listener.close()


@pytest.fixture(autouse=True)
def nothing_was_chosen(monkeypatch, tmp_path):
    """A user who is new here, with keys of their own."""
    monkeypatch.setattr(backend_choice, "_asked", {})
    monkeypatch.setattr(backend_choice, "_told", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("QUARK_PERSISTENCE_URL", raising=False)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def run_python(code, *arguments, **environment):
    """A process of its own, of this user."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


KILLED = """
import os, sys, quark
session = quark.start_run(project="own", storage_dir=sys.argv[1], backends=sys.argv[2])
metrics = quark.MetricsLogger(session)
for step in range(100):
    metrics.log("loss", 1.0 / (step + 1), step=step)
session.flush("journaled")
os.kill(os.getpid(), 9)
"""
SYNC = """
import sys
from pathlib import Path
from quark_core.runs import recovery
print({r.backend: r.state for r in recovery.sync(Path(sys.argv[1]))})
"""


CHOOSE = """
import sys
from pathlib import Path
from quark_core.runs.backend_choice import choose_backend
from quark_core.runs.backend_choice import remember
from quark_core.backends.registry import default_registry
assert remember([choose_backend(sys.argv[1], default_registry())], Path(sys.argv[2]))
"""


def choose(place, root):
    """Have this user choose a backend, in another process and some time ago."""
    done = run_python(CHOOSE, place, root)
    assert done.returncode == 0, done.stderr


HOSTS = ["{url}", "quark+{url}", "mlflow+{url}", "mlflow:{url}?experiment=x"]


@pytest.mark.sampled
@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("text", HOSTS)
def test_no_host_that_a_folder_names_is_contacted(tmp_path, listen, caplog, text, primary):
    listener = listen()
    entry = LaneEntry("far", text.format(url=listener.url), primary)
    folder = make_journal(tmp_path, lanes=(entry,) if primary else (EMBEDDED, entry))
    with caplog.at_level(logging.WARNING):
        with quark.start_run(project="own", storage_dir=tmp_path):
            pass
        wait_for_adoption()
        results = recovery.sync(tmp_path)
    assert listener.requests == []
    (far,) = [result for result in results if result.backend == "far"]
    assert (far.state, far.waiting) == ("waiting", 4)
    command = f"quark sync {tmp_path} --allow-backend "
    assert command in far.reason
    assert command in caplog.text
    assert folder.path.exists()


@pytest.mark.parametrize(
    "text", ["csv:{out}", "tensorboard:{out}", "csv:../out", "csv:?publish={out}"]
)
def test_no_folder_that_a_folder_names_is_written(tmp_path, text):
    root, out = tmp_path / "shared", tmp_path / "out"
    make_journal(root, lanes=(EMBEDDED, LaneEntry("out", text.format(out=out))))
    results = {result.backend: result.state for result in recovery.sync(root)}
    assert results == {"embedded": "delivered", "out": "waiting"}
    assert not out.exists()


@pytest.mark.long
def test_what_waits_is_delivered_once_it_is_allowed_and_so_it_stays(tmp_path):
    out = tmp_path / "out"
    root = tmp_path / "shared"
    make_journal(root, run_id="first", lanes=(EMBEDDED, LaneEntry("csv", f"csv:{out}")))
    waiting = call("sync", root)
    assert waiting.exit_code == 1
    assert f"--allow-backend csv:{out}" in waiting.stdout.replace("\n", "")
    assert call("sync", root, "--allow-backend", f"csv:{out}").exit_code == 0
    assert (out / "first" / "metrics_long.csv").exists()
    make_journal(root, run_id="second", lanes=(EMBEDDED, LaneEntry("csv", f"csv:{out}")))
    later = run_python(SYNC, root)
    assert later.stdout.strip() == "{'embedded': 'delivered', 'csv': 'delivered'}", later.stderr
    assert (out / "second" / "metrics_long.csv").exists()


@pytest.mark.long
def test_notes_are_private_and_lie_outside_of_the_store(tmp_path):
    make_journal(tmp_path)
    call("sync", tmp_path, "--allow-backend", "csv:/anywhere")
    (note,) = (tmp_path / "config" / "quark" / "backends").iterdir()
    assert note.stat().st_mode & 0o777 == 0o600
    assert note.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(note.read_text())["location"] == "/anywhere"


@pytest.mark.long
def test_a_place_below_one_root_is_not_allowed_for_another(tmp_path):
    make_journal(tmp_path)
    call("sync", tmp_path, "--allow-backend", "csv:out")
    other = tmp_path / "other"
    make_journal(other, lanes=(EMBEDDED, LaneEntry("csv", "csv:out")))
    states = {result.backend: result.state for result in recovery.sync(other)}
    assert states == {"embedded": "delivered", "csv": "waiting"}


@pytest.mark.long
def test_own_unfinished_runs_go_on_without_a_question(tmp_path):
    (tmp_path / "blocked").write_text("a file, where the mirror's folder would be")
    killed = run_python(KILLED, tmp_path, "csv:blocked")
    assert killed.returncode == -9, killed.stderr
    (tmp_path / "blocked").unlink()
    synced = run_python(SYNC, tmp_path)
    assert synced.stdout.strip() == "{'embedded': 'delivered', 'csv': 'delivered'}", synced.stderr
    assert list((tmp_path / "blocked").glob("*/metrics_long.csv"))


@pytest.mark.long
@pytest.mark.parametrize("home", ["none", "read-only"])
def test_without_a_home_runs_start_and_the_environment_or_a_word_delivers(tmp_path, home):
    environment = {"XDG_CONFIG_HOME": "", "HOME": "/proc/nowhere" if home == "none" else "/sys"}
    root = tmp_path / "root"
    root.mkdir()
    (root / "blocked").write_text("a file")
    killed = run_python(KILLED, root, "csv:blocked", **environment)
    assert killed.returncode == -9, killed.stderr
    assert "Traceback" not in killed.stderr
    (root / "blocked").unlink()
    asked = run_python(SYNC, root, **environment)
    assert asked.stdout.strip() == "{'embedded': 'delivered', 'csv': 'waiting'}", asked.stderr
    named = run_python(SYNC, root, QUARK_BACKENDS="csv:blocked", **environment)
    assert named.stdout.strip() == "{'embedded': 'delivered', 'csv': 'delivered'}", named.stderr


@pytest.mark.long
def test_the_service_of_the_environment_gets_what_a_folder_has_for_it(tmp_path, monkeypatch):
    with serving(tmp_path / "server") as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        make_journal(
            tmp_path / "shared",
            run_id="theirs",
            lanes=(LaneEntry("service", f"{server.url}/", True),),
        )
        assert {r.state for r in recovery.sync(tmp_path / "shared")} == {"delivered"}
        session = quark.open_run("theirs", tmp_path / "shared")
        assert quark.MetricsLogger(session).read()[0].value == 0.5


@pytest.mark.long
def test_the_key_goes_to_no_host_but_its_own(tmp_path, listen, monkeypatch):
    """Also where the user has used the other host before, with another key."""
    own, other = listen(), listen()
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", own.url)
    make_journal(tmp_path, lanes=(LaneEntry("service", other.url, True),))
    choose(other.url, tmp_path)
    (result,) = recovery.sync(tmp_path)
    assert result.state == "waiting"
    assert f"Set both to {other.url}" in result.reason
    assert other.requests == []
    # Without a word on whom the key is for, it is for the service that the user chose.
    monkeypatch.delenv("QUARK_PERSISTENCE_URL")
    recovery.sync(tmp_path)
    assert KEY in other.heard


@pytest.mark.long
def test_mlflow_shows_its_token_to_no_host_but_its_own(tmp_path, listen, monkeypatch):
    own, other = listen(), listen()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own.url)
    make_journal(tmp_path, lanes=(EMBEDDED, LaneEntry("mlflow", f"mlflow+{other.url}")))
    choose(f"mlflow+{other.url}", tmp_path)
    results = {result.backend: result for result in recovery.sync(tmp_path)}
    assert results["mlflow"].state == "waiting"
    assert "are not sent to another" in results["mlflow"].reason
    assert other.requests == []


def test_an_installed_plugin_is_not_opened_for_a_folder_that_names_it(tmp_path, monkeypatch):
    opened = []
    definition = BackendDefinition(name="installed", summary="for tests", open=opened.append)
    monkeypatch.setitem(default_registry()._definitions, "installed", definition)
    make_journal(tmp_path, lanes=(LaneEntry("installed", "installed"),))
    (result,) = recovery.sync(tmp_path)
    assert result.state == "waiting"
    assert "--allow-backend installed" in result.reason
    assert opened == []


@pytest.mark.long
def test_a_host_that_was_allowed_in_so_many_words_gets_the_key(tmp_path, listen, monkeypatch):
    own, other = listen(), listen()
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", own.url)
    make_journal(tmp_path, lanes=(LaneEntry("service", other.url, True),))
    call("sync", tmp_path, "--allow-backend", other.url)
    assert KEY in other.heard
    assert own.requests == []


@pytest.mark.sampled
@pytest.mark.parametrize("text", ["{url}", "mlflow+{url}"])
def test_a_redirect_takes_no_key_elsewhere(tmp_path, listen, text):
    elsewhere = listen()
    service = listen(location=elsewhere.url)
    place = text.format(url=service.url)
    make_journal(tmp_path, lanes=(EMBEDDED, LaneEntry("far", place)))
    call("sync", tmp_path, "--allow-backend", place)
    assert any(secret in service.heard for secret in SECRETS.values())
    assert not any(secret in elsewhere.heard for secret in SECRETS.values())


@pytest.mark.long
def test_a_note_of_another_user_is_no_choice(tmp_path, monkeypatch):
    out = tmp_path / "out"
    make_journal(tmp_path)
    call("sync", tmp_path, "--allow-backend", f"csv:{out}")
    monkeypatch.setattr(backend_choice, "_asked", {})
    make_journal(tmp_path, lanes=(EMBEDDED, LaneEntry("csv", f"csv:{out}")))
    (note,) = (tmp_path / "config" / "quark" / "backends").iterdir()
    if os.geteuid() != 0:
        pytest.skip("needs the right to give files away")
    os.chown(note, 12345, -1)
    assert {r.backend: r.state for r in recovery.sync(tmp_path)}["csv"] == "waiting"


@pytest.mark.long
def test_a_replay_asks_for_mirrors_that_only_the_folder_names(tmp_path):
    out = tmp_path / "out"
    with quark.start_run(project="own", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    ledger = tmp_path / ".quark" / "runs" / session.run_id / "delivered.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_text(
        json.dumps(
            {
                "writer_id": "w",
                "attempt": 0,
                "rank": 0,
                "lane": "csv",
                "specification": f"csv:{out}",
            }
        )
        + "\n"
    )
    with pytest.raises(BackendUnavailable, match=f"--allow-backend csv:{out}"):
        call("mirror", "replay", session.run_id, "-d", tmp_path)
    call("mirror", "verify", session.run_id, "-d", tmp_path)
    call("analyze", session.run_id, "-d", tmp_path)
    assert not out.exists()
    assert (
        call("mirror", "replay", session.run_id, "--to", f"csv:{out}", "-d", tmp_path).exit_code
        == 0
    )
    assert (out / session.run_id / "metrics_long.csv").exists()
