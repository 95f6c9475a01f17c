"""A process that ends with a status other than 0 ends its run as interrupted; the code is kept."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from kit.programs import run_script

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


# A process may end while a thread of a run is at its store: it ends by itself, and has it all.

# A thread prepares statements in its first transaction, again and again, as the process ends.
TRAINING = """
from quark_backends.store.databases.connection import SqliteConnection
from quark_core.runs.backend_choice import open_reader
from quark_core.records.query import RunSearch

asked = threading.Event()
seconds, asks = float(os.environ["ASKS_S"]), os.environ["ASKS"]
execute = SqliteConnection.execute
session = quark.start_run(project="p", storage_dir=storage_dir, system_metrics=False)
reader = session.open_run.reader
asking = {
    "stop": lambda: reader.find_stop(session.id),
    "read": lambda: reader.load_run(session.id),
    "search": lambda: reader.search(RunSearch(project="p")),
    "another": lambda: open_reader(session.context.storage_dir).load_run(session.id),
    "compaction": lambda: reader._compaction._run(),
}[asks]
if asks == "compaction":
    reader._compaction._wake.set()

def execute_for_long(self, sql, *values):
    if threading.current_thread() is thread and (asks == "compaction" or sql.startswith("BEGIN")):
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            number += 1
            execute(self, f"SELECT count(*), {number} FROM sqlite_master, sqlite_master").fetchone()
            asked.set()
    return execute(self, sql, *values)

quark.MetricsLogger(session).log("m", 1.0, step=0)
session.flush()
thread = threading.Thread(target=asking, name="quark-asks", daemon=True)
SqliteConnection.execute = execute_for_long
thread.start()
assert asked.wait(60)
print(session.id)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "asks",
    ["stop", "read", "search", "another", "compaction", "journals: read", "journals: search"],
)
@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(60.0, marks=pytest.mark.long)], ids=["in time", "for ever"]
)
def test_a_process_that_ends_while_its_store_is_asked_ends_by_itself(
    tmp_path, monkeypatch, asks, seconds
):
    if asks.startswith("journals"):
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    # `run_script` sees that the status is 0.
    said, _ = run_script(tmp_path, TRAINING, ASKS_S=str(seconds), ASKS=asks.split()[-1])
    run = quark.open_run(said.strip(), tmp_path)
    assert run.status == "completed"
    assert [record.step for record in quark.MetricsLogger(run).read(metric_key="m")] == [0]


# The first read of all comes after the start, and so does what closes its connection.
ORDER = """
import weakref
from quark_backends.store.databases import connection
from quark_core.runs import open_run

session = quark.start_run(project="p", storage_dir=storage_dir, system_metrics=False)
session.open_run.reader.find_stop(session.id)
# Of others, which Python calls before the runs end.
weakref.finalize(session, print, "finalizers", flush=True)
end_stream = open_run.OpenRun.end_stream

def end_and_tell(self, *arguments):
    print("the run ends", len(connection._open), flush=True)
    return end_stream(self, *arguments)

open_run.OpenRun.end_stream = end_and_tell
connection.call_last(lambda: print("acts", len(connection._open), flush=True))
connection.call_last(lambda: print("closings", len(connection._open), flush=True), closes=True)
"""


def test_connections_are_closed_once_the_runs_have_ended(tmp_path):
    said, _ = run_script(tmp_path, ORDER)
    assert said.split("\n") == ["finalizers", "the run ends 1", "acts 1", "closings 0", ""]
