"""Where there is no store, or one that cannot be read, every command says so."""

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from calls import call

import quark
from quark_core.errors import SessionStoreError

NOBODY = 65534
COMMANDS = [
    ["sync"],
    ["sync", "--dry-run"],
    ["doctor", "-d"],
    ["doctor", "--json", "-d"],
    ["runs", "-d"],
]
# Calls the command as a user who may not do everything, once it has loaded all that it needs.
UNPRIVILEGED = """
import os, sys
from quark.cli.main import cli, main
warm, *arguments = sys.argv[1:]
for command in ("runs", "doctor"):
    try:
        cli([command, "-d", warm])
    except SystemExit:
        pass
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
sys.stdout.flush()
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.argv[1:] = arguments
main()
"""


def refuse(*arguments):
    with pytest.raises(SessionStoreError) as caught:
        call(*arguments)
    return str(caught.value)


def make_store(root):
    with quark.start_run(project="vision", storage_dir=root) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    return root / ".quark"


@pytest.fixture
def folder(tmp_path):
    return make_store(tmp_path)


def set_pragma(database, statement):
    connection = sqlite3.connect(database)
    connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_store_is_refused(tmp_path, command):
    assert "no Quark store in" in refuse(*command, tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_folder_is_refused(tmp_path, command):
    (tmp_path / ".quark").mkdir()
    (tmp_path / ".quark" / "theirs").touch()
    assert "was not created by this Quark" in refuse(*command, tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_store_is_refused(tmp_path, folder, command):
    set_pragma(folder / "quark.db", "PRAGMA user_version=99")
    assert "Upgrade quark-tracker" in refuse(*command, tmp_path)


@pytest.mark.parametrize(
    "command", [*COMMANDS, ["analyze", "x", "-d"], ["compare", "x", "y", "-d"]]
)
def test_what_is_no_database_is_named(tmp_path, folder, command):
    (folder / "quark.db").write_bytes(os.urandom(8192))
    assert f"{folder / 'quark.db'} " in refuse(*command, tmp_path)


def test_damaged_pages_are_told_with_the_path(tmp_path, folder):
    database = folder / "quark.db"
    whole = database.read_bytes()
    database.write_bytes(whole[:4096] + bytes(range(256)) * ((len(whole) - 4096) // 256))
    assert str(database) in refuse("runs", "-d", tmp_path)


def test_doctor_begins_with_the_store(tmp_path, folder):
    assert call("doctor", "-d", tmp_path).stdout.splitlines()[0] == f"Store {folder}: readable."
    found = json.loads(call("doctor", "--json", "-d", tmp_path).stdout)["store"]
    assert found == {"path": str(folder), "readable": True, "reason": None, "log_bytes": 0}


@pytest.mark.long
def test_journals_that_are_the_store_are_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    folder = make_store(tmp_path)
    assert not (folder / "quark.db").exists()
    assert call("doctor", "-d", tmp_path).stdout.splitlines()[0] == f"Store {folder}: readable."
    assert "kept" in call("sync", tmp_path).stdout
    monkeypatch.delenv("QUARK_JOURNAL_ONLY")
    first, *rest = call("doctor", "-d", tmp_path).stdout.splitlines()
    assert first.startswith(f"Store {folder}: cannot be read: the runs in ")
    assert f"To deliver them: quark sync {tmp_path}" in rest
    assert "pending" in call("sync", "--dry-run", tmp_path).stdout
    assert "delivered" in call("sync", tmp_path).stdout
    assert call("doctor", "-d", tmp_path).stdout.splitlines()[0] == f"Store {folder}: readable."


def test_an_empty_store_of_journals_can_be_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    folder = make_store(tmp_path)
    shutil.rmtree(folder / "runs")
    assert call("sync", tmp_path).stdout == "No records are waiting.\n"
    assert call("doctor", "-d", tmp_path).stdout.splitlines()[0] == f"Store {folder}: readable."


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_database_does_not_send_in_a_circle(tmp_path, folder, command):
    (folder / "runs").mkdir(exist_ok=True)
    for path in folder.glob("quark.db*"):
        path.unlink()
    message = refuse(*command, tmp_path)
    assert f"quark.db is missing from {folder}" in message
    assert "backup" in message
    assert "quark sync" not in message
    assert "network" not in message


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_marker_that_is_lost_can_be_made_again(tmp_path, folder, damage):
    marker = folder / "store.json"
    if damage == "damaged":
        marker.write_bytes(b"\0" * 40)
    else:
        marker.unlink()
    message = refuse("runs", "-d", tmp_path)
    assert f"{marker}, which marks the folder as a Quark store, is {damage}" in message
    marker.write_text(message[message.index("{") :])
    assert "vision" in call("runs", "-d", tmp_path).stdout


@pytest.fixture
def open_folder():
    """A folder that anyone may enter, unlike `tmp_path`."""
    path = Path(tempfile.mkdtemp(prefix="quark-test-"))
    path.chmod(0o755)
    yield path
    for found in path.rglob("*"):
        found.chmod(0o755)
    shutil.rmtree(path)


def call_unprivileged(open_folder, *arguments):
    warm = open_folder / "warm"
    make_store(warm)
    for path in (warm, *warm.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, warm, *arguments], capture_output=True, text=True
    )


@pytest.mark.long
def test_a_folder_that_may_not_be_entered_is_one_line(open_folder):
    make_store(open_folder / "closed" / "store")
    (open_folder / "closed").chmod(0)
    done = call_unprivileged(open_folder, "runs", "-d", open_folder / "closed" / "store")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"quark: storage_dir {open_folder}/closed/store cannot be accessed")
    assert "permission" in line


@pytest.mark.sampled
@pytest.mark.parametrize("with_log", [False, True])
def test_a_database_that_may_not_be_read_is_told_as_that(open_folder, with_log):
    database = make_store(open_folder / "store") / "quark.db"
    if with_log:
        database.with_name("quark.db-wal").write_bytes(b"\0" * 100)
    for path in (database.parent, database.parent.parent):
        path.chmod(0o755)
    database.chmod(0)
    done = call_unprivileged(open_folder, "runs", "-d", open_folder / "store")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"quark: the store {database} cannot be read: permission denied")
    assert stat.S_IMODE(database.stat().st_mode) == 0
