"""What another user wrote into a run reaches no terminal as it is, by whichever command."""

import ast
import contextlib
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hostile_runs import (
    ESCAPES,
    EVIL,
    FINE,
    STYLE,
    find_unfit,
    log_hostile_run,
    open_hostile_sweeps,
    run_command,
)
from service_fixtures import make_databases
from set_for_tests import SET_FOR_TESTS

import quark
from quark.cli.main import cli
from quark_core.system.terminal_text import clean_line, clean_text, escape_json

ROOT = Path(__file__).parents[3]
# What walks over a store with such runs, or over one of them. The rest shows nothing of a run.
WALKED = {
    "analyze": ["analyze RUN", "analyze RUN --json", "analyze RUN --explain all"],
    "artifacts alias": ["artifacts alias n:v0 EVIL", "artifacts alias some_name:v0 best -p EVIL"],
    "artifacts get": ["artifacts get some_name:latest -o OUT", "artifacts get EVIL -o OUT"],
    "artifacts lineage": ["artifacts lineage RUN", "artifacts lineage RUN --json"],
    "artifacts list": ["artifacts RUN", "artifacts RUN --json", "artifacts RUN --output OUT"],
    "artifacts versions": ["artifacts versions", "artifacts versions some_name --json"],
    "backends": ["backends", "backends --json"],
    "backup": ["backup OUT"],
    "compare": ["compare RUN OTHER", "compare RUN OTHER --json"],
    "doctor": ["doctor", "doctor --json"],
    "du": ["du", "du --json"],
    "edit": ["edit RUN --name EVIL --notes EVIL --tag EVIL", "edit RUN --untag EVIL --archive"],
    "export": ["export RUN --format csv --output OUT", "export RUN --format csv --output OUT"],
    "follow": ["follow RUN --no-analyze", "follow RUN --once", "follow RUN --once --json"],
    "groups describe": ["groups describe fine EVIL", "groups describe new EVIL -p x"],
    "groups list": ["groups", "groups --json", "groups list --metric train/loss"],
    "gc": ["gc --dry-run", "gc", "gc --yes"],
    "import csv": ["import csv TABLE", "import csv TABLE --json", "import csv TABLE --step none"],
    "logs": ["logs RUN", "logs RUN --json", "logs RUN --events --search E"],
    "mirror replay": ["mirror replay RUN --to csv:OUT"],
    "mirror status": ["mirror status RUN", "mirror status RUN --json"],
    "mirror verify": ["mirror verify RUN"],
    "report": ["report RUN OTHER -o OUT", "report RUN -o OUT --json"],
    "restore": ["restore TRASHED"],
    "rm": ["rm OTHER", "rm OTHER --yes", "rm --list"],
    "runs": [
        "runs",
        "runs --json",
        "runs --where EVILTAG",
        "runs --where config.lr>0",
        "runs -p x",
        "runs --group-by group",
        "runs --group-by field.evil",
        "runs --group-by config",
        "runs --columns field.evil",
    ],
    "samples": ["samples RUN", "samples RUN --full", "samples RUN --json"],
    "show": [
        "show RUN",
        "show RUN --json",
        "show RUN --why",
        "show RUN --why --json",
        "show RUN --why EVIL",
        "show EVIL",
        "show nothing",
    ],
    "traces": ["traces EVIL", "traces EVIL EVIL --json", "traces nothing"],
    "sources": ["sources RUN", "sources RUN --json", "sources RUN --diff OTHER"],
    "sweep cancel": ["sweep cancel SWEEP -y"],
    "sweep new": ["sweep new EVIL -p EVIL --set k=1 --metric m --mode max"],
    "sweep pause": ["sweep pause SWEEP", "sweep pause nothing"],
    "sweep resume": ["sweep resume SWEEP"],
    "sweep retry": ["sweep retry SWEEP", "sweep retry SWEEP --trial 0"],
    # What is appended is the command's.
    "sweep run": ["sweep run fine -d ROOT -- false", "sweep run SWEEP -d ROOT -- false"],
    "sweep show": ["sweep", "sweep show SWEEP", "sweep show SWEEP --json", "sweep show --json"],
    "stop": ["stop RUN --reason EVIL", "stop nothing"],
    "sync": ["sync ROOT --dry-run", "sync ROOT --json", "sync ROOT"],
    "why": ["why RUN OTHER -d ROOT", "why RUN OTHER -d ROOT --json"],
}
ELSEWHERE = {
    "backends new": "writes files of its own text",
    "db backup": "names databases by the operator's words",
    "db restore": "likewise",
    "db upgrade": "likewise",
    "db version": "likewise",
    "mcp": "serves a protocol of its own, in which texts are escaped",
    **{
        f"import {tool}": "prints by what `import csv` prints by"
        for tool in (
            "aim",
            "ato",
            "clearml",
            "comet",
            "mlflow",
            "neptune",
            "tensorboard",
            "track",
            "trackio",
            "wandb",
        )
    },
    "keys create": "its words are the operator's own",
    "keys list": "see test_keys_of_a_service",
    "keys revoke": "its words are the operator's own",
    "keys rotate": "likewise",
    "serve": "logs through the guarded logger",
    "ui": "shows runs in the browser; of the terminal it says the place alone",
}


def list_commands(group=cli, prefix=""):
    """Every command and subcommand, by the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield f"{prefix}{name}"
            yield from list_commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with hostile runs: two, one in the trash, one of which records wait for a mirror."""
    for name in [*os.environ]:
        if (name.startswith("QUARK_") and name not in SET_FOR_TESTS) or name in (
            "FORCE_COLOR",
            "TTY_COMPATIBLE",
        ):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    place = {name: log_hostile_run(storage_dir=root) for name in ("RUN", "OTHER", "TRASHED")}
    assert run_command(monkeypatch, "rm", "-y", place["TRASHED"], "-d", root)[0] == 0
    open_hostile_sweeps(root)
    # A mirror at a place where no folder can be, with a name to match.
    blocked = tmp_path / f"m{EVIL.replace('/', '')[:60]}"
    blocked.write_text("")
    table = tmp_path / "table.csv"
    header = ",".join(["step", f'"loss{EVIL[:60]}"', f'"word{EVIL[:60]}"'])
    table.write_text(f'{header}\n0,1.5,"{EVIL}"\n1,0.5,"{EVIL}"\n', "utf-8")
    place["TABLE"] = str(table)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "1")
    place["WAITS"] = log_hostile_run(storage_dir=root, backends=[f"csv:{blocked}"])
    return root, place


def test_every_command_is_walked_or_named():
    assert set(list_commands()) == {*WALKED, *ELSEWHERE}


@pytest.mark.sampled
@pytest.mark.parametrize("name", WALKED)
def test_a_command_shows_nothing_that_steers_a_terminal(name, store, tmp_path, monkeypatch):
    root, place = store
    shown = ""
    for line in WALKED[name]:
        words = [
            {
                **place,
                "ROOT": str(root),
                "OUT": str(tmp_path / "out"),
                "csv:OUT": f"csv:{tmp_path / 'out'}",
                "EVIL": f"n{EVIL}{FINE}",
                "EVILTAG": "tag == 'fine'",
                "SWEEP": f"s{EVIL}",
            }.get(word, word)
            for word in line.split()
        ]
        if words[0] not in ("sync", "backends"):
            words += ["-d", str(root)]
        status, stdout, stderr = run_command(monkeypatch, *words)
        # The runs have failed, which is what `follow` says by its status.
        assert status in ((3,) if words[0] == "follow" else (0, 1, 2)), stderr
        for text in (stdout, stderr):
            assert find_unfit(text) == [], line
            assert not re.search(r"(?m)^(ok|completed   fine)", text), line
        shown += stdout + stderr
        if "--json" in words and stdout.strip().startswith(("{", "[")):
            told = json.dumps(json.loads(stdout))
            # Exact: what was logged is what a program reads.
            if name in ("show", "runs", "du") and "--why" not in words:
                assert json.dumps(f"n{EVIL}{FINE}")[1:-1] in told
    assert shown
    if name in ("runs", "show", "compare", "analyze", "du"):
        assert clean_line(ESCAPES["colour"]) in shown.replace("\n", "")
        assert "[red]x" in shown


@pytest.mark.long
def test_runs_of_a_service_are_no_different(tmp_path, monkeypatch, service):
    monkeypatch.chdir(tmp_path)
    run_id = log_hostile_run(storage_dir=tmp_path)
    other = log_hostile_run(storage_dir=tmp_path)
    for line in (
        "runs",
        f"show {run_id}",
        f"analyze {run_id} --no-store",
        f"compare {run_id} {other}",
        f"artifacts {run_id}",
        f"export {run_id} --format csv --output out",
        "runs --json",
        "sync",
        "doctor",
    ):
        status, stdout, stderr = run_command(monkeypatch, *line.split())
        assert status == 0, stderr
        assert find_unfit(stdout + stderr) == [], line


def test_keys_of_a_service(tmp_path, monkeypatch):
    store = f"sqlite:///{tmp_path / 'served'}"
    name = "[red]key[/red] \u3164 :warning:"
    make_databases(store)
    hostile = run_command(monkeypatch, "keys", "create", "--store", store, "--name", f"key{EVIL}")
    made = run_command(monkeypatch, "keys", "create", "--store", store, "--name", name)
    assert (hostile[0], made[0]) == (1, 0), made[2]
    assert find_unfit(hostile[2]) == []
    for words in (["keys", "list"], ["keys", "list", "--json"], ["db", "version"]):
        status, stdout, stderr = run_command(monkeypatch, *words, "--store", store)
        assert status == 0, stderr
        assert find_unfit(stdout + stderr) == []
        assert ("[red]key" in stdout) == ("list" in words)


def read_terminal(*words, columns=120):
    """What the installed command writes to a terminal of its own."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    script = str(Path(sys.executable).with_name("quark"))
    process = subprocess.Popen(
        [script, *map(str, words)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**environment, "PYTHONIOENCODING": "utf-8"},
    )
    os.close(terminal)
    data = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([controller], [], [], 60)[0] and (part := os.read(controller, 65536)):
            data += part
    os.close(controller)
    assert process.wait(60) == 0
    return data.decode()


@pytest.mark.long
@pytest.mark.parametrize("words", ["show RUN", "runs", "analyze RUN --no-store", "du"])
def test_on_a_real_terminal_only_our_own_styling_is_there(words, store):
    root, place = store
    raw = read_terminal(*(place.get(word, word) for word in words.split()), "-d", root)
    assert STYLE.search(raw)
    plain = STYLE.sub("", raw).replace("\r\n", "\n")
    assert find_unfit(plain) == []
    # Neither theirs, nor markup or emoji codes that became styling.
    assert "\x1b]8" not in raw
    assert "\x1b[31mE" not in raw
    assert "[red]x" in "".join(plain.split())


@pytest.mark.long
def test_rows_of_a_table_stay_rows(store, monkeypatch):
    """Its columns begin where they begin in every row, however wide what is shown is."""
    root, _ = store
    _, stdout, _ = run_command(monkeypatch, "du", "-d", root)
    from rich.cells import cell_len

    rows = [line for line in stdout.splitlines() if re.match(r" [0-9a-f]{8}  n", line)]
    assert len(rows) == 4
    assert len({cell_len(row.rstrip()) for row in rows}) == 1


@pytest.mark.parametrize("kind", ESCAPES)
def test_what_is_not_fit_is_spelled_out(kind):
    for text in (clean_line(ESCAPES[kind]), clean_line(EVIL)):
        assert find_unfit(text) == []
        assert "\n" not in text
    assert json.loads(escape_json(json.dumps(ESCAPES[kind], ensure_ascii=False))) == ESCAPES[kind]
    assert find_unfit(escape_json(json.dumps(ESCAPES[kind], ensure_ascii=False))) == []


def test_what_has_a_shape_of_its_own_stays():
    assert clean_line(FINE) == clean_text(FINE) == FINE
    assert clean_text("a\tb\nc") == "a\tb\nc"
    assert clean_line("a\tb\nc") == r"a\tb\nc"


def test_log_messages_of_quark_are_fit_too(capfd, tmp_path):
    handler = logging.StreamHandler()
    logger = logging.getLogger("quark")
    logger.addHandler(handler)
    try:
        logger.warning("run %s: %s of %d", f"a{EVIL}", ValueError(EVIL), 3)
        logger.warning("%(name)s", {"name": EVIL})
        try:
            raise ValueError(EVIL)
        except ValueError:
            logger.exception("it broke")
    finally:
        logger.removeHandler(handler)
    told = capfd.readouterr().err
    assert find_unfit(told) == []
    first = told.splitlines()[0]
    assert first == f"run {clean_line(f'a{EVIL}')}: {clean_line(EVIL)} of 3"
    assert "Traceback" in told


def test_the_last_line_of_a_run_is_fit(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.2")
    blocked = tmp_path / f"m{EVIL.replace('/', '')[:60]}"
    blocked.write_text("")
    with quark.start_run(project="p", storage_dir=tmp_path, backends=[f"csv:{blocked}"]) as run:
        quark.MetricsLogger(run).log("m", 1.0, step=0)
    assert "waiting" in caplog.text
    assert find_unfit(caplog.text) == []


def test_every_logger_of_quark_is_guarded():
    """By the package that uses it: a filter is not that of the loggers below."""
    names = set()
    for package in ("quark", "quark_core", "quark_backends", "quark_torch"):
        for path in (ROOT / package).rglob("*.py"):
            names |= set(re.findall(r'getLogger\("(quark[a-z.]*)"\)', path.read_text()))
    code = f"""
import importlib, logging
for name in ("quark_core", "quark_backends.service.server", "quark_torch"):
    importlib.import_module(name)
print([n for n in {sorted(names)!r} if not logging.getLogger(n).filters])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.long
def test_commands_have_console_and_text_from_one_place():
    """Rich's own would print markup, and styles that the guarded streams then spell out."""
    taken = []
    for path in sorted((ROOT / "quark").rglob("*.py")):
        if path.name == "texts.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
                names = {alias.name for alias in node.names}
                taken += [(path.name, name) for name in names & {"Console", "Text", "TextColumn"}]
    # Types, for readers only, are of Rich.
    assert taken == []
