"""Runs in memory for the tests of the comparison."""

import numpy as np

from quark.analysis.comparison.metrics import Pairing, compare_metrics
from quark.analysis.config import ComparisonEngineConfig
from quark.analysis.run_data import RunData
from quark_core.records import MetricRecord
from quark_core.records.columns import Columns


def make_run(curves, run_id="r"):
    """A run with these metrics: key -> values, or (steps, values), or epochs as a dict."""
    records = []
    for key, given in curves.items():
        epochs = isinstance(given, dict)
        if epochs:
            pairs = given.items()
        elif isinstance(given, tuple):
            pairs = zip(*given, strict=True)
        else:
            pairs = enumerate(given)
        for place, value in pairs:
            records.append(
                MetricRecord(
                    run_id, "w", 0, 0, len(records), 0, key, None, key, float(value),
                    None if epochs else int(place), int(place) if epochs else None,
                )
            )  # fmt: skip
    columns = Columns.from_records("metric", records)
    return RunData(lambda kind, _: columns if kind == "metric" else Columns.empty(kind), run_id)


def decay(seed=0, points=60, level=0.3, spread=0.02, noise=0.01, start=2.0):
    """A loss that falls and stays, at a level that a seed draws."""
    generator = np.random.default_rng(seed)
    floor = level * np.exp(spread / level * generator.normal())
    steps = np.arange(points)
    curve = floor + (start - floor) * np.exp(-steps / (points / 8))
    return curve + noise * generator.normal(size=points)


def compare(primary, reference, config=None, pairing=None):
    """Diffs by metric of two lists of runs in memory."""
    diffs = compare_metrics(
        primary, reference, pairing or Pairing(), config or ComparisonEngineConfig()
    )
    return {diff.metric_key: diff for diff in diffs}
