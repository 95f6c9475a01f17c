"""Programs that tests start, and what the store has of their runs afterwards."""

import os
import signal
import subprocess
import sys
import time

from click.testing import CliRunner

import quark
from quark.cli.main import cli

HEAD = """
import os, signal, sys, threading, time, quark
storage_dir = sys.argv[1]
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


def read_values(storage_dir, run_id, key="m"):
    """Values of a metric that a store has, in order."""
    metrics = quark.MetricsLogger(quark.open_run(run_id, storage_dir))
    return [record.value for record in metrics.read(metric_key=key)]


def wait_until(condition, timeout_s=60.0):
    """Wait for what must come; whether it came."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
