"""A run that logs faster than its store compacts: what it leaves, and how soon that is drawn."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import random
from typing import Any

_METRICS = 20
_LAYERS = 288
_CURVE_POINTS = 2_000
_PATIENCE_S = 600.0


def measure_backlog(*, quick: bool) -> dict[str, float]:
    from figures import Figure, print_figures

    steps, layer_steps = (50_000, 100) if quick else (1_000_000, 1_000)
    with tempfile.TemporaryDirectory() as name:
        points, layers = Path(name) / "points", Path(name) / "layers"
        logged = _call("log", points, steps)
        left = _count_left(points, "metric")
        first = _call("draw", points)
        waited_s = _wait_until_compacted(points, "metric")
        whole = _call("draw", points)
        written = _call("write", layers, layer_steps)
        layers_left = _count_left(layers, "layer")
        read = _call("read", layers)
        _wait_until_compacted(layers, "layer")
        whole_read = _call("read", layers)
    return print_figures(
        f"A tight loop of {steps:,} steps of {_METRICS} metrics, then {layer_steps * _LAYERS:,} "
        "rows of layers by session.write; each read by a process that has read nothing yet",
        [
            Figure("log_many, us a call", logged["logged_s"] / steps * 1e6),
            Figure("end of the run, s", logged["ended_s"]),
            Figure("memory of the loop, MB", logged["memory_mb"]),
            Figure("points not compacted at the end", left),
            Figure("first curve then, ms", first["taken_ms"], at_most=150),
            Figure("first curve then, ms of processor time", first["computed_ms"]),
            Figure("first curve then, with what it imports, ms", first["all_ms"]),
            Figure("memory of the reader then, MB", first["memory_mb"], at_most=300),
            Figure("points not in the curve", steps - first["points"], at_most=0),
            Figure("compacted after the end, s", waited_s),
            Figure("first curve after that, ms", whole["taken_ms"], at_most=150),
            Figure("first curve after that, ms of processor time", whole["computed_ms"]),
            Figure("memory of the reader after that, MB", whole["memory_mb"], at_most=300),
            Figure("session.write, rows/s", layer_steps * _LAYERS / written["logged_s"]),
            Figure("rows of layers not compacted at the end", layers_left),
            Figure("one layer over all steps then, ms", read["taken_ms"], at_most=150),
            Figure("memory of its reader then, MB", read["memory_mb"], at_most=300),
            Figure("one layer over all steps after compaction, ms", whole_read["taken_ms"]),
        ],
    )


def _call(part: str, root: Path, steps: int = 0) -> dict[str, float]:
    """Do one part in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, part, str(root), str(steps)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _count_left(root: Path, kind: str) -> int:
    connection = sqlite3.connect(root / ".quark" / "quark.db")
    try:
        (count,) = connection.execute(
            "SELECT coalesce(sum(count), 0) FROM batch WHERE kind = ?", (kind,)
        ).fetchone()
        return int(count)
    finally:
        connection.close()


def _wait_until_compacted(root: Path, kind: str) -> float:
    """How long it takes until so little is left that nobody compacts it."""
    begin = time.perf_counter()
    lease = root / ".quark" / "compaction.lease"
    while _count_left(root, kind) > 131_072 or lease.exists():
        if time.perf_counter() - begin > _PATIENCE_S:
            break
        time.sleep(0.05)
    return time.perf_counter() - begin


def _log(root: Path, steps: int) -> dict[str, float]:
    import quark

    session = quark.start_run(project="bench", storage_dir=root)
    metrics = quark.MetricsLogger(session)
    names = [f"train/m{number}" for number in range(_METRICS)]
    begin = time.perf_counter()
    for step in range(steps):
        metrics.log_many({name: random() for name in names}, step=step)
    logged = time.perf_counter()
    session.end_run()
    return {"logged_s": logged - begin, "ended_s": time.perf_counter() - logged}


def _write(root: Path, steps: int) -> dict[str, float]:
    import quark
    from quark_core.records import LayerSummaryRecord

    session = quark.start_run(project="bench", storage_dir=root)
    head: Any = (None, "", 0, 0, 0, time.time_ns() // 1000)
    records = [
        LayerSummaryRecord(
            *(*head, f"encoder.{layer}", "Linear", "activation", "forward", 0, 4096, step),
            mean=random(),
            std=random(),
            norm=random(),
        )
        for step in range(steps)
        for layer in range(_LAYERS)
    ]
    begin = time.perf_counter()
    session.write(records)
    logged = time.perf_counter()
    session.end_run()
    return {"logged_s": logged - begin, "ended_s": time.perf_counter() - logged}


def _draw(root: Path, _: int) -> dict[str, float]:
    import quark

    key = f"train/m{_METRICS // 2}"
    return _time_read(
        root,
        lambda run, _: quark.MetricsLogger(run).series(key, max_points=_CURVE_POINTS).points,
    )


def _read(root: Path, _: int) -> dict[str, float]:
    from quark_core.records.query import Query

    query = Query(equals={"module_name": f"encoder.{_LAYERS // 2}"})
    return _time_read(
        root, lambda run, run_id: run.open_run.reader.read(run_id, "layer", query).count
    )


def _time_read(root: Path, read: Callable[[Any, str], int]) -> dict[str, float]:
    """How long a first read takes, after what it imports and with that."""
    import quark

    connection = sqlite3.connect(root / ".quark" / "quark.db")
    (run_id,) = connection.execute("SELECT id FROM run").fetchone()
    connection.close()
    with quark.open_run(run_id, storage_dir=root) as run:
        begin = time.perf_counter()
        import numpy  # noqa: F401 - what it takes is counted apart

        import quark_backends.store.reading.curves  # noqa: F401 - as above

        imported, computed = time.perf_counter(), time.process_time()
        points = read(run, run_id)
        ended, computed = time.perf_counter(), time.process_time() - computed
    return {
        "computed_ms": computed * 1000,
        "taken_ms": (ended - imported) * 1000,
        "all_ms": (ended - begin) * 1000,
        "points": points,
    }


if __name__ == "__main__":
    # Beside `storage` lie modules that are called as the standard library's are.
    part, root, steps = sys.argv[1:]
    parts = {"log": _log, "write": _write, "draw": _draw, "read": _read}
    figures = parts[part](Path(root), int(steps))
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**figures, "memory_mb": memory_mb}))
    sys.stdout.flush()
    os._exit(0)
