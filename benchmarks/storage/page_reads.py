"""What a page reads of a run: 20 curves at once, zoomed in, and what came since."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from figures import Figure, print_figures, time_call, time_side_by_side

from quark_backends.store.run_store import SqliteRunStore
from quark_core.backends.curves import CurveQuery
from storage.stores import RUN_ID, BenchStore, make_losses, make_metric_batches, name_keys

_KEYS = 20
_ENTRIES = 1_000
_BATCH_ROWS = 2_000
# What a loop of 20 metrics at 100 steps a second brings between two looks.
_LIVE_STEPS = 100
_SPIKE = 400.0


def measure_page_reads(*, quick: bool) -> dict[str, float]:
    steps, rounds = (200_000, 3) if quick else (1_000_000, 7)
    values = make_losses(steps + 20 * _LIVE_STEPS, _KEYS)
    spike_step = steps * 7 // 11
    values[spike_step, 3] = _SPIKE
    with tempfile.TemporaryDirectory() as name:
        store = BenchStore(Path(name))
        whole = make_metric_batches(values[:steps], rows=_BATCH_ROWS, total=len(values))
        store.fill(whole, compacting=True)
        store.compact()
        figures = print_figures(
            f"{_KEYS} curves of {steps:,} points, compacted, {_ENTRIES:,} entries each",
            _measure_curves(store, steps, spike_step, rounds),
        )
        figures |= print_figures(
            f"The same run while it goes on: {_KEYS * _LIVE_STEPS:,} points between two looks",
            _measure_changes(store, values, steps),
        )
        store.close()
    return figures


def _open(store: BenchStore) -> SqliteRunStore:
    return SqliteRunStore(store.layout, read_only=True)


def _read(opened: SqliteRunStore, low: int | None = None, high: int | None = None) -> Any:
    query = CurveQuery.build(name_keys(_KEYS), entries=_ENTRIES, low=low, high=high)
    return opened.read_series_many(RUN_ID, query)


def _measure_curves(store: BenchStore, steps: int, spike_step: int, rounds: int) -> list[Figure]:
    opened = _open(store)
    first = _read(opened)

    def read_anew() -> None:
        new = _open(store)
        _read(new)
        new.close()

    taken_s = time_side_by_side(
        {
            "anew": read_anew,
            "kept": lambda: _read(opened),
            "one by one": lambda: [
                opened.read_series(RUN_ID, key, max_points=_ENTRIES) for key in name_keys(_KEYS)
            ],
        },
        rounds,
    )
    shown = [
        Figure("all of it, a store opened anew, ms", taken_s["anew"] * 1000, at_most=160),
        Figure("all of it, a store opened anew, ms of processor time", _compute_ms(read_anew)),
        Figure("all of it again, ms", taken_s["kept"] * 1000, at_most=80),
        Figure("all of it again, ms of processor time", _compute_ms(lambda: _read(opened))),
        Figure(
            "times as fast as one curve after the other",
            taken_s["one by one"] / taken_s["kept"],
            at_least=1,
        ),
    ]
    for width in (200_000, 20_000, 200):
        name = f"zoom to {width:,} steps"
        wall_s, computed_s, missed = _zoom(opened, steps, spike_step, min(width, steps), rounds)
        shown += [
            Figure(f"{name}, ms", wall_s * 1000, at_most=100),
            Figure(f"{name}, ms of processor time", computed_s * 1000),
            Figure(f"{name}: spike missed", missed, at_most=0),
        ]
    shown.append(
        Figure(
            "points not in the curves",
            float(_KEYS * steps - sum(curve.points for curve in first.curves)),
            at_most=0,
        )
    )
    marks = 1_000
    begin = time.perf_counter()
    for _ in range(marks):
        opened.read_mark(RUN_ID)
    taken_us = (time.perf_counter() - begin) / marks * 1e6
    opened.close()
    return [*shown, Figure("has anything changed, us", taken_us, at_most=100)]


def _zoom(
    opened: SqliteRunStore, steps: int, spike_step: int, width: int, rounds: int
) -> tuple[float, float, int]:
    """Median times of windows in different places around the spike, and how often it is missed.

    Both that passed and that of the processor.
    """
    taken, computed, missed = [], [], 0
    for place in np.linspace(0.1, 0.9, 2 * rounds):
        low = max(0, min(steps - width, spike_step - int(width * place)))
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        found = _read(opened, low, low + width - 1)
        taken.append(time.perf_counter() - begin)
        computed.append(time.thread_time() - begin_cpu)
        missed += int(max(curve.high.max() for curve in found.curves) != _SPIKE)
    return median(taken), median(computed), missed


def _compute_ms(call: Callable[[], object]) -> float:
    """The least time of the processor that a call takes, whatever runs beside it."""
    taken = []
    for _ in range(5):
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return min(taken) * 1000


def _measure_changes(store: BenchStore, values: Any, steps: int) -> list[Figure]:
    opened = _open(store)
    cursor = opened.read_heads(RUN_ID).cursor
    taken: dict[bool, list[float]] = {True: [], False: []}
    seen = 0
    batches = _count_on(values, steps)
    for look in range(20):
        for batch in itertools.islice(batches, _KEYS * _LIVE_STEPS // 100):
            store.ingest.write([batch])
        is_compacted = look % 5 == 4
        if is_compacted:
            store.compact()
        begin = time.perf_counter()
        changes = opened.read_changes(
            RUN_ID, cursor, kinds=("metric",), keys=name_keys(_KEYS), max_rows=100_000
        )
        taken[is_compacted].append(time.perf_counter() - begin)
        cursor, seen = changes.cursor, seen + changes.records["metric"].count
    nothing_s = time_call(
        lambda: opened.read_changes(RUN_ID, cursor, kinds=("metric",), max_rows=100_000), 9
    )
    live_s = time_call(lambda: _read(opened), 5)
    opened.close()
    return [
        Figure("what came, ms", median(taken[False]) * 1000, at_most=20),
        Figure("what came and was compacted meanwhile, ms", median(taken[True]) * 1000),
        Figure("nothing came, ms", nothing_s * 1000, at_most=1),
        Figure("all curves of it again, ms", live_s * 1000),
        Figure(
            "points that did not come, or twice",
            abs(20 * _KEYS * _LIVE_STEPS - seen),
            at_most=0,
        ),
    ]


def _count_on(values: Any, steps: int) -> Iterator[Any]:
    """Batches of 100 points that follow those of the whole run."""
    first = steps * _KEYS // _BATCH_ROWS + 1
    rest = make_metric_batches(values[steps:], rows=100, first=steps, total=len(values))
    for number, batch in enumerate(rest, first):
        yield msgspec.structs.replace(batch, number=number)
