"""An outage of the primary and two mirrors under a training loop."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import print_rows

import quark
from durability.points import (
    Row,
    count_extra,
    environment,
    read_csv,
    read_store,
)
from quark_core.config import settings
from quark_core.errors import BackendUnavailable

STEP_METRICS = tuple(f"train/metric{index}" for index in range(5))
STEP_S = 0.002
# A lane is behind while more than this waits for it: a second of the loop's points.
BEHIND_RECORDS = 2_500
CATCH_UP_S = 90.0


def make_compute() -> Callable[[], object]:
    """A product of two matrices that takes about `STEP_S`."""
    for size in range(128, 2048, 32):
        matrix = np.random.default_rng(0).random((size, size))
        out = np.empty_like(matrix)

        def compute(matrix: Any = matrix, out: Any = out) -> object:
            return np.matmul(matrix, matrix, out=out)

        taken = []
        for _ in range(30):
            begin = time.perf_counter()
            compute()
            taken.append(time.perf_counter() - begin)
        if median(taken) >= STEP_S:
            break
    return compute


@dataclass(slots=True)
class TrainingLoop:
    """A loop that computes and logs, and notes how long each step took."""

    session: quark.TrainingSession
    metrics: quark.MetricsLogger
    compute: Callable[[], object]
    steps: int = 0
    exceptions: int = 0
    taken: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def train(self, phase: str, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Train for a while, or until something holds; returns how long that took."""
        clock, compute, log_many = time.perf_counter_ns, self.compute, self.metrics.log_many
        taken = self.taken.setdefault(phase, [])
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if until is not None and self.steps % 100 == 0 and until():
                break
            step = self.steps
            begin = clock()
            compute()
            computed = clock()
            try:
                log_many(dict.fromkeys(STEP_METRICS, step / 7), step=step)
            except Exception:
                self.exceptions += 1
            end = clock()
            taken.append((end - begin, end - computed))
            self.steps += 1
        return time.monotonic() - began

    def is_caught_up(self) -> bool:
        """Whether no lane is more than a second of points behind."""
        return all(lane.waiting <= BEHIND_RECORDS for lane in self.session.report_delivery().lanes)


@contextlib.contextmanager
def outage(session: quark.TrainingSession) -> Iterator[None]:
    """The primary and the last mirror are unavailable, the first mirror hangs."""
    primary, hanging, failing = (lane._backend for lane in session.open_run.stream._lanes)
    released, write = threading.Event(), hanging.write

    def refuse(*_: object) -> None:
        raise BackendUnavailable("planted outage")

    def hang(batch: object) -> None:
        released.wait()
        write(batch)

    primary.write = primary.write_group = failing.write = refuse
    hanging.write = hang
    yield
    del primary.write, primary.write_group, failing.write, hanging.write
    released.set()


def measure_outage(*, quick: bool) -> dict[str, list[Row]]:
    around_s, outage_s = (2.0, 3.0) if quick else (15.0, 60.0)
    with tempfile.TemporaryDirectory() as name, environment(**{settings.EXIT_TIMEOUT: "120"}):
        folder = Path(name)
        session = quark.start_run(
            project="bench", storage_dir=folder, backends="csv:hangs,csv:fails"
        )
        loop = TrainingLoop(session, quark.MetricsLogger(session), make_compute())
        loop.train("warm-up", 1.0)
        loop.train("before", around_s)
        with outage(session):
            loop.train("outage", outage_s)
            waiting = max(lane.waiting for lane in session.report_delivery().lanes)
        caught_up_s = loop.train("catching up", CATCH_UP_S, loop.is_caught_up)
        loop.train("after", around_s)
        begin = time.monotonic()
        session.end_run()
        ended_s = time.monotonic() - begin
        run_id = str(session.run_id)
        places = {
            "embedded (unavailable)": read_store(folder, run_id),
            "CSV (hung)": read_csv(folder / "hangs", run_id),
            "CSV (unavailable)": read_csv(folder / "fails", run_id),
        }
    loop.taken.pop("warm-up")
    phases = _sum_up_phases(loop)
    expected = {(name, step) for name in STEP_METRICS for step in range(loop.steps)}
    deliveries = [
        {
            "backend": name,
            "logged": len(expected),
            "stored": points.total(),
            "missing": len(expected - points.keys()),
            "duplicated": count_extra(points),
            "each exactly once": "yes" if points == Counter(expected) else "NO",
        }
        for name, points in places.items()
    ]
    print_rows(f"Outage of {outage_s:g} s: step times, and of that logging 5 metrics", phases)
    print_rows("Outage: what every backend has after the end", deliveries)
    print(
        f"\nexceptions: {loop.exceptions}; waiting at the end of the outage: {waiting}; "
        f"caught up after {caught_up_s:.1f} s; end_run took {ended_s:.2f} s"
    )
    return {"phases": phases, "deliveries": deliveries}


def _sum_up_phases(loop: TrainingLoop) -> list[Row]:
    rows: list[Row] = []
    for phase, taken in loop.taken.items():
        if not taken:
            continue
        steps, logs = (sorted(column) for column in zip(*taken, strict=True))
        middle, high = len(taken) // 2, int(len(taken) * 0.99)
        row: Row = {
            "phase": phase,
            "steps": len(taken),
            "step p50 ms": steps[middle] / 1e6,
            "step p99 ms": steps[high] / 1e6,
        }
        first = rows[0] if rows else row
        row["p50 / before"] = row["step p50 ms"] / first["step p50 ms"]
        row["p99 / before"] = row["step p99 ms"] / first["step p99 ms"]
        row["log p50 us"], row["log p99 us"] = logs[middle] / 1000, logs[high] / 1000
        rows.append(row)
    return rows
