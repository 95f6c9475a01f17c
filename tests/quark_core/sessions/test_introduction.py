"""What a run says of itself when it begins and ends: one line each, and never at a cost."""

import os
import pty
import re
import subprocess
import sys

import pytest

import quark
from quark_core.config.arguments import find_storage_root
from quark_core.sessions import banner

START = re.compile(r"quark: run ([0-9a-f]{8}) \"digits\" — quark show \1 · quark ui\n")
END = re.compile(r"quark: run ([0-9a-f]{8}) \"digits\" completed after .* — quark show \1\n")
RUN = "import quark\nwith quark.start_run(project='p', name={name!r}) as session:\n    {body}\n"


@pytest.fixture
def spoken(tmp_path, monkeypatch):
    """An empty working directory in which runs speak."""
    monkeypatch.delenv("QUARK_QUIET")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(spoken):
    """Runs a script in a process of its own, and returns what that has done."""

    def run(body="pass", name="digits", *, more="", **environment):
        return subprocess.run(
            [sys.executable, "-c", RUN.format(name=name, body=body) + more],
            capture_output=True,
            timeout=120,
            cwd=spoken,
            env=os.environ | environment,
        )

    return run


def test_a_run_says_one_line_when_it_begins_and_one_when_it_ends(spoken, capfd):
    quark.start_run(project="p", name="digits").end_run()
    said = capfd.readouterr()
    first, second = said.err.splitlines(keepends=True)
    assert START.fullmatch(first)
    assert END.fullmatch(second)
    assert said.out == ""


def test_what_it_says_leads_to_the_run(spoken, capfd):
    with quark.start_run(project="p") as session:
        said = capfd.readouterr().err.split()
        short = said[2]
        # A run without a name of its own is called by its project.
        assert said[3] == '"p"'
        assert quark.open_run(short).id == session.id


def test_quiet_is_quiet(spoken, capfd, monkeypatch):
    monkeypatch.setenv("QUARK_QUIET", "1")
    quark.start_run(project="p").end_run()
    assert capfd.readouterr().err == ""


def test_a_run_of_which_nothing_is_kept_says_nothing(spoken, capfd):
    quark.start_run(project="p", backends="none").end_run()
    assert capfd.readouterr().err == ""


def test_runs_that_are_opened_for_reading_say_nothing(spoken, capfd):
    run_id = quark.start_run(project="p").end_run().run_id
    capfd.readouterr()
    quark.open_run(run_id)
    assert capfd.readouterr().err == ""


def test_a_resumed_run_says_which_attempt_it_is(spoken, capfd):
    run_id = quark.start_run(project="p").end_run().run_id
    capfd.readouterr()
    quark.resume_run(run_id=run_id, reopen=True).end_run()
    assert " resumed (attempt 1) — " in capfd.readouterr().err


def test_a_store_elsewhere_is_named_as_a_command_needs_it(spoken, capfd):
    quark.start_run(project="p", storage_dir=spoken / "my runs").end_run()
    place = f"-d '{spoken / 'my runs'}'"
    for line in capfd.readouterr().err.splitlines():
        assert line.count(place) == (2 if "quark ui" in line else 1)


def test_a_store_above_is_named(spoken, capfd, monkeypatch):
    root = spoken / "project"
    (root / "src").mkdir(parents=True)
    quark.start_run(project="p", storage_dir=root).end_run()
    capfd.readouterr()
    monkeypatch.chdir(root / "src")
    quark.start_run(project="p").end_run()
    first, second = capfd.readouterr().err.splitlines()
    assert f" in {root} — quark show " in first
    assert "-d" not in first + second


def test_where_logging_is_set_up_the_lines_go_there(spoken):
    setup = "import logging; logging.basicConfig(level=logging.INFO)\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + RUN.format(name="digits", body="pass")],
        capture_output=True,
        timeout=120,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert [line.startswith("INFO:quark:run ") for line in lines] == [True, True]


def test_a_handler_that_shows_warnings_only_does_not_swallow_the_lines(spoken):
    setup = (
        "import logging; handler = logging.StreamHandler(); handler.setLevel('WARNING')\n"
        "logging.getLogger('quark').addHandler(handler)\n"
        "logging.getLogger('quark').setLevel('INFO')\n"
    )
    script = setup + RUN.format(name="digits", body="pass")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.stderr.count(b"quark: run") == 2


def test_what_an_ascii_terminal_cannot_show_is_spelled(train):
    done = train(name="zahlen — größe …", PYTHONIOENCODING="ascii")
    first, second = done.stderr.decode("ascii").splitlines()
    assert re.fullmatch(
        r'quark: run [0-9a-f]{8} "zahlen - gr\\xf6\\xdfe \.\.\." - quark show .* \| quark ui', first
    )
    assert " completed after " in second


def test_a_name_steers_no_terminal_and_writes_no_line(train):
    done = train(name="a\x1b[2J\nquark: run ffffffff" + "x" * 200)
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in lines[0]
    assert len(lines[0]) < 160


@pytest.mark.parametrize(
    "body",
    [
        "sys.stderr = None",
        "sys.stderr.close()",
        "os.close(2)",
        "sys.stderr = type('Broken', (), {'write': lambda *_: 1 / 0, 'flush': lambda _: 0})()",
    ],
)
def test_a_stream_that_is_gone_costs_nothing(spoken, body):
    script = f"import os, sys\n{body}\n" + RUN.format(name="digits", body="print(session.id)")
    script += "quark.start_run(project='p').end_run()\nprint('done')\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.split()[-1] == b"done"


def test_a_reader_that_has_gone_costs_nothing(spoken):
    script = RUN.format(name="digits", body="pass") + "print('done')"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=write, timeout=120
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_each_line_is_one_write(spoken, monkeypatch):
    written = []

    class Stream:
        encoding = "utf-8"

        def write(self, text):
            written.append(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    quark.start_run(project="p", name="digits").end_run()
    assert [text.count("\n") for text in written] == [1, 1]


def test_of_many_ranks_one_speaks(spoken):
    script = RUN.format(name="digits", body="pass")
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [text.count(b"quark: run") for text in said] == [2, 0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_says_nothing(train):
    body = (
        "import os; child = os.fork()\n"
        "    if child == 0:\n"
        "        quark.MetricsLogger(session).log('loss', 1.0, step=0)\n"
        "        quark.start_run(project='p', name='offspring').end_run()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0"
    )
    done = train(body)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"quark: run") == 2
    assert b"offspring" not in done.stderr


def test_the_end_tells_what_is_known_to_be_wrong(spoken, capfd):
    with quark.start_run(project="p", name="digits") as session:
        metrics = quark.MetricsLogger(session)
        with pytest.warns(RuntimeWarning, match="naming rule"):
            metrics.log("loss@1", float("nan"), step=0)
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r" completed after .* s; not finite at the end: loss@1 — quark show ", last)


def test_a_run_that_fails_says_so(train):
    done = train("raise ValueError('no')")
    assert re.search(rb'"digits" failed after .* s \xe2\x80\x94 quark show', done.stderr)


def test_a_run_that_is_left_open_says_its_end_at_the_exit(spoken):
    script = "import quark\nquark.start_run(project='p', name='digits')\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert re.search(rb'"digits" completed after ', done.stderr)


def test_no_command_of_quark_speaks_for_its_runs(spoken):
    script = (
        "import sys, importlib, click, quark\n"
        "main = importlib.import_module('quark.cli.main')\n"
        "@click.command()\ndef probe():\n"
        "    quark.start_run(project='p').end_run()\n"
        "main._Commands.get_command = lambda self, ctx, name: probe\n"
        "sys.argv = ['quark', 'probe']\nmain.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


def test_in_a_notebook_the_lines_are_no_alarm(spoken, capfd, monkeypatch):
    monkeypatch.setattr(banner, "_is_notebook", lambda: True)
    quark.start_run(project="p", name="digits").end_run()
    said = capfd.readouterr()
    assert said.err == ""
    assert said.out.count("quark: run") == 2


def test_a_terminal_gets_no_colours(spoken):
    main, other = pty.openpty()
    script = RUN.format(name="digits", body="pass")
    done = subprocess.run([sys.executable, "-c", script], stderr=other, timeout=120)
    os.close(other)
    said = b""
    while True:
        try:
            part = os.read(main, 4096)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(main)
    assert done.returncode == 0
    assert said.count(b"quark: run") == 2
    assert b"\x1b" not in said


def test_nothing_that_is_looked_for_at_a_start_opens_a_database(spoken, monkeypatch):
    """Whatever SQLite has open in a process that forks locks the child out."""
    import sqlite3

    root = spoken / "project"
    (root / "src").mkdir(parents=True)
    run = quark.start_run(project="p", storage_dir=root).open_run
    try:
        monkeypatch.chdir(root / "src")
        monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: pytest.fail("a database"))
        assert find_storage_root(root / "src") == root
        line = banner.Introduction(run)
        line.greet()
        line.part("completed", 1.0)
    finally:
        monkeypatch.undo()
        quark.end_run()
