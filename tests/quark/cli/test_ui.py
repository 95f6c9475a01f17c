"""`quark ui`: starts, shows a link, answers, ends by Ctrl-C; what it imports and when."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from quark.page import server
from quark.page.server import DEFAULT_PORT, bind_socket, is_loopback
from quark_core.errors import SessionStoreError

DEADLINE_S = 60


class Running:
    """`quark ui` in a process of its own, and what it has printed."""

    def __init__(self, folder, *arguments, **environment):
        command = [sys.executable, "-m", "quark", "ui", str(folder), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.first = self.process.stdout.readline()
        self.hint = self.process.stdout.readline()
        self.link = re.search(r"http://\S+", self.first)[0] if "http" in self.first else None

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@pytest.fixture
def run_ui():
    started = []

    def run(*arguments, **environment):
        started.append(Running(*arguments, **environment))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate(timeout=DEADLINE_S)


def fetch(opener, url):
    try:
        with opener.open(url, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_it_serves_the_runs_of_a_folder_and_ends_by_ctrl_c(tmp_path, log_run, run_ui):
    log_run(tmp_path, "r1", values={"train/loss": [1.0, 0.5]})
    ui = run_ui(tmp_path)
    assert str(tmp_path) in ui.first
    assert "token=" in ui.link
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    status, page = fetch(opener, ui.link)
    assert status == 200
    assert b"static/" in page
    root = ui.link.partition("?")[0]
    status, runs = fetch(opener, f"{root}api/runs")
    assert status == 200
    assert b'"r1"' in runs
    assert fetch(urllib.request.build_opener(), f"{root}api/runs")[0] == 401
    code, out, err = ui.end()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert ui.hint == "Ctrl-C stops it.\n"
    assert lines[0].startswith("Opened in the browser. Link for another browser: http://127.0.0.1:")
    assert lines[-1] == "Stopped the web UI."


def test_sigterm_ends_it_too(tmp_path, log_run, run_ui):
    log_run(tmp_path, "r1")
    _, _, err = run_ui(tmp_path).end(signal.SIGTERM)
    assert "Traceback" not in err


@pytest.mark.long
def test_in_an_empty_folder_it_waits_for_the_first_run(tmp_path, log_run, run_ui):
    ui = run_ui(tmp_path)
    assert str(tmp_path) in ui.first
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    fetch(opener, ui.link)
    root = ui.link.partition("?")[0]
    status, runs = fetch(opener, f"{root}api/runs")
    assert (status, json.loads(runs)["rows"]) == (200, [])
    about = json.loads(fetch(opener, f"{root}api/about")[1])
    assert (about["notes"], about["projects"]) == ([], [])
    assert fetch(opener, f"{root}api/runs/r1")[0] == 404
    assert list(tmp_path.iterdir()) == []
    log_run(tmp_path, "r1", values={"train/loss": [1.0, 0.5]})
    runs = json.loads(fetch(opener, f"{root}api/runs")[1])
    assert [row["id"] for row in runs["rows"]] == ["r1"]
    assert json.loads(fetch(opener, f"{root}api/about")[1])["capabilities"]["search"]
    assert fetch(opener, f"{root}api/runs/r1/series?key=train/loss")[0] == 200
    assert ui.end()[::2] == (0, "")


def test_tabs_go_on_once_it_is_started_again_on_its_port(tmp_path, log_run, run_ui):
    log_run(tmp_path, "r1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    first = run_ui(tmp_path, "--port", port)
    fetch(opener, first.link)
    first.end()
    run_ui(tmp_path, "--port", port)
    assert fetch(opener, f"http://127.0.0.1:{port}/api/runs")[0] == 200


def test_another_address_is_warned_of(tmp_path, log_run, run_ui):
    log_run(tmp_path, "r1")
    ui = run_ui(tmp_path, "--host", "0.0.0.0")
    _, _, err = ui.end()
    assert "is reachable from other machines" in err
    assert ui.link.startswith("http://127.0.0.1:")


def test_the_port_is_the_next_that_is_free(monkeypatch):
    with bind_socket("127.0.0.1", None) as bound:
        assert 0 <= bound.getsockname()[1] - DEFAULT_PORT < 20
    with bind_socket("127.0.0.1", 0) as taken:
        first = taken.getsockname()[1]
        monkeypatch.setattr(server, "DEFAULT_PORT", first)
        with bind_socket("127.0.0.1", None) as bound:
            # Others on this machine may have some that come next.
            assert 0 < bound.getsockname()[1] - first < 20


def test_a_port_that_is_taken_is_told():
    with bind_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(SessionStoreError, match=f"cannot listen on .* port {port}"):
            bind_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x", False)],
)
def test_which_addresses_only_this_machine_reaches(host, is_local):
    assert is_loopback(host) is is_local


def test_the_command_s_help_imports_no_server(tmp_path):
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from quark.cli.main import cli\n"
        "assert CliRunner().invoke(cli, ['ui', '--help']).exit_code == 0\n"
        "print(*[m for m in ('starlette', 'uvicorn', 'numpy', 'anyio') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.long
def test_no_compact_starts_no_process(tmp_path, log_run, run_ui):
    log_run(tmp_path, "r1", values={"train/loss": [1.0] * 50})
    ui = run_ui(tmp_path, "--no-compact")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    fetch(opener, ui.link)
    root = ui.link.partition("?")[0]
    assert fetch(opener, f"{root}api/runs/r1/series?key=train/loss")[0] == 200
    assert not list((tmp_path / ".quark").glob("compaction.lease"))
    assert ui.end()[0] == 0
