"""Batches of 1,000 points into the store, beside a table with a row a point."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, print_figures

from quark_core.backends.contract import Batch
from storage.rivals import RowTable, list_rows
from storage.stores import (
    GROUP_BATCHES,
    RUN_ID,
    BenchStore,
    make_losses,
    make_metric_batches,
    make_times,
    name_keys,
)

_KEYS, _STEPS = 50, 20
_ROWS = _KEYS * _STEPS


def measure_ingest(*, quick: bool) -> dict[str, float]:
    count, rounds = (100, 2) if quick else (500, 5)
    values = make_losses(count * _STEPS, _KEYS)
    batches = list(make_metric_batches(values, rows=_ROWS))
    rows = list_rows(RUN_ID, name_keys(_KEYS), make_times(len(values)), values)
    ready = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
    groups = [batches[start : start + GROUP_BATCHES] for start in range(0, count, GROUP_BATCHES)]
    ways: dict[str, Callable[[Path], float]] = {
        "row table": lambda folder: _fill_rows(folder, ready, durable=False),
        "store": lambda folder: _fill_store(folder, [[b] for b in batches], durable=False),
        "store, 64 batches at once": lambda folder: _fill_store(folder, groups, durable=False),
        "row table, fsync": lambda folder: _fill_rows(folder, ready, durable=True),
        "store, fsync": lambda folder: _fill_store(folder, [[b] for b in batches], durable=True),
        "store, 64 at once, fsync": lambda folder: _fill_store(folder, groups, durable=True),
        "bare fsync": lambda folder: _append(folder, batches),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                taken[name].append(way(Path(folder)))
    rate = {name: count / median(found) for name, found in taken.items()}
    ratios = [
        median(slow / fast for slow, fast in zip(taken["row table"], taken["store"], strict=True)),
        median(
            slow / fast
            for slow, fast in zip(
                taken["row table"], taken["store, 64 batches at once"], strict=True
            )
        ),
    ]
    return print_figures(
        f"Ingest of batches of {_ROWS:,} rows ({_KEYS} metrics x {_STEPS} steps), {count} batches",
        [
            Figure("row table, no fsync, rows/s", rate["row table"] * _ROWS),
            Figure("store, no fsync, rows/s", rate["store"] * _ROWS),
            Figure(
                "store, no fsync, 64 batches at once, rows/s",
                rate["store, 64 batches at once"] * _ROWS,
            ),
            Figure("store / row table, a batch a transaction", ratios[0], at_least=10),
            Figure("store / row table, 64 batches at once", ratios[1], at_least=10),
            Figure("row table, an fsync a batch, batches/s", rate["row table, fsync"]),
            Figure("store, an fsync a batch, batches/s", rate["store, fsync"], at_least=400),
            Figure("store, an fsync for 64 batches, batches/s", rate["store, 64 at once, fsync"]),
            Figure("a file, an fsync a batch, batches/s", rate["bare fsync"]),
        ],
    )


def _fill_rows(folder: Path, ready: list[Any], *, durable: bool) -> float:
    table = RowTable(folder / "rows.db", durable=durable)
    begin = time.perf_counter()
    for rows in ready:
        table.write(rows)
    taken_s = time.perf_counter() - begin
    table.close()
    return taken_s


def _fill_store(folder: Path, groups: list[list[Batch]], *, durable: bool) -> float:
    store = BenchStore(folder, durable=durable)
    # A body is decoded once for the summaries; that must not be left from another round.
    fresh = [[Batch(*_fields(batch)) for batch in group] for group in groups]
    begin = time.perf_counter()
    for group in fresh:
        store.ingest.write(group)
    taken_s = time.perf_counter() - begin
    store.close()
    return taken_s


def _fields(batch: Batch) -> tuple[Any, ...]:
    return tuple(getattr(batch, name) for name in Batch.__struct_fields__)


def _append(folder: Path, batches: list[Batch]) -> float:
    """The least that an acknowledged batch costs on this disk."""
    with (folder / "bodies").open("wb", buffering=0) as file:
        begin = time.perf_counter()
        for batch in batches:
            file.write(batch.body)
            os.fsync(file.fileno())
        return time.perf_counter() - begin
