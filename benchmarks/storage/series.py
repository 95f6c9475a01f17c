"""One long series: every point as arrays, and a curve of some of them."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_figures, time_call, time_side_by_side

from quark_backends.store.chunks import CODEC_PCODEC, CODEC_ZSTD
from quark_backends.store.reading.reader import StoreReader
from quark_core.backends.series import reduce_points
from quark_core.records.query import Query
from storage.rivals import DuckDbTable, ParquetFile, RowTable, list_rows
from storage.stores import RUN_ID, BenchStore, make_losses, make_metric_batches, make_times

_KEY = "loss"
_SPIKE = 1e6
_CURVE_POINTS = 2_000
_BOUNDS = (1, 2, 10, 100, 1_000, _CURVE_POINTS, 5_000, 50_000)


def read_points(store: BenchStore) -> tuple[Any, Any]:
    """Steps and values of the series, by a reader that has read nothing yet."""
    reader = store.open_reader()
    columns = reader.read(RUN_ID, "metric", Query(equals={"metric_key": _KEY}))
    points = columns["step"], columns["value"]
    reader.close()
    return points


def read_curve(store: BenchStore, max_points: int) -> Any:
    """The curve out of the roll-up, by a reader that has read nothing yet."""
    reader = store.open_reader()
    series = reader.read_series(RUN_ID, _KEY, max_points=max_points)
    reader.close()
    return series


def reduce_everything(reader: StoreReader) -> Any:
    """The same curve, with the same figures, out of every point; by a reader that is kept open."""
    columns = reader.read(RUN_ID, "metric", Query(equals={"metric_key": _KEY}))
    arrays = (columns[name] for name in ("step", "epoch", "time_us", "value"))
    return reduce_points(_KEY, *arrays, _CURVE_POINTS)


def measure_series(*, quick: bool) -> dict[str, float]:
    # Enough for the curve to come out of the roll-up in the short form too.
    count, rounds = (200_000, 3) if quick else (1_000_000, 9)
    values, times, steps = make_losses(count), make_times(count), np.arange(count)
    spike_step = count * 7 // 11
    values[spike_step] = _SPIKE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stores = {"zstd": _fill(folder / "zstd", values, CODEC_ZSTD)}
        if importlib.util.find_spec("pcodec"):
            stores["pcodec"] = _fill(folder / "pcodec", values, CODEC_PCODEC)
        table = RowTable(folder / "rows.db")
        table.write(list_rows(RUN_ID, [_KEY], times, values))
        readers: dict[str, Callable[[], Any]] = {"row table": lambda: table.read(RUN_ID, _KEY)}
        for codec, store in stores.items():
            readers[f"store, {codec}"] = lambda store=store: read_points(store)
        if importlib.util.find_spec("pyarrow"):
            file = ParquetFile(folder / "points.parquet", steps, times, values[:, 0])
            readers["Parquet"] = file.read
            if importlib.util.find_spec("duckdb"):
                duck = DuckDbTable(
                    folder / "points.duckdb", RUN_ID, _KEY, steps, times, values[:, 0]
                )
                readers["DuckDB"] = lambda: duck.read(RUN_ID, _KEY)
        for reader in readers.values():
            found_steps, found_values = reader()
            assert np.array_equal(found_steps, steps)
            assert np.array_equal(found_values, values[:, 0])
        taken_s = time_side_by_side(readers, rounds)
        goals = {"store, zstd": 30.0, "store, pcodec": 80.0}
        figures = print_figures(
            f"One series of {count:,} points as arrays of steps and values, a new reader each time",
            [
                *(Figure(f"{way}, ms", second * 1000) for way, second in taken_s.items()),
                *(
                    Figure(
                        f"{way}, times as fast as the row table",
                        taken_s["row table"] / second,
                        at_least=goals.get(way),
                    )
                    for way, second in taken_s.items()
                    if way != "row table"
                ),
            ],
        )
        figures.update(_measure_curves(stores, table, values, spike_step, rounds))
        for store in stores.values():
            store.close()
        table.close()
    return figures


def _fill(folder: Path, values: Any, codec: int) -> BenchStore:
    store = BenchStore(folder, codec=codec)
    store.fill(make_metric_batches(values), compacting=True)
    store.compact()
    return store


def _measure_curves(
    stores: dict[str, BenchStore],
    table: RowTable,
    values: Any,
    spike_step: int,
    rounds: int,
) -> dict[str, float]:
    missed, (reducer, reduce) = 0, _choose_reducer()
    rows_s = time_call(lambda: reduce(*table.read(RUN_ID, _KEY)), rounds)
    shown = [Figure(f"row table: every point, then {reducer}, ms", rows_s * 1000)]
    for codec, store in stores.items():
        kept = store.open_reader()
        taken_s = time_side_by_side(
            {
                "roll-up": lambda store=store: read_curve(store, _CURVE_POINTS),
                "points": lambda store=store: reduce(*read_points(store)),
                "kept": lambda kept=kept: kept.read_series(RUN_ID, _KEY, max_points=_CURVE_POINTS),
                "kept, points": lambda kept=kept: reduce_everything(kept),
            },
            3 * rounds,
        )
        kept.close()
        shown += [
            Figure(f"{codec}: every point, then {reducer}, ms", taken_s["points"] * 1000),
            Figure(f"{codec}: out of the roll-up, ms", taken_s["roll-up"] * 1000),
            Figure(f"{codec}: times as fast as the row table", rows_s / taken_s["roll-up"]),
            Figure(
                f"{codec}: times as fast by the roll-up", taken_s["points"] / taken_s["roll-up"]
            ),
            Figure(f"{codec}, reader kept open: roll-up, ms", taken_s["kept"] * 1000),
            Figure(
                f"{codec}, reader kept open: every point, then the same curve, ms",
                taken_s["kept, points"] * 1000,
            ),
            Figure(
                f"{codec}, reader kept open: times as fast by the roll-up",
                taken_s["kept, points"] / taken_s["kept"],
                at_least=30,
            ),
        ]
        for bound in _BOUNDS:
            series = read_curve(store, bound)
            entry = int(np.nanargmax(series.high))
            found = series.high[entry] == _SPIKE and series.high_step[entry] == spike_step
            whole = series.points == len(values) and len(series) <= bound
            missed += not (found and whole)
    shown.append(Figure(f"spike missed, of {len(_BOUNDS) * len(stores)} curves", missed, at_most=0))
    figures = print_figures(f"A curve of {_CURVE_POINTS:,} points of {len(values):,}", shown)
    figures["curves"] = len(_BOUNDS) * len(stores)
    figures["spike missed"] = missed
    return figures


def _choose_reducer() -> tuple[str, Callable[[Any, Any], object]]:
    """What others do who have every point: the quickest reduction that is installed."""
    if importlib.util.find_spec("tsdownsample"):
        from tsdownsample import MinMaxLTTBDownsampler

        sampler = MinMaxLTTBDownsampler()
        return "MinMaxLTTB", lambda step, value: sampler.downsample(
            step, value, n_out=_CURVE_POINTS
        )

    def reduce(step: Any, value: Any) -> object:
        nothing = np.full(len(step), -1)
        return reduce_points(_KEY, step, nothing, nothing, value, _CURVE_POINTS)

    return "reduce_points", reduce
