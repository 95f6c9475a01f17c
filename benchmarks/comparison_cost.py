"""What a comparison costs: two runs of many points each in the embedded store, compacted.

    python benchmarks/comparison_cost.py [--quick] [--json FILE]

How often a comparison is right is the matter of `benchmarks/verdicts.py`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import run_parts

_TURNS = 3
_FLUSHED = 50_000


def measure_sizes(*, quick: bool = False) -> list[dict[str, Any]]:
    """Seconds to open, read and compare, with analyses that are stored or made in memory.

    On a machine that others use, the processor's seconds are the ones to look at.
    """
    rows = []
    print("\nTwo runs of one metric each (goal: a million points each in < 1 s)")
    for points in (10_000,) if quick else (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            row = _measure(points, Path(folder))
        rows.append(row)
        print(
            f"  {points:>9,} points each: {row['stored s']:.2f} s with stored analyses "
            f"(processor {row['stored cpu s']:.2f} s), {row['in memory s']:.2f} s analyzed in "
            f"memory (processor {row['in memory cpu s']:.2f} s)"
        )
    return rows


def _measure(points: int, folder: Path) -> dict[str, Any]:
    import quark
    from quark.analysis.comparison.engine import ComparisonEngine
    from quark.analysis.engine import AnalyzerEngine
    from quark.analysis.phases import PhaseAnalyzer

    ids = []
    for seed in (0, 1):
        generator = np.random.default_rng(seed)
        steps = np.arange(points)
        values = 2.0 * np.exp(-steps / (points / 5)) + 0.3 + 0.1 * generator.normal(size=points)
        with (
            quark.start_run(project="size", storage_dir=folder) as session,
            quark.MetricsLogger(session, batch_size=10_000) as metrics,
        ):
            for step, value in enumerate(values.tolist()):
                metrics.log("train/loss", value, step=step)
                if step % _FLUSHED == 0:
                    session.flush("journaled")
        ids.append(session.run_id)

    def compare() -> tuple[float, float]:
        """The shortest of some turns: seconds by the clock, and of the processor."""
        best = (float("inf"), float("inf"))
        for _ in range(_TURNS):
            start, used = time.perf_counter(), time.process_time()
            primary = quark.open_run(ids[0], folder)
            result = ComparisonEngine(primary).compare(ids[1])
            took = time.perf_counter() - start, time.process_time() - used
            best = min(best[0], took[0]), min(best[1], took[1])
            assert result.metric_diffs[0].common_end == points - 1
        return best

    in_memory = compare()
    for run_id in ids:
        opened = quark.open_run(run_id, folder)
        AnalyzerEngine(opened).analyze(store=True)
        PhaseAnalyzer(opened).analyze(store=True)
    stored = compare()
    return {
        "points": points,
        "stored s": stored[0],
        "stored cpu s": stored[1],
        "in memory s": in_memory[0],
        "in memory cpu s": in_memory[1],
    }


if __name__ == "__main__":
    run_parts(__doc__, {"size": measure_sizes}, quick="few points")
