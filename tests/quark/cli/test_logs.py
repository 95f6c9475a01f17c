"""`quark logs` prints what a run has printed, also while it goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest

import quark
from quark_core.records.base import start_fields
from quark_core.records.kinds.console import ConsoleRecord


@pytest.fixture
def printed(tmp_path, start):
    """A run of some lines, of which the last is a progress bar."""
    session = start(tmp_path, "talks")
    add = session.write
    for number in range(5):
        add([make("stdout", number, f"line {number}")])
    add([make("stderr", 0, "a warning\x1b[31m \u202e<b>", left_out=3)])
    session.add_log("an event", identifier="Info")
    add([make("stderr", 1, f"{percent} %", is_whole=False) for percent in range(0, 100, 10)])
    session.end_run()
    return tmp_path


def make(stream, line, text, **fields):
    return ConsoleRecord(*start_fields(None), stream, line, text, **fields)


def test_every_line_is_printed_once_and_steers_no_terminal(printed, invoke):
    done = invoke("logs", "talks", "-d", printed)
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        *(f"line {number}" for number in range(5)),
        "… 3 lines were left out here …",
        "a warning\\x1b[31m \\u202e<b>",
        "90 %",
    ]


def test_lines_are_chosen(printed, invoke):
    def lines(*options):
        return invoke("logs", "talks", "-d", printed, *options).output.splitlines()

    assert lines("--stream", "err", "-n", 1) == ["90 %"]
    assert lines("--limit", 3, "--stream", "out") == ["line 2", "line 3", "line 4"]
    assert lines("--search", "LINE 3") == ["line 3"]
    assert lines("--since", "1h") == lines()
    for nothing in (("--since", "2100-01-01"), ("--rank", 1)):
        assert lines(*nothing)[0].startswith("quark: no matching console output in run talks of")
    assert "info user_log: an event" in lines("--events")
    assert lines("--time", "-n", 1)[0].endswith(" 90 %")


def test_json_is_one_object_a_line(printed, invoke):
    done = invoke("logs", "talks", "-d", printed, "--json", "--stream", "err")
    found = [json.loads(line) for line in done.output.splitlines()]
    assert [(one["stream"], one["line"], one["is_whole"], one["left_out"]) for one in found] == [
        ("stderr", 0, True, 3), ("stderr", 1, False, 0),
    ]  # fmt: skip
    assert found[0]["text"] == "a warning\x1b[31m \u202e<b>"


PROGRAM = """
import os, signal, sys, time, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1], capture="sys")
print(session.run_id, flush=True)
number = 0
while not sys.stdin.isatty():
    print("line", number, flush=True)
    number += 1
    time.sleep(0.05)
    if number == int(sys.argv[2]):
        break
if sys.argv[3:]:
    os.kill(os.getpid(), signal.SIGKILL)
session.end_run()
"""


def begin(tmp_path, lines, *end):
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(lines), *end],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "QUARK_CAPTURE": "sys"},
    )
    return child, child.stdout.readline().strip()


@pytest.mark.long
def test_it_follows_a_run_until_it_ends(tmp_path, quark_command):
    child, run_id = begin(tmp_path, 60)
    done = quark_command("logs", run_id, "-f", "-d", tmp_path)
    child.communicate()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [run_id, *(f"line {number}" for number in range(60))]


def test_ctrl_c_ends_it_and_the_run_goes_on(tmp_path):
    child, run_id = begin(tmp_path, 10_000)
    command = [sys.executable, "-m", "quark", "logs", run_id, "-f", "-d", str(tmp_path)]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert follower.stdout.readline().strip() == run_id
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=60)
    assert (follower.returncode, err) == (130, "")
    assert child.poll() is None
    child.kill()
    child.communicate()


@pytest.mark.long
def test_a_run_that_is_killed_is_followed_to_its_last_line(tmp_path, quark_command):
    # Not in the middle of a line: that is kept once it is printed.
    child, run_id = begin(tmp_path, 20, "killed")
    said = [run_id, *child.communicate()[0].splitlines()]
    assert child.returncode == -signal.SIGKILL
    quark_command("sync", tmp_path)
    done = quark_command("logs", run_id, "-f", "-d", tmp_path)
    assert done.stdout.splitlines() == said
    assert said[-1] == "line 19"


def test_a_run_without_lines_says_so(tmp_path, log_run, invoke):
    log_run(tmp_path, "silent")
    done = invoke("logs", "silent", "-d", tmp_path)
    assert done.exit_code == 0
    assert "capture=None" in done.output
    assert quark.open_run("silent", tmp_path).run_id == "silent"
