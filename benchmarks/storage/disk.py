"""Bytes that a point takes on the disk, everything included."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_figures

from quark_backends.store.chunks import CODEC_PCODEC, CODEC_ZSTD
from storage.rivals import ParquetFile, RowTable, list_rows
from storage.stores import (
    RUN_ID,
    BenchStore,
    make_losses,
    make_metric_batches,
    make_times,
    name_keys,
)

_BEFORE_GOAL = 14
_AFTER_GOAL = {"float32 losses": 6, "float64 losses": 10}


def measure_disk(*, quick: bool) -> dict[str, float]:
    points = 100_000 if quick else 1_000_000
    codecs = {"zstd": CODEC_ZSTD}
    if importlib.util.find_spec("pcodec"):
        codecs["pcodec"] = CODEC_PCODEC
    shown = []
    for what, single in (("float32 losses", True), ("float64 losses", False)):
        for keys in (1, 50):
            values = make_losses(points // keys, keys, single=single)
            name = f"{what}, {keys} key{'s'[: keys - 1]}"
            shown.append(
                Figure(f"{name}: before compaction", _measure_inbox(values), at_most=_BEFORE_GOAL)
            )
            for codec, number in codecs.items():
                as_it_is, shrunk = _measure_compacted(values, number)
                shown.append(Figure(f"{name}, {codec}: compacted while written", as_it_is))
                shown.append(
                    Figure(
                        f"{name}, {codec}: and free pages given back",
                        shrunk,
                        at_most=_AFTER_GOAL[what],
                    )
                )
            shown += _measure_rivals(name, values)
    return print_figures(
        f"Bytes a point, of {points:,}: steps every 20 ms +- 0.2 ms, batches of 1,000 rows;"
        "\nthe whole folder after wal_checkpoint(TRUNCATE); free pages by incremental_vacuum",
        shown,
    )


def _measure_inbox(values: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        store = BenchStore(Path(folder))
        store.fill(make_metric_batches(values))
        size_bytes = store.measure_bytes()
        store.close()
    return size_bytes / values.size


def _measure_compacted(values: Any, codec: int) -> tuple[float, float]:
    """After compaction in the background's manner, and after `quark gc` besides."""
    with tempfile.TemporaryDirectory() as folder:
        store = BenchStore(Path(folder), codec=codec)
        store.fill(make_metric_batches(values), compacting=True)
        store.compact()
        as_it_is = store.measure_bytes()
        store.give_space_back()
        shrunk = store.measure_bytes()
        store.close()
    return as_it_is / values.size, shrunk / values.size


def _measure_rivals(name: str, values: Any) -> list[Figure]:
    times, keys = make_times(len(values)), name_keys(values.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        table = RowTable(Path(folder, "rows.db"))
        table.write(list_rows(RUN_ID, keys, times, values))
        found = [Figure(f"{name}: row table", table.measure_bytes() / values.size)]
        table.close()
        if len(keys) == 1 and importlib.util.find_spec("pyarrow"):
            path = Path(folder, "points.parquet")
            file = ParquetFile(path, np.arange(len(values)), times, values[:, 0])
            found.append(
                Figure(f"{name}: Parquet, float64 column", file.measure_bytes() / values.size)
            )
    return found
