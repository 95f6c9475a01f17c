"""A process that ends with a status other than 0 ends its run as interrupted; the code is kept."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli

HEAD = """
import os, sys, threading, quark

def start(**more):
    session = quark.start_run(project="p", storage_dir=sys.argv[1], **more)
    print(session.run_id, flush=True)
    return session
"""
WAYS = {
    "script": ["train.py"],
    "module": ["-m", "train"],
}


def run_program(folder, body, way="script", **environment):
    """Run a program and return its exit status, and the run that it began as its store has it."""
    (folder / "train.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, *WAYS[way], str(folder / "store")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    run_id = done.stdout.split()[0]
    session = quark.open_run(run_id, folder / "store")
    return done.returncode, session.open_run.reader.load_run(run_id)


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        ("sys.exit(3)", "interrupted", 3),
        ("sys.exit('no data')", "interrupted", 1),
        ("sys.exit(-1)", "interrupted", 255),
        ("sys.exit(256)", "completed", 0),
        ("sys.exit(0)", "completed", 0),
        ("sys.exit()", "completed", 0),
        ("pass", "completed", None),
        ("raise ValueError('boom')", "failed", 1),
    ],
)
def test_the_status_of_a_process_ends_its_run(tmp_path, way, ending, status, code):
    body = f"def main():\n    start()\n    {ending}\nmain()\n"
    returncode, stored = run_program(tmp_path, body, way)
    assert (stored.run.status, stored.exit_code) == (status, code)
    assert returncode == (code or 0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("def main():\n    start()\n    return 3\nraise SystemExit(main())", "interrupted", 3),
        ("def main():\n    start()\nraise SystemExit(main())", "completed", 0),
        ("start()\nquit(4)", "interrupted", 4),
        ("from sys import exit\nstart()\ntry:\n    exit(5)\nfinally:\n    pass", "interrupted", 5),
    ],
    ids=["raised", "raised with None", "quit", "imported before"],
)
def test_an_exit_that_is_not_called_by_its_name_is_seen_in_a_script(tmp_path, body, status, code):
    returncode, stored = run_program(tmp_path, body)
    assert (stored.run.status, stored.exit_code) == (status, code)
    assert returncode == code


@pytest.mark.sampled
@pytest.mark.parametrize(
    "body",
    [
        "start()\ntry:\n    sys.exit(2)\nexcept SystemExit:\n    pass",
        "start()\ntry:\n    sys.exit(2)\nexcept SystemExit as error:\n    kept = error",
        "start()\nt = threading.Thread(target=sys.exit, args=(2,))\nt.start()\nt.join()",
        "sys.exit = lambda status=None: None\nstart()\nsys.exit(2)",
    ],
    ids=["caught", "caught and kept", "of a thread", "replaced by nothing"],
)
@pytest.mark.parametrize("way", ["script", "module"])
def test_an_exit_that_ends_nothing_counts_for_nothing(tmp_path, way, body):
    returncode, stored = run_program(tmp_path, body, way)
    assert (returncode, stored.run.status, stored.exit_code) == (0, "completed", None)


@pytest.mark.long
def test_a_caught_exit_does_not_stand_for_a_later_one(tmp_path):
    body = "start()\ntry:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nraise SystemExit(None)"
    for way in ("script", "module"):
        _, stored = run_program(tmp_path, body, way)
        assert stored.run.status == "completed"


@pytest.mark.long
def test_who_replaces_exit_is_called(tmp_path):
    body = """
def polite(status=None):
    raise SystemExit(7)
sys.exit = polite
start()
sys.exit(2)
"""
    returncode, stored = run_program(tmp_path, body, "module")
    assert (returncode, stored.run.status, stored.exit_code) == (7, "interrupted", 7)


@pytest.mark.long
def test_a_worker_of_multiprocessing_ends_its_run_as_it_ends(tmp_path):
    body = """
import multiprocessing

def work():
    start()
    raise ValueError("boom")

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""
    returncode, stored = run_program(tmp_path, body)
    assert (returncode, stored.run.status, stored.exit_code) == (1, "interrupted", 1)


@pytest.mark.long
def test_an_exit_out_of_a_session_keeps_its_code(tmp_path):
    returncode, stored = run_program(tmp_path, "with start():\n    sys.exit(3)")
    assert (returncode, stored.run.status, stored.exit_code) == (3, "interrupted", 3)
    session = quark.open_run(stored.run.id, tmp_path / "store")
    (ended,) = quark.EventLogger(session).read(event_type="run_ended")
    ending = {"cause": "exit_status", "message": "exit status 3"}
    assert ended.payload == {"exit_code": 3, "ending": ending}
    assert stored.ending is not None
    assert stored.ending.to_dict() == ending


@pytest.mark.long
def test_the_code_is_shown_and_gone_after_a_resumption(tmp_path):
    _, stored = run_program(tmp_path, "start()\nsys.exit(3)")
    store = str(tmp_path / "store")

    def show(*arguments):
        done = CliRunner().invoke(cli, [*arguments, "--storage-dir", store])
        assert done.exit_code == 0, done.output
        return done.output

    assert "exit code  3" in show("show", stored.run.id)
    (listed,) = json.loads(show("runs", "--json"))
    assert (listed["state"], listed["exit_code"]) == ("interrupted", 3)
    assert json.loads(show("show", stored.run.id, "--json"))["exit_code"] == 3
    session = quark.resume_run(run_id=stored.run.id, storage_dir=store)
    session.end_run()
    assert session.open_run.reader.load_run(stored.run.id).exit_code is None
