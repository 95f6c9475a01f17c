"""The figures of one metric over all runs, as its test takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.comparison.alignment import CommonRange, Figures
from quark_core.analysis.comparison.config import MetricDirection
from quark_core.analysis.comparison.directions import is_rate_name
from quark_core.analysis.comparison.verdicts import Sample
from quark_core.analysis.curves import Curve
from quark_core.analysis.run_data import RunData

__all__ = ["collect_figures", "drop_empty", "lay_over", "make_sample"]

Floats = NDArray[np.float64]

_SCALE_POINTS = 4096


def lay_over(
    key: str, sides: tuple[Sequence[RunData], Sequence[RunData]]
) -> tuple[list[Curve], list[Curve]]:
    """The metric's curves of either side, over steps wherever some are over steps."""
    curves = [[run.metrics[key] for run in side if key in run.metrics] for side in sides]
    if len({curve.unit for side in curves for curve in side}) > 1:
        curves = [
            [run.place_on_steps(run.metrics[key]) for run in side if key in run.metrics]
            for side in sides
        ]
    return curves[0], curves[1]


def drop_empty(figures: Sequence[Figures]) -> list[Figures]:
    """Without the runs that have no points in the common range."""
    return [item for item in figures if item.points or item.diverged]


def make_sample(
    key: str,
    direction: MetricDirection,
    curves: tuple[list[Curve], list[Curve]],
    figures: tuple[list[Figures], list[Figures]],
    common: CommonRange,
    paired: bool,
    same_runs: bool,
) -> Sample:
    """What the test of one metric looks at; both sides have figures."""
    diverged = tuple(
        np.array([item.diverged or item.tail_median is None for item in side]) for side in figures
    )
    values = {name: collect_figures(figures, name) for name in ("best", "tail_median", "area")}
    alive = ~np.concatenate(diverged)
    known = {
        name: pair
        for name, pair in values.items()
        if name == "tail_median" or bool(np.isfinite(np.concatenate(pair)[alive]).all())
    }
    ends = np.concatenate(known["tail_median"])[alive]
    whole = np.concatenate(known.get("area", known["tail_median"]))[alive]
    inside = np.concatenate([ends, whole])
    single = len(figures[0]) == len(figures[1]) == 1
    positive = bool((inside > 0.0).all())
    return Sample(
        key,
        {"higher": 1, "lower": -1, "none": 0}[direction],
        known,
        (diverged[0], diverged[1]),
        noises=tuple(item.noise for side in figures for item in side),
        scale=0.0 if not single or positive else _measure_scale(curves, common),
        is_rate=is_rate_name(key) and bool(((inside >= 0.0) & (inside <= 1.0)).all()),
        paired=paired,
        same_runs=same_runs,
        identical=single and _are_equal(curves[0][0], curves[1][0]),
    )


def collect_figures(
    figures: tuple[list[Figures], list[Figures]], name: str
) -> tuple[Floats, Floats]:
    """One figure of all runs of either side, NaN where a run has none."""
    one, two = (
        np.array([math.nan if (v := getattr(item, name)) is None else v for item in side])
        for side in figures
    )
    return one, two


def _are_equal(one: Curve, two: Curve) -> bool:
    return bool(
        len(one) == len(two)
        and np.array_equal(one.step, two.step)
        and np.array_equal(one.value, two.value, equal_nan=True)
    )


def _measure_scale(curves: tuple[list[Curve], list[Curve]], common: CommonRange) -> float:
    """Spread of the values of a typical curve: its interquartile range."""
    spreads = []
    for curve in (*curves[0], *curves[1]):
        values = curve.between(common.start, common.end).finite.value
        if len(values):
            low, high = np.quantile(values[:: len(values) // _SCALE_POINTS + 1], [0.25, 0.75])
            spreads.append(float(high) - float(low))
    return float(np.mean(spreads)) if spreads else 0.0
