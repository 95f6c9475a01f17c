"""A storage root that cannot be written down is refused by name, by every command."""

import os

import click
import pytest

import quark
from quark.cli.main import cli

SHOWN = r"bad-\xff"
COMMANDS = [
    ("runs",),
    ("show", "x"),
    ("artifacts", "x"),
    ("analyze", "x"),
    ("compare", "x", "y"),
    ("why", "x", "y"),
    ("export", "x", "--format", "csv"),
    ("rm", "x"),
    ("report", "x"),
    ("restore", "x"),
    ("gc", "-y"),
    ("du",),
    ("doctor",),
    ("backup", "copy"),
    ("ui", "--no-open"),
    ("follow", "x"),
    ("sources", "x"),
    ("traces", "x"),
    ("stop", "x"),
    ("edit", "x", "--name", "y"),
    ("logs", "x"),
    ("samples", "x"),
    ("groups",),
    ("sweep", "show"),
]
# It opens the store when it is first asked for something, and says so to whoever asks.
OPENS_LATER = {"mcp"}


@pytest.fixture
def odd_path(tmp_path):
    path = os.fsencode(tmp_path) + b"/bad-\xff"
    try:
        os.mkdir(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    return os.fsdecode(path)


@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_start_run_names_storage_dir(odd_path, monkeypatch, journal_only):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    with pytest.raises(
        quark.SessionStoreError, match=r"storage_dir .*bad-\\xff is not valid UTF-8"
    ):
        quark.start_run(project="p", storage_dir=odd_path)
    assert os.listdir(odd_path) == []


@pytest.mark.sampled
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_each_command_names_storage_dir(odd_path, quark_command, words):
    done = quark_command(*words, "-d", odd_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{SHOWN} is not valid UTF-8" in done.stderr


@pytest.mark.long
def test_sync_names_storage_dir(odd_path, quark_command):
    done = quark_command("sync", odd_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{SHOWN} is not valid UTF-8" in done.stderr


def test_a_working_directory_that_cannot_be_written_down_is_refused(odd_path, monkeypatch):
    monkeypatch.chdir(odd_path)
    with pytest.raises(quark.SessionStoreError, match="is not valid UTF-8"):
        quark.start_run(project="p")


def test_every_command_with_a_storage_root_is_here():
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    with_root = {
        name
        for name, command in commands.items()
        # A group of which `list` or `show` need not be said is that command.
        if any(option.name == "storage_dir" for option in _find_first(command).params)
    }
    assert with_root == {words[0] for words in COMMANDS} | OPENS_LATER


def _find_first(command):
    commands = getattr(command, "commands", {})
    return commands.get("list") or commands.get("show") or command
