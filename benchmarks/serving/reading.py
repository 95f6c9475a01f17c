"""A million points over HTTP into numpy, and a curve of 2,000."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_figures, time_call
from storage.stores import WRITER_ID, make_losses, make_metric_batches

from quark_core.backends.contract import Batch
from quark_core.records.query import Query
from serving.servers import open_services
from serving.work import make_start, open_backend

_SETTLE_S = 6.0


def measure_reading(*, quick: bool) -> dict[str, float]:
    points = 100_000 if quick else 1_000_000
    figures = []
    with ExitStack() as stack:
        for opened in open_services():
            service = stack.enter_context(opened)
            os.environ.update(service.environment)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            backend: Any = open_backend(folder, "reading")
            _fill(backend, points)

            def read(backend: Any = backend) -> float:
                rows = backend.read("reading", "metric", Query(equals={"metric_key": "loss"}))
                assert rows.count == points
                return float(np.sum(rows["value"]) + rows["step"][-1] + rows["time_us"][-1])

            def read_curve(backend: Any = backend) -> int:
                return len(backend.read_series("reading", "loss", max_points=2000))

            figures += [
                Figure(
                    f"{service.name}, {points:,} points to numpy, ms",
                    1e3 * time_call(read, 3 if quick else 9),
                    at_most=None if quick else 100,
                ),
                Figure(
                    f"{service.name}, a curve of 2,000, ms",
                    1e3 * time_call(read_curve, 3 if quick else 9),
                ),
            ]
            backend.close()
    return print_figures(f"Reading {points:,} points of one metric over HTTP", figures)


def _fill(backend: Any, points: int) -> None:
    backend.write(make_start("reading"))
    batches = [
        Batch("reading", WRITER_ID, 0, 0, number, batch.kind, batch.count, batch.body)
        for number, batch in enumerate(make_metric_batches(make_losses(points)), start=1)
    ]
    for start in range(0, len(batches), 32):
        backend.write_group(batches[start : start + 32])
    # What came quickly is compacted some moments later; readers mostly come after that.
    time.sleep(_SETTLE_S)
