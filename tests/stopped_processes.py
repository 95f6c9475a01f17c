"""Stops a process that writes to an embedded store, so that others can go on with it."""

import contextlib
import os
import signal
import sqlite3
import time


def stop_between_writes(pid, storage_dir):
    """Stop it (SIGSTOP) where it holds no lock: in a write it would keep the store's."""
    deadline = time.monotonic() + 60
    path = storage_dir / ".quark" / "quark.db"
    with contextlib.closing(sqlite3.connect(path, timeout=1.0)) as database:
        while True:
            os.kill(pid, signal.SIGSTOP)
            try:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                assert time.monotonic() < deadline
                time.sleep(0.005)
