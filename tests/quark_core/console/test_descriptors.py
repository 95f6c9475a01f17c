"""`capture="fd"`: what children and C libraries print is kept too, and nobody ever waits for it."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from kit.programs import run_code
from wide_bounds import DRAINS, widen_in_children

import quark
from quark_core.records.query import Query
from quark_core.runs.console_lines import fold_lines

HEAD = """
import ctypes, faulthandler, os, signal, subprocess, sys, threading, time, quark
session = quark.start_run(project='p', storage_dir=os.environ['STORE'])
open(os.environ['STORE'] + '/id', 'w').write(session.run_id)
"""


@pytest.fixture
def environment(tmp_path):
    given = {"QUARK_CAPTURE": "fd", "QUARK_SYSTEM_METRICS": "0", "STORE": str(tmp_path)}
    # An end waits for the process that reads, which on a busy machine takes its time.
    return {**os.environ, **given, **widen_in_children(DRAINS)}


def read(tmp_path):
    run_id = (tmp_path / "id").read_text()
    found = quark.open_run(run_id, tmp_path).open_run.read("console", Query())
    return [(line.stream, line.text) for line in fold_lines(found.to_records())]


@pytest.fixture
def run_script(tmp_path, environment):
    def run(code, expect=0):
        done = subprocess.run(
            [sys.executable, "-c", HEAD + code],
            env=environment,
            # Outside of a repository: git, which is asked for its state, is a child for a moment.
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == expect, done.stderr
        return done, read(tmp_path)

    return run


def test_children_and_c_libraries_are_kept_in_their_order(run_script):
    done, lines = run_script(
        "print('python', flush=True)\n"
        "os.system('echo shell; echo wrong >&2')\n"
        "subprocess.run(['echo', 'sub'])\n"
        "ctypes.CDLL(None).puts(b'from C'); ctypes.CDLL(None).fflush(None)\n"
        "if not os.fork(): print('forked', flush=True); os._exit(0)\n"
        "os.wait()\n"
        "print('last')\n"
        "session.end_run()\n"
        "print('after')\n"
        "os.system('echo after too')\n"
    )
    kept = ["python", "shell", "sub", "from C", "forked", "last"]
    assert [text for of, text in lines if of == "stdout"] == kept
    assert [text for of, text in lines if of == "stderr"] == ["wrong"]
    assert done.stdout.splitlines() == [*kept, "after", "after too"]
    assert done.stderr == "wrong\n"


@pytest.mark.long
def test_a_library_that_prints_with_the_lock_of_the_interpreter_held_goes_on(run_script):
    # A thread of this process could not read meanwhile, and a pipe holds 64 KB.
    done, lines = run_script(
        "text = (b'x' * 99 + b'\\n') * 20_000\n"
        "write = ctypes.PyDLL(None).write\n"
        "while text: text = text[write(1, text, len(text)):]\n"
        "session.end_run()\n"
    )
    assert done.stdout == ("x" * 99 + "\n") * 20_000
    assert 100 < len(lines) <= 20_000


@pytest.mark.long
def test_where_the_process_that_reads_dies_training_and_terminal_go_on(run_script):
    done, lines = run_script(
        "print('before', flush=True)\n"
        "console = session.open_run.stream.channel('console')\n"
        "while not console.count_drawn(): time.sleep(0.01)\n"
        "me = str(session.open_run.context.storage_dir)\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        command = open(f'/proc/{pid}/cmdline').read()\n"
        "        own = f'STORE={me}\\0' in open(f'/proc/{pid}/environ').read()\n"
        "    except OSError: continue\n"
        "    if 'tee_process.py' in command and own and int(pid) != os.getpid():\n"
        "        os.kill(int(pid), signal.SIGKILL)\n"
        "for number in range(20_000): print('line', number, flush=True)\n"
        "os.system('echo child')\n"
        "session.end_run()\n"
    )
    wanted = ["before", *(f"line {number}" for number in range(20_000)), "child"]
    assert done.stdout.splitlines() == wanted
    assert ("stdout", "before") in lines


@pytest.mark.sampled
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(9)"])
def test_the_terminal_has_the_last_lines_of_a_killed_process(tmp_path, environment, end):
    code = f"for number in range(2000): print('line', number, flush=True)\n{end}\n"
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "line 1999"


def test_faulthandler_reaches_the_terminal(environment):
    code = "faulthandler.enable()\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    done = run_code(HEAD + code, ends=-signal.SIGSEGV, env=environment)
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_a_training_that_waits_for_its_children_finds_none_of_ours(run_script):
    run_script(
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: pass\n"
        "else: raise SystemExit('a child')\n"
        "session.end_run()\n"
    )


def test_a_child_that_outlives_the_run_prints_on(tmp_path, environment):
    code = (
        "late = 'while ! test -e \"$STORE/over\"; do sleep 0.1; done; echo late'\n"
        "child = subprocess.Popen(['sh', '-c', late])\n"
        "print('early')\nsession.end_run()\nprint('over', flush=True)\n"
        "open(os.environ['STORE'] + '/over', 'w').close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["early", "over", "late"]


def test_a_terminal_stays_one_and_sees_the_same(tmp_path, environment):
    code = (
        "print(sys.stdout.isatty(), os.get_terminal_size().columns, flush=True)\n"
        "os.system('test -t 1 && echo child too')\n"
        "print('wrong', file=sys.stderr)\n"
        "print('\\x1b[1mbold\\x1b[0m', flush=True)\n"
        "session.end_run()\n"
    )
    master, slave = pty.openpty()
    os.set_inheritable(slave, True)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", HEAD + code], env=environment, stdout=slave, stderr=slave
    )
    os.close(slave)
    seen = b""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if select.select([master], [], [], 1)[0]:
            try:
                data = os.read(master, 4096)
            except OSError:
                break
            seen += data
    assert child.wait(timeout=60) == 0
    os.close(master)
    lines = ["True 123", "child too", "wrong", "\x1b[1mbold\x1b[0m"]
    assert seen.decode().split("\r\n") == [*lines, ""]
    assert [text for _, text in read(tmp_path)] == ["True 123", "child too", "wrong", "bold"]


def test_two_runs_share_it(run_script, tmp_path):
    _, lines = run_script(
        "print('one', flush=True)\n"
        "inner = quark.start_run(project='p', storage_dir=os.environ['STORE'])\n"
        "print('two', flush=True)\n"
        "inner.end_run()\n"
        "print('three', flush=True)\n"
        "session.end_run()\n"
    )
    assert [text for _, text in lines] == ["one", "two", "three"]


def test_a_stream_that_goes_elsewhere_is_tapped_instead(tmp_path, capsys):
    session = quark.start_run(project="p", storage_dir=tmp_path, capture="fd", system_metrics=False)
    print("of the test")
    session.end_run()
    (tmp_path / "id").write_text(session.run_id)
    assert capsys.readouterr().out == "of the test\n"
    assert read(tmp_path) == [("stdout", "of the test")]
