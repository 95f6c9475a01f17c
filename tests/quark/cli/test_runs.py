"""`quark runs` lists what a store holds, newest first."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calls import read_json

KILLED = """
import sys, quark
session = quark.start_run(project="vision", storage_dir=sys.argv[1])
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path, log_run):
    root = tmp_path / "store"
    losses = {"train/loss": [0.5, 0.25], "val/loss": [9.0]}
    log_run(root, "run-a", tags=["baseline"], name="first", values=losses)
    log_run(root, "run-b", tags=["big", "baseline"], status="failed", values={"val/loss": [0.125]})
    log_run(root, "run-c", "text", status="interrupted")
    return root


def list_ids(result):
    assert result.exit_code == 0
    return [run["id"] for run in json.loads(result.stdout)]


def find_row(result, run_id):
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith(run_id)]
    return row


@pytest.mark.long
def test_runs_stand_newest_first(invoke, store):
    assert list_ids(invoke("runs", "-d", store, "--json")) == ["run-c", "run-b", "run-a"]
    lines = invoke("runs", "-d", store).stdout.splitlines()
    shown = [line.split()[0] for line in lines if line.strip().startswith("run-")]
    assert shown == ["run-c", "run-b", "run-a"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--project", "vision"], ["run-b", "run-a"]),
        (["--status", "failed"], ["run-b"]),
        (["-s", "interrupted"], ["run-c"]),
        (["-s", "running"], []),
        (["--tag", "baseline"], ["run-b", "run-a"]),
        (["-t", "baseline", "-t", "big"], ["run-b"]),
        (["-t", "base"], []),
        (["--limit", "2"], ["run-c", "run-b"]),
        (["-n", "1", "-p", "vision", "-t", "baseline"], ["run-b"]),
    ],
)
def test_filters_choose_runs(invoke, store, options, expected):
    assert list_ids(invoke("runs", "-d", store, "--json", *options)) == expected


@pytest.mark.long
def test_the_table_shows_project_status_last_loss_and_tags(invoke, store):
    result = invoke("runs", "-d", store)
    header = next(line for line in result.stdout.splitlines() if "status" in line)
    places = [header.index(name) for name in ("project", "status", "last loss", "tags")]
    assert places == sorted(places)
    assert find_row(result, "run-a").split()[:4] == ["run-a", "first", "vision", "completed"]
    assert find_row(result, "run-a").split()[-2:] == ["0.25", "baseline"]
    assert find_row(result, "run-b").split()[-3:] == ["0.125", "baseline,", "big"]
    assert find_row(result, "run-c").split()[1:3] == ["text", "interrupted"]
    assert find_row(result, "run-c").split()[-1] == "-"


@pytest.mark.long
def test_a_limit_says_that_there_are_more(invoke, store):
    assert "Only 2 runs shown; --limit shows more." in invoke("runs", "-d", store, "-n", "2").stdout
    assert "shown" not in invoke("runs", "-d", store, "-n", "3").stdout


@pytest.mark.long
def test_no_fitting_run_is_no_error(invoke, store):
    result = invoke("runs", "-d", store, "-t", "absent")
    assert (result.exit_code, result.stdout) == (0, f"No matching runs in the store {store}.\n")
    assert json.loads(invoke("runs", "-d", store, "-t", "absent", "--json").stdout) == []


def test_json_has_the_whole_record_and_nan_as_null(invoke, tmp_path, log_run):
    log_run(tmp_path, "run-nan", tags=["é"], name="naïve", values={"loss": [1.0, math.nan]})
    (run,) = read_json(invoke("runs", "-d", tmp_path, "--json"))
    assert (run["id"], run["name"], run["tags"]) == ("run-nan", "naïve", ["é"])
    assert (run["project_name"], run["state"], run["last_loss"]) == ("vision", "completed", None)
    assert run["duration_s"] >= 0
    assert "not finite" in find_row(invoke("runs", "-d", tmp_path), "run-nan")


@pytest.mark.long
def test_ids_are_shortened_only_as_far_as_they_differ(invoke, tmp_path, log_run):
    for run_id in ("0123456789-a-rest", "0123456789-b-rest"):
        log_run(tmp_path, run_id)
    lines = invoke("runs", "-d", tmp_path).stdout.splitlines()
    shown = [line.split()[0] for line in lines if line.strip().startswith("0123")]
    assert shown == ["0123456789-b", "0123456789-a"]


@pytest.mark.long
def test_the_working_directory_is_the_default_store(invoke, store, monkeypatch):
    monkeypatch.chdir(store)
    assert list_ids(invoke("runs", "--json")) == ["run-c", "run-b", "run-a"]


def test_a_run_in_progress_is_running(invoke, tmp_path, start):
    session = start(tmp_path, "run-live")
    assert find_row(invoke("runs", "-d", tmp_path), "run-live").split()[2] == "running"
    session.end_run()
    assert find_row(invoke("runs", "-d", tmp_path), "run-live").split()[2] == "completed"


@pytest.mark.long
def test_a_killed_run_is_lost(invoke, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "started\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    (run,) = json.loads(invoke("runs", "-d", tmp_path, "--status", "lost", "--json").stdout)
    assert (run["state"], run["status"]) == ("lost", "running")
    assert find_row(invoke("runs", "-d", tmp_path), run["id"][:8]).split()[2] == "lost"
    assert list_ids(invoke("runs", "-d", tmp_path, "-s", "running", "--json")) == []


@pytest.mark.sampled
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_early_causes_no_traceback(store, options):
    reading, writing = os.pipe()
    os.close(reading)
    quark_script = Path(sys.executable).with_name("quark")
    done = subprocess.run(
        [quark_script, "runs", "-d", store, *options], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert done.returncode not in (0, 2)
    assert done.stderr == b""


@pytest.mark.long
def test_the_command_line_is_installed_as_quark(quark_command, store):
    done = quark_command("runs", "-d", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [run["id"] for run in json.loads(done.stdout)] == ["run-c", "run-b", "run-a"]
    assert quark_command("--version").stdout.startswith("quark, version ")


@pytest.mark.long
def test_very_many_runs_are_lines_that_say_the_same(invoke, store, monkeypatch):
    options = ("runs", "-d", store, "--where", "val/loss < 10", "--sort", "val/loss")
    for arguments in (options, ("runs", "-d", store)):
        table = invoke(*arguments).stdout.splitlines()
        monkeypatch.setattr("quark.cli.runs.MANY_RUNS", 0)
        monkeypatch.setattr("quark.cli.runs._BLOCK_ROWS", 2)
        lines = invoke(*arguments).stdout.splitlines()
        monkeypatch.undo()
        words = [line.split() for line in table if line.strip() and "──" not in line]
        assert [line.split() for line in lines if "──" not in line] == words
        assert len(words) > 2


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [40, 80])
def test_lines_of_very_many_runs_fit_the_terminal(invoke, store, monkeypatch, columns):
    monkeypatch.setattr("quark.cli.runs.MANY_RUNS", 0)
    done = invoke("runs", "-d", store, columns=columns)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines[2:]} == {"run-a", "run-b", "run-c"}
    assert max(map(len, lines)) <= columns
