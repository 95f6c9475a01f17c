"""What a process prints is in its run, whoever prints, and goes where it went."""

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
from kit.programs import run_code, run_threads

import quark
from quark_core.errors import SchemaValidationError
from quark_core.records.query import Query
from quark_core.runs.console_lines import fold_lines
from quark_core.system.console.streams import ConsoleTaps, Line, console_taps
from quark_core.writers.console import ConsoleCapture

NONE = {"QUARK_CAPTURE": "", "QUARK_SYSTEM_METRICS": "0"}


def read(storage_dir, run_id):
    """stream and text of each line, in their order."""
    found = quark.open_run(run_id, storage_dir).open_run.read("console", Query())
    return [(line.stream, line.text) for line in fold_lines(found.to_records())]


def texts(storage_dir, run_id, stream=None):
    return [text for of, text in read(storage_dir, run_id) if stream in (None, of)]


@pytest.fixture
def run_script(tmp_path):
    """Runs a program that begins a run; returns what it did and what its run has."""

    def run(code, *arguments, expect=0, sync=False, **environment):
        head = (
            "import os, sys, time, signal, threading, subprocess, quark\n"
            "session = quark.start_run(project='p', storage_dir=os.environ['STORE'])\n"
            "open(os.environ['STORE'] + '/id', 'w').write(session.run_id)\n"
        )
        done = run_code(
            head + code,
            *arguments,
            ends=expect,
            env={**os.environ, **NONE, "STORE": str(tmp_path), **environment},
        )
        if sync:
            command = [sys.executable, "-m", "quark", "sync", str(tmp_path)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        return done, read(tmp_path, (tmp_path / "id").read_text())

    return run


@pytest.fixture
def printed(monkeypatch):
    """Puts streams in place that a test may write to as it likes; pytest's own come back."""

    def put():
        out, err = (
            io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
        )
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return put


def start(tmp_path, **arguments):
    return quark.start_run(
        project="p", storage_dir=tmp_path, **{"capture": "sys", "system_metrics": False} | arguments
    )


def test_by_default_what_is_printed_is_kept_and_goes_where_it_went(run_script):
    done, lines = run_script(
        "print('hello', 1)\nprint('no end', end='')\nprint('warn', file=sys.stderr)\n"
        "sys.stdout.writelines(['a\\n', 'b\\n'])\nsession.end_run()\nprint('after')\n"
    )
    assert done.stdout == "hello 1\nno enda\nb\nafter\n"
    assert done.stderr == "warn\n"
    assert sorted(lines) == [
        ("stderr", "warn"), ("stdout", "b"), ("stdout", "hello 1"), ("stdout", "no enda"),
    ]  # fmt: skip


def test_secrets_are_kept_nowhere(tmp_path):
    session = start(tmp_path)
    print("login with ghp_" + 36 * "a", "password=hunter2")
    print("-----BEGIN RSA PRIVATE KEY-----")
    for _ in range(5):
        print("MIIEpAIBAAKCAQEAx1zwJ3mvqPq0xXf4")
    print("-----END RSA PRIVATE KEY-----")
    print("harmless")
    session.end_run()
    kept = texts(tmp_path, session.run_id)
    assert kept == ["login with [redacted] password=[redacted]", *["[redacted]"] * 7, "harmless"]
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (b"hunter2", b"MIIEpAIBAAK", b"ghp_aaaa"):
        assert secret not in stored


def test_the_stream_stays_the_object_that_it_is(tmp_path, printed):
    out, _ = printed()
    session = start(tmp_path)
    assert sys.stdout is out
    assert out.encoding == "utf-8"
    assert out.write("four") == 4
    with pytest.raises(TypeError):
        out.write(b"bytes")
    session.end_run()
    assert "write" not in vars(out)
    assert out.buffer.getvalue() == b"four"


def test_a_handler_of_logging_that_was_there_before_is_heard(tmp_path):
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("of.somebody")
    logger.addHandler(handler)
    try:
        session = start(tmp_path)
        logger.warning("said %d", 7)
        session.end_run()
    finally:
        logger.removeHandler(handler)
    assert read(tmp_path, session.run_id) == [("stderr", "said 7")]


def test_what_is_redirected_is_not_console(tmp_path):
    session = start(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as kept:
        print("aside")
    print("here")
    session.end_run()
    assert kept.getvalue() == "aside\n"
    assert texts(tmp_path, session.run_id) == ["here"]


def test_whoever_has_wrapped_it_on_top_stays_on_top(tmp_path, printed):
    out, _ = printed()
    first = start(tmp_path)
    below = out.write
    seen = []

    def theirs(text):
        seen.append(text)
        return below(text)

    out.write = theirs
    print("one")
    first.end_run()
    assert out.write is theirs
    print("between")
    second = start(tmp_path)
    print("two")
    second.end_run()
    assert out.buffer.getvalue() == b"one\nbetween\ntwo\n"
    assert "".join(seen) == "one\nbetween\ntwo\n"
    assert texts(tmp_path, first.run_id) == ["one"]
    assert texts(tmp_path, second.run_id) == ["two"]


def test_what_was_wrapped_before_is_as_it_was(tmp_path, printed):
    out, _ = printed()
    below = out.write
    theirs = out.write = lambda text: below(text.upper())
    session = start(tmp_path)
    print("one")
    session.end_run()
    assert out.write is theirs
    assert out.buffer.getvalue() == b"ONE\n"
    assert texts(tmp_path, session.run_id) == ["one"]


def test_two_open_runs_both_have_what_is_printed(tmp_path):
    outer = start(tmp_path)
    print("first")
    inner = start(tmp_path)
    print("both")
    inner.end_run()
    print("last")
    outer.end_run()
    assert texts(tmp_path, outer.run_id) == ["first", "both", "last"]
    assert texts(tmp_path, inner.run_id) == ["both"]


def test_threads_lose_no_line(tmp_path):
    session = start(tmp_path)

    def work(name):
        for number in range(500):
            sys.stdout.write(f"{name} {number}\n")

    run_threads(work, "abcd")
    session.end_run()
    kept = texts(tmp_path, session.run_id)
    assert sorted(kept) == sorted(f"{name} {number}" for name in "abcd" for number in range(500))
    for name in "abcd":
        own = [line for line in kept if line.startswith(name)]
        assert own == [f"{name} {number}" for number in range(500)]


class TurnOfAnother:
    """Somebody else has the turn, and lets go of it as soon as it is waited for."""

    def acquire(self, blocking=True, timeout=-1):
        return blocking and timeout != 0

    def release(self):
        pass


@pytest.mark.parametrize("others", [0, 1])
def test_whoever_listens_no_more_has_what_was_printed_while_another_thread_made_a_line(
    printed, others
):
    printed()
    taps, got = ConsoleTaps(), []

    def sink(stream, line):
        got.append(line.text)

    def go_on(stream, line):
        pass

    for one in [sink, *[go_on] * others]:
        taps.open(one, ("stdout",))
    try:
        taps._taps[0].feed._turn = TurnOfAnother()
        print("accuracy 0.93")
        assert got == []
        taps.close(sink)
        assert got == ["accuracy 0.93"]
    finally:
        taps.close(go_on)


def test_the_other_stream_may_print_while_the_newest_lines_of_a_flood_are_counted_or_kept(tmp_path):
    session = start(tmp_path, capture="none")
    capture = ConsoleCapture(session.open_run, "sys")
    meanwhile = []

    def print_meanwhile():
        """What the other stream's thread does in the middle of a walk, once for each of them."""
        if meanwhile:
            capture._put("stderr", Line(0, meanwhile.pop(), True, 0, 9))

    class LeftOut(dict):
        def get(self, *arguments):
            print_meanwhile()
            return super().get(*arguments)

    capture._left_out = LeftOut()
    capture._room = 0
    for number in range(3):
        capture._put("stdout", Line(number, f"early {number}", True, 0, 1))
    meanwhile.append("more than there is room for".ljust(100))
    capture._room = 90
    capture._put("stdout", Line(3, "there is room", True, 0, 1))
    assert not meanwhile

    write = capture._write
    capture._room = 0
    capture._put("stdout", Line(4, "late", True, 0, 1))
    meanwhile.append("the last")
    capture._write = lambda *line: (print_meanwhile(), write(*line))
    capture.stop()
    session.end_run()
    assert not meanwhile
    assert texts(tmp_path, session.run_id) == ["there is room", "late", "the last"]
    found = quark.open_run(session.run_id, tmp_path).open_run.read("console", Query())
    assert sorted(found["left_out"].tolist()) == [0, 1, 3]


def test_a_signal_handler_may_print_at_any_moment(run_script):
    done, lines = run_script(
        "def beep(*_): print('beep')\n"
        "signal.signal(signal.SIGALRM, beep)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)\n"
        "import io\n"
        "for number in range(3000): sys.stderr.write(f'line {number}\\n')\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "session.end_run()\n"
    )
    assert [text for of, text in lines if of == "stderr"] == [f"line {n}" for n in range(3000)]
    assert len([text for of, text in lines if of == "stdout"]) == done.stdout.count("beep")
    assert done.stdout.count("beep") > 0


def test_print_at_the_exit_of_the_interpreter(run_script):
    done, lines = run_script(
        "import atexit\n"
        "class Late:\n"
        "    def __del__(self): print('from a finalizer')\n"
        "atexit.register(print, 'registered last, called first')\n"
        "keep = Late()\n"
        "import quark_core; quark_core.keep = Late()\n"
        "print('the end')\n"
    )
    assert done.stdout.splitlines()[0] == "the end"
    assert "from a finalizer" in done.stdout
    assert ("stdout", "the end") in lines
    assert ("stdout", "registered last, called first") in lines
    assert done.stderr == ""


def test_the_traceback_of_what_ended_the_program_is_kept(run_script):
    done, lines = run_script("1 / 0\n", expect=1)
    assert ("stderr", "ZeroDivisionError: division by zero") in lines
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "SEGV"])
def test_the_last_lines_of_a_killed_process_are_kept(run_script, end):
    end = "os.kill(os.getpid(), signal.SIGSEGV)" if end == "SEGV" else end
    expect = {"KILL": -9, "SEGV": -11}.get(end[-5:-1], 0)
    code = f"for number in range(500): print('line', number, flush=True)\n{end}\n"
    done, lines = run_script(code, expect=expect, sync=True)
    assert done.stdout.splitlines()[-1] == "line 499"
    assert [text for _, text in lines] == [f"line {number}" for number in range(500)]


@pytest.mark.long
def test_an_unfinished_line_of_a_killed_process_is_kept_once_it_is_a_second_old(run_script):
    _, lines = run_script(
        "began_s = time.monotonic()\n"
        "print('loading…', end='', flush=True)\n"
        "console = session.open_run.stream.channel('console')\n"
        "while not console.count_drawn(): time.sleep(0.05)\n"
        "assert time.monotonic() - began_s >= 1\n"
        "time.sleep(0.2)\n"  # what is numbered is put in by another thread
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        expect=-9,
        sync=True,
    )
    assert lines == [("stdout", "loading…")]


def test_a_forked_child_prints_to_the_terminal_and_is_not_kept_twice(run_script):
    done, lines = run_script(
        "stop = threading.Event()\n"
        "def chat():\n"
        "    while not stop.is_set(): sys.stderr.write('chat\\n')\n"
        "threading.Thread(target=chat).start()\n"
        "for number in range(30):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        print('child', number, flush=True)\n"
        "        os._exit(7)\n"
        "    assert os.waitpid(pid, 0)[1] >> 8 == 7\n"
        "    print('parent', number, flush=True)\n"
        "stop.set()\n"
        "session.end_run()\n"
    )
    out = done.stdout.splitlines()
    assert [line for line in out if line[0] == "c"] == [f"child {n}" for n in range(30)]
    kept = [text for of, text in lines if of == "stdout"]
    assert kept == [f"parent {number}" for number in range(30)]


def test_a_forked_child_that_starts_a_run_has_its_own_lines(run_script, tmp_path):
    _, lines = run_script(
        "print('of the parent', flush=True)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    own = quark.start_run(project='p', storage_dir=os.environ['STORE'])\n"
        "    print('of the child', flush=True)\n"
        "    open(os.environ['STORE'] + '/child', 'w').write(own.run_id)\n"
        "    own.end_run()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "session.end_run()\n"
    )
    assert lines == [("stdout", "of the parent")]
    assert texts(tmp_path, (tmp_path / "child").read_text()) == ["of the child"]


def test_what_fails_while_a_line_is_made_costs_a_warning_and_no_print(
    tmp_path, monkeypatch, caplog
):
    session = start(tmp_path)
    channel = session.open_run.stream.channel("console")

    def fail(record):
        print("in the midst of it")
        raise RuntimeError("no more")

    monkeypatch.setattr(type(channel), "put", lambda self, record: fail(record))
    print("one")
    print("two")
    monkeypatch.undo()
    session.end_run()
    assert "stdout is no longer captured: RuntimeError: no more" in caplog.text
    assert session.status == "completed"


def test_quarks_own_threads_make_no_line_of_a_line(tmp_path):
    session = start(tmp_path)
    thread = threading.Thread(target=print, args=("of Quark",), name="quark-lane-x")
    thread.start()
    thread.join()
    session.end_run()
    assert texts(tmp_path, session.run_id) == []


def test_a_stream_that_is_not_there_or_takes_no_tap_is_left_alone(tmp_path, monkeypatch):
    class Fixed:
        __slots__ = ("text",)

        def write(self, text):
            self.text = text
            return len(text)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", Fixed())
    session = start(tmp_path)
    sys.stderr.write("fine\n")
    session.end_run()
    assert sys.stderr.text == "fine\n"


def test_under_capsys_prints_are_the_tests_own(tmp_path, capsys):
    session = start(tmp_path)
    print("hello")
    assert capsys.readouterr().out == "hello\n"
    session.end_run()
    assert texts(tmp_path, session.run_id) == ["hello"]


def test_under_capfd_too(tmp_path, capfd):
    session = start(tmp_path)
    print("hello")
    os.system("echo child")
    sys.stdout.flush()
    assert sorted(capfd.readouterr().out.split()) == ["child", "hello"]
    session.end_run()
    assert texts(tmp_path, session.run_id) == ["hello"]


def test_bad_choices_are_refused_where_the_run_begins(tmp_path, monkeypatch):
    for bad in ("tty", 1, True, ["sys"]):
        with pytest.raises(SchemaValidationError, match="capture"):
            start(tmp_path, capture=bad)
    monkeypatch.setenv("QUARK_CAPTURE", "all")
    with pytest.raises(
        SchemaValidationError, match="QUARK_CAPTURE must be one of 'sys', 'fd', 'none'"
    ):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert not any(console_taps._sinks.values())


def test_nothing_is_kept_where_it_is_turned_off(run_script):
    assert run_script("print('x')\n", QUARK_CAPTURE="none")[1] == []


def test_a_run_that_prints_for_ever_is_bounded(tmp_path, monkeypatch):
    from quark_core.writers import console

    monkeypatch.setattr(console, "_WHOLE_CHARACTERS", 20_000)
    session = start(tmp_path)
    for number in range(3000):
        print(f"{number:09d}")
    session.end_run()
    kept = texts(tmp_path, session.run_id)
    assert kept[0] == "000000000"
    assert kept[-1] == "000002999"
    assert 2000 <= len(kept) <= 2600
    found = quark.open_run(session.run_id, tmp_path).open_run.read("console", Query())
    assert found.count + int(found["left_out"].sum()) == 3000


def test_its_records_are_exported_and_mirrored_as_any_other(tmp_path):
    session = start(tmp_path, backends="csv")
    sys.stdout.write("in a table\n")
    session.end_run()
    (table,) = session.context.run_path.rglob("console.csv")
    assert "in a table" in table.read_text()
    assert json.dumps(session.to_dict())


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="needs signals")
def test_sigterm_keeps_what_was_printed(run_script):
    _, lines = run_script(
        "print('before', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\n", expect=-15, sync=True
    )
    assert lines == [("stdout", "before")]
