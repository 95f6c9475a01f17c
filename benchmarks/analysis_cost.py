"""What an analysis of a long run costs, and a look of the monitor as a run grows.

    python benchmarks/analysis_cost.py [--quick] [--json FILE]

Processor seconds of one thread, and peak memory of the process. Runs of up to
20 million points are put into an embedded store first, which takes minutes.
"""

from __future__ import annotations

import resource
import tempfile
import time

import numpy as np
from figures import make_parser, parse, write

import quark
from quark.analysis.engine import analyze_run
from quark.analysis.monitor_state import GrowingCurves
from quark.analysis.outputs import open_analysis
from quark.analysis.run_data import RunData
from quark_core.records.columns import Columns, fill_array

_METRICS = 4
_PART = 50_000
_FLUSHED_STEPS = 20_000


def main() -> int:
    arguments = parse(make_parser(__doc__, quick="small runs"))
    sizes = (100_000,) if arguments.quick else (1_000_000, 5_000_000, 20_000_000)
    figures = {f"analyze {size:,} points, s": _measure_analysis(size) for size in sizes}
    figures |= _measure_looks((100_000,) if arguments.quick else (100_000, 1_000_000, 5_000_000))
    figures["peak memory, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for name, figure in figures.items():
        print(f"{name:<44} {figure:8.3f}")
    write(arguments, figures)
    return 0


def _make_losses(steps: int) -> np.ndarray:
    x = np.arange(steps)
    noise = np.random.default_rng(0).normal(size=steps)
    return 0.1 + np.exp(-5.0 * x / steps) * (1.0 + 0.05 * noise)


def _measure_analysis(points: int) -> float:
    names = ["train/loss", *(f"m/{number}" for number in range(_METRICS - 1))]
    with tempfile.TemporaryDirectory() as folder:
        with quark.start_run(project="cost", storage_dir=folder) as session:
            metrics = quark.MetricsLogger(session)
            for step, value in enumerate(_make_losses(points // _METRICS).tolist()):
                metrics.log_many(dict.fromkeys(names, value), step=step)
                if step % _FLUSHED_STEPS == 0:
                    session.flush("journaled", 600)
            session.flush("stored", 600)
        opened = quark.open_run(session.run_id or "", folder)
        begun = time.process_time()
        analyze_run(open_analysis(opened).load())
        return time.process_time() - begun


def _measure_looks(sizes: tuple[int, ...]) -> dict[str, float]:
    """One look after so many points of a loss, of which the last thousand are new."""
    losses, curves, figures = _make_losses(max(sizes)), GrowingCurves(), {}
    for start in range(0, max(sizes), _PART):
        curves.add(_make_part(start, losses[start : start + _PART]))
        if start + _PART in sizes:
            curves.load()
            begun = time.process_time()
            curves.add(_make_part(start + _PART, np.full(1_000, losses[-1])))
            run = RunData(
                lambda kind, _: Columns.empty(kind), "r", ended=False, find_curves=lambda: curves
            )
            analyze_run(run)
            figures[f"a look after {start + _PART:,} points, s"] = time.process_time() - begun
    return figures


def _make_part(start: int, values: np.ndarray) -> Columns:
    count = len(values)
    steps = np.arange(start, start + count)
    texts = {"run_id": "r", "writer_id": "w", "metric_key": "train/loss", "metric_name": "loss"}
    arrays = {name: fill_array(count, text) for name, text in texts.items()}
    arrays |= {name: fill_array(count, None) for name in ("namespace", "description", "metadata")}
    arrays |= {"attempt": np.zeros(count, np.int64), "rank": np.zeros(count, np.int64)}
    arrays |= {"sequence": steps, "step": steps, "epoch": np.full(count, -1)}
    arrays |= {"time_us": steps + 1_767_225_600_000_000, "value": np.asarray(values, float)}
    return Columns("metric", count, arrays)


if __name__ == "__main__":
    raise SystemExit(main())
