"""A series that grows tenfold and tenfold again: what must stay flat, and whether it does."""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from durability.points import Row
from figures import print_rows, time_call

from storage.series import read_curve, read_points
from storage.stores import GROUP_BATCHES, BenchStore, make_losses, make_metric_batches

_CURVE_POINTS = 2_000


def measure_growth(*, quick: bool) -> list[Row]:
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
    rows = [_measure(size) for size in sizes]
    print_rows(
        "One series that grows: batches of 1,000 rows, 64 at once, compacted as they come,"
        "\nby the best codec that is installed; new readers",
        rows,
    )
    return rows


def _measure(points: int) -> Row:
    values = make_losses(points)
    repetitions = 3 if points > 1_000_000 else 9
    with tempfile.TemporaryDirectory() as name:
        store = BenchStore(Path(name))
        written_s = compacted_s = 0.0
        batches = make_metric_batches(values)
        while group := list(islice(batches, GROUP_BATCHES)):
            begin = time.perf_counter()
            store.ingest.write(group)
            written = time.perf_counter()
            store.compact(minimum=GROUP_BATCHES // 2)
            written_s += written - begin
            compacted_s += time.perf_counter() - written
        begin = time.perf_counter()
        store.compact()
        compacted_s += time.perf_counter() - begin
        steps, found = read_points(store)
        assert np.array_equal(steps, np.arange(points))
        assert np.array_equal(found, values[:, 0])
        read_s = time_call(lambda: read_points(store), repetitions)
        curve_s = time_call(lambda: read_curve(store, _CURVE_POINTS), repetitions)
        of_the_curve = read_curve(store, _CURVE_POINTS).points
        size_bytes = store.measure_bytes()
        store.close()
    return {
        "points": points,
        "points read": len(steps),
        "points of the curve": of_the_curve,
        "ingest rows/s": round(points / written_s),
        "compacted rows/s": round(points / compacted_s),
        "read points/s": round(points / read_s),
        "bytes a point": size_bytes / points,
        f"curve of {_CURVE_POINTS} ms": curve_s * 1000,
    }
