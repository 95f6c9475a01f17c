"""Differences of figures between two sides, as the result shows them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.comparison.alignment import Figures
from quark_core.analysis.comparison.results import FigureDiff
from quark_core.analysis.comparison.samples import collect_figures
from quark_core.analysis.comparison.statistics import (
    bootstrap_iqm,
    compare_means,
    estimate_effect,
    probability_of_improvement,
    take_iqm,
)
from quark_core.analysis.comparison.verdicts import Sample

__all__ = ["describe_groups", "make_figure", "take_known", "take_mean"]

Floats = NDArray[np.float64]

_IQM_RUNS = 5


def describe_groups(sample: Sample | None, level: float) -> dict[str, float | None]:
    """Effect size, probability of improvement and interquartile means, as far as the runs allow."""
    if sample is None or any(bool(side.any()) for side in sample.diverged):
        return {}
    one, two = sample.figures["tail_median"]
    out: dict[str, float | None] = {"effect_size": take_known(estimate_effect(one, two))}
    if min(len(one), len(two)) >= 2 and sample.sign:
        out["probability_of_improvement"] = probability_of_improvement(one, two, sample.sign)
    if min(len(one), len(two)) >= _IQM_RUNS:
        low, high = bootstrap_iqm(one, two, level)
        out |= {
            "primary_iqm": take_known(take_iqm(one)),
            "reference_iqm": take_known(take_iqm(two)),
            "iqm_interval_low": take_known(low),
            "iqm_interval_high": take_known(high),
        }
    return out


def make_figure(
    figures: tuple[list[Figures], list[Figures]], name: str, sample: Sample | None
) -> FigureDiff:
    """One figure on both sides; None for what neither side or only one has."""
    one, two = (side[np.isfinite(side)] for side in collect_figures(figures, name))
    primary, reference = take_mean(one), take_mean(two)
    difference, relative, p_value = None, None, None
    if primary is not None and reference is not None:
        difference = take_known(primary - reference)
        if difference is not None and reference:
            relative = take_known(difference / abs(reference))
        paired = sample is not None and sample.paired and len(one) == len(two) == len(figures[0])
        test = compare_means(one, two, paired=paired)
        p_value = None if test is None else test.p_value
    deviations = [
        take_known(float(side.std(ddof=1))) if len(side) > 1 else None for side in (one, two)
    ]
    return FigureDiff(
        primary, reference, difference, relative, deviations[0], deviations[1], p_value
    )


def take_mean(values: Floats) -> float | None:
    """The mean, or None of no values."""
    # Divided first, since the sum of huge values overflows where their mean does not.
    return take_known(float((values / len(values)).sum())) if len(values) else None


def take_known(value: float | None) -> float | None:
    """The value where it is finite, else None."""
    return None if value is None or not math.isfinite(value) else float(value)
