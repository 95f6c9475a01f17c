"""Messages of the command line: how they begin, what they count and name, how wide they are."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

import quark
from quark.cli.main import cli

LONG = "a-name-that-is-longer-than-a-terminal-is-wide-" * 4
RANKS = """
import sys
import quark

rank, root = int(sys.argv[1]), sys.argv[2]
with quark.start_run(project="p", storage_dir=root, ranks="all") as session:
    events = quark.EventLogger(session)
    for number in range(3):
        input()
        events.log("note", payload={"message": f"event {2 * number + rank}"})
        events.flush()
        print("logged", flush=True)
    input()
"""


@pytest.mark.parametrize(
    "arguments",
    [("nosuch",), ("show",), ("show", "zzz"), ("runs", "--limit", "x"), ("sources", "r", "no.py")],
)
def test_every_error_begins_with_the_name_of_the_program(
    quark_command, tmp_path, log_run, arguments
):
    log_run(tmp_path, "r")
    place = () if arguments in {("nosuch",), ("show",)} else ("-d", tmp_path)
    done = quark_command(*arguments, *place)
    assert done.returncode in (1, 2)
    assert "Error:" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("quark: ")


def list_help(command, *names):
    """The help of a command and of all below it."""
    import click

    context = click.Context(command, info_name=" ".join(("quark", *names)))
    yield names, command.get_help(context)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from list_help(command.get_command(context, name), *names, name)


def test_help_names_no_file_of_the_repository():
    """An installed wheel has no docs folder."""
    found = dict(list_help(cli))
    assert len(found) > 40
    assert [names for names, text in found.items() if "docs/" in text] == []


@pytest.mark.long
def test_docstrings_name_no_file_of_the_repository():
    public = [getattr(quark, name) for name in quark.__all__]
    members = [
        member
        for each in public
        if isinstance(each, type)
        for name, member in vars(each).items()
        if not name.startswith("_")
    ]
    texts = [getattr(each, "__doc__", None) or "" for each in (*public, *members)]
    assert [text for text in texts if "docs/" in text] == []


@pytest.mark.parametrize("command", ["analyze", "compare", "why", "follow", "sweep run"])
def test_the_help_tells_the_exit_statuses(command):
    text = dict(list_help(cli))[tuple(command.split())]
    for status in (0, 1, 2, 3):
        assert re.search(rf"^    {status}    \w", text, re.M)


def test_help_names_the_order_of_runs():
    assert "compare [OPTIONS] OLD NEW" in dict(list_help(cli))["compare",]
    assert "why [OPTIONS] [OLD] NEW" in dict(list_help(cli))["why",]


def test_one_thing_is_counted_as_one(invoke, tmp_path, log_run, monkeypatch):
    log_run(tmp_path, "r", values={"loss": [1.0]})
    out = invoke(
        "export", "r", "-d", tmp_path, "--format", "csv", "-k", "metric", "-o", tmp_path / "out"
    )
    assert out.stdout.startswith("1 row, ")


def test_ids_are_short_for_people_and_whole_for_programs(invoke, tmp_path):
    ids = []
    for level in (1.0, 2.0):
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            quark.MetricsLogger(session).log("loss", level, step=0)
        ids.append(session.run_id)
    for command in (("compare", *ids), ("analyze", ids[0])):
        shown = invoke(*command, "-d", tmp_path).stdout
        assert ids[0][:8] in shown.splitlines()[0] + shown.splitlines()[1]
        assert ids[0] not in "".join(shown.splitlines()[:2])
        assert ids[0] in invoke(*command, "-d", tmp_path, "--json").stdout


@pytest.mark.long
@pytest.mark.parametrize("command", ["runs", "du"])
def test_a_table_in_a_pipe_has_whole_names(quark_command, tmp_path, log_run, command):
    log_run(tmp_path, "r", name=LONG, values={"loss": [1.0]})
    assert LONG in quark_command(command, "-d", tmp_path).stdout
    narrow = quark_command(command, "-d", tmp_path, COLUMNS="60")
    assert max(map(len, narrow.stdout.splitlines())) <= 60


@pytest.mark.long
def test_a_cause_in_a_pipe_has_its_whole_name(quark_command, tmp_path, log_run):
    for value, level in ((1, 0.9), (2, 0.5)):
        log_run(tmp_path, f"r{value}", values={"val/acc": [level]}, config={LONG: value})
    assert LONG in quark_command("why", "r1", "r2", "-d", tmp_path).stdout


@pytest.mark.long
def test_events_of_several_ranks_are_in_the_order_of_time(invoke, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "ranked")
    monkeypatch.setenv("QUARK_QUIET", "1")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29511",
                "TORCHELASTIC_RUN_ID": "ranked",
            },
        )
        for rank in range(2)
    ]
    for number in range(6):
        process = processes[number % 2]
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "logged\n"
        time.sleep(0.02)
    for process in processes:
        process.communicate("\n", timeout=120)
    shown = invoke("show", "ranked", "-d", tmp_path, "--json", "--logs", "100").stdout
    found = json.loads(shown)["events"]
    notes = [each["payload"]["message"] for each in found if each["event_type"] == "note"]
    assert notes == [f"event {number}" for number in range(6)]
    times = [each["timestamp"] for each in found]
    assert times == sorted(times)
