"""What the page of a run has of its timers, and what others see of a loop that goes on."""

import json
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from service_fixtures import serving

import quark
from quark.cli.main import cli

DEADLINE_S = 60
TRAINING = """
import sys
import quark
from quark_core.delivery import stream

stream.HEARTBEAT_S = 0.1  # else it would be ten seconds until anybody can know
session = quark.start_run(project="p", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
for step, _ in enumerate(metrics.progress(range(10))):
    metrics.log("loss", 1.0, step=step)
    if step == 4:
        print("half", flush=True)
        sys.stdin.readline()
session.end_run()
"""


def test_a_run_has_its_timers_what_took_the_most_first(look, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for _ in range(3):
            with metrics.timer("long"):
                time.sleep(0.01)
            with metrics.timer("short"):
                pass
        metrics.aggregate("norm", 1.0)
    rows = look(tmp_path).json(f"/api/runs/{session.run_id}")["timers"]
    assert [row["key"] for row in rows] == ["long", "short"]
    assert rows[0]["count"] == 2
    assert rows[0]["mean"] >= 0.01
    assert 0 < rows[1]["share"] < rows[0]["share"] <= 1


@pytest.fixture(params=["here", pytest.param("service", marks=pytest.mark.long)])
def where(request, tmp_path, monkeypatch):
    """Runs lie in the folder, or behind a service."""
    if request.param == "here":
        yield
        return
    folder = tmp_path / "service"
    folder.mkdir()
    with serving(folder) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        yield


@pytest.fixture
def training(tmp_path, where):
    """A process that stands in the fifth of ten steps until it reads a line."""
    command = [sys.executable, "-c", TRAINING, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


def invoke(*arguments):
    done = CliRunner().invoke(cli, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.long
def test_another_process_sees_how_far_a_loop_has_come(look, tmp_path, training):
    deadline = time.monotonic() + DEADLINE_S
    while "40 %" not in invoke("runs", "-d", tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "40 %" in invoke("runs", "-d", tmp_path)
    (run,) = json.loads(invoke("runs", "-d", tmp_path, "--json"))
    assert (run["progress"]["done"], run["progress"]["total"]) == (4, 10)
    assert "40 %" in invoke("show", run["id"], "-d", tmp_path)
    assert "40 %" in invoke("follow", run["id"], "-d", tmp_path, "--once")
    page = look(tmp_path)
    standings = page.json("/api/standings", run=[run["id"]])["standings"]
    assert standings[run["id"]]["progress"]["told"].startswith("40 %")
    assert page.json(f"/api/runs/{run['id']}")["progress"]["told"].startswith("40 %")
    training.communicate("\n", timeout=DEADLINE_S)
    assert "40 %" not in invoke("runs", "-d", tmp_path)
    ended = look(tmp_path).json("/api/standings", run=[run["id"]])["standings"]
    assert ended[run["id"]]["progress"]["told"] is None
