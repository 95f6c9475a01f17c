"""Programs that tests start, and what the store has of their runs afterwards."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

from click.testing import CliRunner

import quark
from quark.cli.main import cli

HEAD = """
import os, signal, sys, threading, time, quark
storage_dir = sys.argv[1]

def begin(**arguments):
    session = quark.start_run(project="p", storage_dir=storage_dir, **arguments)
    print(session.run_id, flush=True)
    return session, quark.MetricsLogger(session)

def log_steps(metrics, *bounds):
    for step in range(*bounds):
        metrics.log("m", float(step), step=step)

"""


def start_script(storage_dir, body, *arguments, head=HEAD, before=(), **environment):
    """A script in a process of its own, with pipes; `before` stands ahead of the interpreter."""
    return subprocess.Popen(
        [*before, sys.executable, "-c", head + body, str(storage_dir), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def run_script(
    storage_dir, body, *arguments, head=HEAD, before=(), timeout=200, ends=0, **environment
):
    """Run a script to its end; its standard output and its error output."""
    child = start_script(storage_dir, body, *arguments, head=head, before=before, **environment)
    try:
        out, errors = child.communicate(timeout=timeout)
    finally:
        child.kill()
    assert child.returncode == ends, errors
    return out, errors


def run_file(folder, body, *arguments, head=HEAD, **environment):
    """Run a program that lies in a file, as what is spawned needs it; what it printed."""
    script = folder / "script.py"
    script.write_text(head + body)
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "runs"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "QUARK_EXIT_TIMEOUT_SECONDS": "100", **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def start_code(code, *arguments, **options):
    """A program in a process of its own, with a pipe for what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def run_code(code, *arguments, ends=0, **options):
    """Run a program to its end, which must have this status; what became of it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == ends, done.stderr
    return done


def run_threads(work, each):
    """Call a function in threads, all at once, and wait: with each of some values, or so often."""
    calls = [()] * each if isinstance(each, int) else [(value,) for value in each]
    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def kill(process):
    """End it by SIGKILL; what it has printed since the last look."""
    process.send_signal(signal.SIGKILL)
    return process.communicate(timeout=60)


def sync(storage_dir):
    """`quark sync` in a process of its own, which must succeed."""
    command = [sys.executable, "-m", "quark", "sync", str(storage_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def ask(*arguments, **options):
    """A command of quark in this process."""
    return CliRunner().invoke(cli, [str(word) for word in arguments], **options)


def call(*arguments):
    """A command of quark in this process, of which a fault of its own is raised."""
    return ask(*arguments, catch_exceptions=False, env={"COLUMNS": "300"})


def log_steps(metrics, *bounds):
    """Log the metric `m` at each step of a range, with the step as its value."""
    for step in range(*bounds):
        metrics.log("m", float(step), step=step)


def values(session, key="m"):
    """Values of a metric that a run has, in order."""
    return [record.value for record in quark.MetricsLogger(session).read(metric_key=key)]


def read_steps(run_id, storage_dir):
    """Steps of the metric `m` that a store has, in order."""
    session = quark.open_run(run_id, storage_dir)
    return [record.step for record in quark.MetricsLogger(session).read(metric_key="m")]


def read_values(storage_dir, run_id, key="m"):
    """Values of a metric that a store has, in order."""
    return values(quark.open_run(run_id, storage_dir), key)


def is_sound(storage_dir):
    """Whether the database of a store is whole."""
    with contextlib.closing(sqlite3.connect(storage_dir / ".quark" / "quark.db")) as database:
        return database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@contextlib.contextmanager
def lock(storage_dir, way="EXCLUSIVE"):
    """As another process that writes to the store and does not come to an end."""
    with contextlib.closing(sqlite3.connect(storage_dir / ".quark" / "quark.db")) as database:
        database.execute(f"BEGIN {way}")
        yield
        database.rollback()


def wait_for_adoption():
    """What a start finds is delivered behind it, by a thread that has the lanes meanwhile."""
    for thread in threading.enumerate():
        if thread.name == "quark-adopt":
            thread.join(60)


def wait_until(condition, timeout_s=60.0):
    """Wait for what must come; whether it came."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
