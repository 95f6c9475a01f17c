"""What bare SQLite gives on this disk now: the least that a durable claim and a result can cost."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

_CLAIM = (
    "UPDATE trial SET state = 1 WHERE number ="
    " (SELECT min(number) FROM trial WHERE state = 0) RETURNING number"
)
_SETTLE = "UPDATE trial SET state = 2 WHERE number = ?"


def measure_bare_file(processes: int, trials: int) -> dict[str, Any]:
    """Two transactions for each trial, each synced, by so many processes."""
    with tempfile.TemporaryDirectory(prefix="quark-bench-bare-") as folder:
        path = Path(folder) / "bare.db"
        with closing(_connect(path)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("CREATE TABLE trial (number INTEGER PRIMARY KEY, state INTEGER)")
            db.execute("CREATE INDEX by_state ON trial (state, number)")
            rows = [(number, 0) for number in range(trials)]
            db.execute("BEGIN")
            db.executemany("INSERT INTO trial VALUES (?, ?)", rows)
            db.execute("COMMIT")
        context = multiprocessing.get_context("fork")
        ready, results = context.Barrier(processes + 1), context.SimpleQueue()
        workers = [
            context.Process(target=_work, args=(path, ready, results)) for _ in range(processes)
        ]
        for worker in workers:
            worker.start()
        ready.wait()
        began = time.perf_counter()
        claims_ms = sorted(ms for _ in workers for ms in results.get())
        took_s = time.perf_counter() - began
        for worker in workers:
            worker.join()
    return {
        "store": "bare SQLite, for comparison",
        "processes": processes,
        "trials": trials,
        "claim and settle /s": round(trials / took_s),
        "claim p50 ms": round(claims_ms[len(claims_ms) // 2], 2),
        "claim worst ms": round(claims_ms[-1], 2),
        "twice": len(claims_ms) - trials,
    }


def _work(path: Path, ready: Any, results: Any) -> None:
    claims_ms: list[float] = []
    with closing(_connect(path)) as db:
        db.execute("PRAGMA synchronous = FULL")
        ready.wait()
        while True:
            began = time.perf_counter()
            row = _do(db, _CLAIM, ())
            if row is None:
                break
            claims_ms.append(1e3 * (time.perf_counter() - began))
            _do(db, _SETTLE, row)
    results.put(claims_ms)


def _do(db: sqlite3.Connection, sql: str, args: tuple[int, ...]) -> tuple[int, ...] | None:
    while True:
        try:
            db.execute("BEGIN IMMEDIATE")
            break
        except sqlite3.OperationalError:
            time.sleep(random.uniform(0.0005, 0.003))
    found: tuple[int, ...] | None = db.execute(sql, args).fetchone()
    db.execute("COMMIT")
    return found


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=0)
