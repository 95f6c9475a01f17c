"""Stops a process that writes to an embedded store, so that others can go on with it."""

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path


def stop_between_writes(pid, storage_dir):
    """Stop it (SIGSTOP) where it holds no lock: in a write it would keep the store's."""
    deadline = time.monotonic() + 60
    path = storage_dir / ".quark" / "quark.db"
    with contextlib.closing(sqlite3.connect(path, timeout=1.0)) as database:
        while True:
            os.kill(pid, signal.SIGSTOP)
            _wait_until_stopped(pid, deadline)
            try:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                assert time.monotonic() < deadline
                time.sleep(0.005)


def _wait_until_stopped(pid, deadline):
    """Wait for each thread: the signal is on its way when `kill` returns, and one may run on."""
    tasks = Path(f"/proc/{pid}/task")
    while tasks.exists():
        with contextlib.suppress(FileNotFoundError):  # a thread that ends just now
            stats = [task.joinpath("stat").read_text() for task in tasks.iterdir()]
            if all(stat.rpartition(") ")[2][0] in "Tt" for stat in stats):
                return
        assert time.monotonic() < deadline
        time.sleep(0.001)
