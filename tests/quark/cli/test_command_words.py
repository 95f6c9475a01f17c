"""What commands say: about mistakes, limits, lost runs, the trash, and when they are broken off."""

import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from calls import call

import quark
from quark_core.errors import RunNotFoundError
from quark_core.records.query import RunSearch
from quark_core.runs.backend_choice import open_reader
from quark_core.search.fallback import search_by_reading, summarize_by_reading

SCRIPT = str(Path(sys.executable).with_name("quark"))
EXPORT = ("export", "run-a", "--format", "csv")
LOST = """
import os, sys, time, quark
session = quark.start_run(project="vision", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
metrics.log("loss", 1.0, step=0)
time.sleep(3.0)
metrics.log("loss", 0.5, step=1)
session.flush("stored")
print(session.run_id, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A store with two runs, `run-a` and `run-b`."""
    for run_id in ("run-a", "run-b"):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        with quark.start_run(project="vision", storage_dir=tmp_path / "store") as session:
            metrics = quark.MetricsLogger(session)
            for step in range(3):
                metrics.log_many({"loss": 1.0 / (step + 1), "acc": step / 3}, step=step)
    monkeypatch.delenv("QUARK_RUN_ID")
    return tmp_path / "store"


def list_ids(*arguments):
    return [run["id"] for run in json.loads(call("runs", *arguments, "--json").stdout)]


@pytest.mark.sampled
@pytest.mark.parametrize("option", ["--where", "--sort"])
def test_a_search_mistake_is_pointed_at_without_usage(root, option):
    text = "lozz < 1" if option == "--where" else "lozz"
    result = call("runs", "-d", root, option, text, code=2)
    head, line, mark = result.stderr.splitlines()
    assert head.startswith(f"quark: {option}, column 1: ")
    assert (line.strip(), mark.strip()) == (text, "^^^^")
    assert result.stdout == ""


@pytest.mark.long
def test_started_is_created(root):
    assert list_ids("-d", root, "--sort", "started") == ["run-a", "run-b"]
    assert list_ids("-d", root, "--sort", "-started") == ["run-b", "run-a"]
    assert list_ids("-d", root, "--sort", "run.started") == ["run-a", "run-b"]
    assert list_ids("-d", root, "-w", "started > '2020-01-01'") == ["run-b", "run-a"]
    assert list_ids("-d", root, "-w", "started < '2020-01-01'") == []


@pytest.mark.long
def test_a_limit_of_zero_shows_none(root):
    assert list_ids("-d", root, "-n", "0") == []
    assert (
        call("runs", "-d", root, "-n", "0").stdout == "There are more runs; --limit shows them.\n"
    )
    assert (
        call("runs", "-d", root, "-n", "0", "-t", "x").stdout
        == f"No matching runs in the store {root}.\n"
    )
    assert "run-a" not in call("du", "-d", root, "-n", "0").stdout


@pytest.mark.long
def test_one_and_many_are_told_apart(root):
    assert "Only 1 run shown; --limit shows more." in call("runs", "-d", root, "-n", "1").stdout
    for count in (1, 2):
        session = quark.resume_run(run_id="run-a", storage_dir=root, reopen=True)
        session.end_run()
        expected = {1: "resumed  once", 2: "resumed  2 times"}[count]
        assert expected in call("show", "run-a", "-d", root).stdout


@pytest.mark.long
def test_a_lost_run_counts_to_its_last_metric(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOST, tmp_path], capture_output=True, text=True, check=False
    )
    run_id = done.stdout.strip()
    (shown,) = json.loads(call("runs", "-d", tmp_path, "--json").stdout)
    assert shown["state"] == "lost"
    assert shown["duration_s"] >= 1.5
    text = call("show", run_id, "-d", tmp_path).stdout
    assert " s ago, last metric " in text
    assert "took 0.0 s" not in text
    (summary,) = quark.search_runs(storage_dir=tmp_path)
    last = datetime.fromisoformat(summary.last_metric_at)
    assert last - datetime.fromisoformat(shown["created_at"]) >= timedelta(seconds=1.5)
    call("sync", tmp_path)


@pytest.mark.long
def test_the_last_metric_is_the_same_however_it_is_found(root):
    reader = open_reader(root)
    metrics = quark.MetricsLogger(quark.open_run("run-a", root)).read()
    expected = max(record.timestamp for record in metrics)
    by_reading = {run.run_id: run for run in search_by_reading(reader, RunSearch())}
    assert reader.summarize("run-a").last_metric_at == expected
    assert summarize_by_reading(reader, "run-a") == reader.summarize("run-a")
    for run in reader.search(RunSearch()):
        assert run == by_reading[run.run_id]
        assert run.to_dict()["last_metric_at"] == run.last_metric_at


def test_a_run_without_metrics_has_no_last_one(tmp_path):
    with quark.start_run(project="vision", storage_dir=tmp_path) as session:
        pass
    reader = open_reader(tmp_path)
    assert reader.summarize(session.run_id).last_metric_at is None
    assert summarize_by_reading(reader, session.run_id).last_metric_at is None


@pytest.mark.sampled
@pytest.mark.parametrize("command", [["show"], ["export", "--format", "csv"]])
def test_a_run_in_the_trash_is_said_to_be_there(root, command):
    call("rm", "run-a", "-y", "-d", root)
    for text in ("run-a", "run"):
        if text == "run":
            call("rm", "run-b", "-y", "-d", root)
        with pytest.raises(RunNotFoundError) as caught:
            call(*command, text, "-d", root)
        assert f"is in the trash of the store {root} (run-" in str(caught.value)
        assert f"`quark restore {text}` restores it" in str(caught.value)
    with pytest.raises(RunNotFoundError, match="no run matches 'absent'"):
        call(*command, "absent", "-d", root)


@pytest.mark.sampled
@pytest.mark.parametrize("kinds", [[], ["-k", "metric"]])
def test_an_output_that_cannot_be_one_is_refused(root, tmp_path, monkeypatch, kinds):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    for output, words in (("-", "stdout"), ("notes.txt", "an existing file")):
        result = call(
            "export", "run-a", "--format", "csv", "-o", output, *kinds, "-d", root, code=2
        )
        assert f"--output {output}" in result.stderr
        assert words in result.stderr
    assert Path("notes.txt").read_text() == "mine"
    assert not Path("-").exists()
    result = call(
        "export", "run-a", "--format", "csv", "-o", "notes.txt/x", *kinds, "-d", root, code=1
    )
    assert "--output notes.txt/x cannot be written: Not a directory" in result.stderr
    assert ".partial" not in result.stderr


@pytest.mark.long
def test_a_full_disk_is_told_without_a_temporary_name(root, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    # A file that can be made, and into which nothing goes.
    program = (
        "import os; from pathlib import Path; from quark.cli.main import main; "
        "opened = Path.open; "
        "Path.open = lambda self, *a, **k: opened("
        "Path('/dev/full') if self.name.endswith('.partial') else self, *a, **k); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *EXPORT, "-o", target, "-d", root],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"quark: --output {target} cannot be written: No space left on device\n"
    assert [*target.iterdir()] == []


@pytest.mark.long
def test_an_export_that_is_broken_off_says_so_once(root, tmp_path):
    target = tmp_path / "out"
    # Ctrl-C when the first rows have been written.
    program = (
        "import os, signal; from quark.cli.export import CsvFile; "
        "from quark.cli.main import main; write = CsvFile.write; "
        "CsvFile.write = lambda *a: (write(*a), os.kill(os.getpid(), signal.SIGINT)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *EXPORT, "-o", target, "-d", root],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130
    assert done.stderr == "quark: interrupted; incomplete files were removed\n"
    assert done.stdout == ""
    assert not target.exists()


@pytest.mark.long
def test_no_empty_line_where_there_is_no_terminal(root):
    call("rm", "run-a", "-y", "-d", root)
    for arguments in (["gc", "-y", "-d", root], ["sync", root]):
        done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_terminal_has_its_bar(root, monkeypatch):
    call("rm", "run-a", "-y", "-d", root)
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    done = subprocess.run(
        [SCRIPT, "gc", "-y", "-d", root], stdout=subprocess.PIPE, stderr=follower, text=True
    )
    os.close(follower)
    shown = os.read(leader, 10_000)
    os.close(leader)
    assert done.returncode == 0
    assert b"\x1b[" in shown


@pytest.mark.long
def test_a_search_in_a_damaged_store_names_the_file(root):
    database = root / ".quark" / "quark.db"
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    whole = database.read_bytes()
    database.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(quark.SessionStoreError) as caught:
        call("runs", "-d", root)
    assert str(database) in str(caught.value)
