"""Layers and parameters of two sides, matched by name, by the log-ratio of their medians."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.results import (
    LayerFigureDiff,
    LayerSummaryDiff,
    ParameterDiff,
)
from quark.analysis.curves import spread
from quark.analysis.histories import History, LayerHistory, ParameterHistory
from quark.analysis.run_data import RunData

Floats = NDArray[np.float64]

_LAYER_SIZES = ("rms", "norm", "std")
_LAYER_SHARES = ("dead_unit_ratio", "saturation_ratio", "zero_ratio")
_PARAMETER_SIZES = ("update_to_parameter_ratio", "gradient_norm", "update_norm", "value_norm")
_PARAMETER_SHARES = ("gradient_near_zero_ratio",)
_NOTABLE_SHARE = 0.2
_NOISE_MULTIPLE = 3.0
_MEDIAN = math.sqrt(math.pi / 2.0)


@dataclass(frozen=True, slots=True)
class _Found:
    """One layer's or parameter's diff, whatever it is of."""

    presence: str
    start: int | None
    end: int | None
    probes: tuple[int, int]
    figures: tuple[LayerFigureDiff, ...]
    notable: bool
    log_ratio: float | None
    summary: str


def compare_layers(
    primary: Sequence[RunData], reference: Sequence[RunData], factor: float
) -> tuple[LayerSummaryDiff, ...]:
    """Activations, then gradients, in the order of the model."""
    out = []
    for summary_type in ("activation", "gradient"):
        tables: list[list[Mapping[str, LayerHistory]]] = [
            [run.activations if summary_type == "activation" else run.gradients for run in side]
            for side in (primary, reference)
        ]
        for name in _order_names(tables):
            sides = [[table[name] for table in side if name in table] for side in tables]
            found = _compare_histories(sides, _LAYER_SIZES, _LAYER_SHARES, factor)
            shown = (sides[0] or sides[1])[0]
            out.append(
                LayerSummaryDiff(
                    name, shown.kind, summary_type, found.presence, found.start, found.end,
                    *found.probes, found.log_ratio, found.notable, found.figures, found.summary,
                )
            )  # fmt: skip
    return tuple(out)


def compare_parameters(
    primary: Sequence[RunData], reference: Sequence[RunData], factor: float
) -> tuple[ParameterDiff, ...]:
    """Parameters, in the order of the model."""
    tables: list[list[Mapping[str, ParameterHistory]]] = [
        [run.parameters for run in side] for side in (primary, reference)
    ]
    out = []
    for name in _order_names(tables):
        sides = [[table[name] for table in side if name in table] for side in tables]
        found = _compare_histories(sides, _PARAMETER_SIZES, _PARAMETER_SHARES, factor)
        shown = (sides[0] or sides[1])[0]
        out.append(
            ParameterDiff(
                name, shown.role, found.presence, found.start, found.end,
                *found.probes, found.log_ratio, found.notable, found.figures, found.summary,
            )
        )  # fmt: skip
    return tuple(out)


def _order_names(tables: Sequence[Sequence[Mapping[str, History]]]) -> list[str]:
    """Every name once, the primary's first, in the order in which they appear."""
    return list(dict.fromkeys(name for side in tables for table in side for name in table))


def _compare_histories(
    sides: Sequence[Sequence[History]], sizes: Sequence[str], shares: Sequence[str], factor: float
) -> _Found:
    if not sides[0] or not sides[1]:
        side = "primary" if sides[0] else "reference"
        probes = (sum(map(len, sides[0])), sum(map(len, sides[1])))
        words = f"only the {side} has it"
        return _Found(f"{side}_only", None, None, probes, (), False, None, words)
    everyone = [*sides[0], *sides[1]]
    start = max(int(item.step[0]) for item in everyone)
    end = min(int(item.step[-1]) for item in everyone)
    if start > end:
        words = "the sides were looked at over different steps"
        return _Found("both", None, None, (0, 0), (), False, None, words)
    rows = [[(item.step >= start) & (item.step <= end) for item in side] for side in sides]
    probes = (sum(int(row.sum()) for row in rows[0]), sum(int(row.sum()) for row in rows[1]))
    figures = []
    for name in (*sizes, *shares):
        values = [
            [_finite(item[name][row]) for item, row in zip(side, chosen, strict=True)]
            for side, chosen in zip(sides, rows, strict=True)
        ]
        kept = [[item for item in side if len(item)] for side in values]
        if kept[0] or kept[1]:
            figures.append(_compare_figure(name, kept, factor if name in sizes else None))
    main = next((f.log_ratio for f in figures if f.name in sizes and f.log_ratio is not None), None)
    notable = any(figure.notable for figure in figures)
    return _Found(
        "both", start, end, probes, tuple(figures), notable, main, _describe(figures, probes)
    )


def _compare_figure(
    name: str, values: Sequence[Sequence[Floats]], factor: float | None
) -> LayerFigureDiff:
    """The medians of one figure; `factor` is None for shares between 0 and 1."""
    primary, reference = (
        median([float(np.median(item)) for item in side]) if side else None for side in values
    )
    if primary is None or reference is None:
        return LayerFigureDiff(name, primary, reference, None, None, False)
    difference = primary - reference
    if factor is None:
        notable = _stands_out(difference, _NOTABLE_SHARE, values, log=False)
        return LayerFigureDiff(name, primary, reference, None, difference, notable)
    if primary <= 0.0 or reference <= 0.0:
        return LayerFigureDiff(
            name, primary, reference, None, difference, (primary > 0.0) != (reference > 0.0)
        )
    ratio = math.log(primary) - math.log(reference)
    notable = _stands_out(ratio, math.log(factor), values, log=True)
    return LayerFigureDiff(name, primary, reference, ratio, difference, notable)


def _stands_out(
    difference: float, least: float, values: Sequence[Sequence[Floats]], *, log: bool
) -> bool:
    # Of most layers the difference is small, and then the noise need not be known.
    size = abs(difference)
    return size >= least and size >= _NOISE_MULTIPLE * _noise(values, log=log)


def _noise(values: Sequence[Sequence[Floats]], *, log: bool) -> float:
    """How far the medians may lie apart by how the figure moves within and between runs."""
    errors = []
    for side in values:
        within, medians = [], []
        for item in side:
            scaled = np.log(item[item > 0.0]) if log else item
            if len(scaled):
                within.append(_MEDIAN * spread(scaled) / math.sqrt(len(scaled)))
                medians.append(float(np.median(scaled)))
        if not medians:
            continue
        between = float(np.std(medians, ddof=1)) if len(medians) > 1 else 0.0
        errors.append(max(between, float(np.median(within))) / math.sqrt(len(medians)))
    return math.hypot(*errors)


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _describe(figures: Sequence[LayerFigureDiff], probes: tuple[int, int]) -> str:
    if not figures or min(probes) == 0:
        return "one side has no probe within the common steps"
    notable = [figure for figure in figures if figure.notable]
    if not notable:
        return "no notable difference"
    return "; ".join(_describe_figure(figure) for figure in notable)


def _describe_figure(figure: LayerFigureDiff) -> str:
    if figure.log_ratio is None:
        return f"{figure.name} {figure.primary:.3g} in place of {figure.reference:.3g}"
    times = math.exp(min(abs(figure.log_ratio), 700.0))
    return f"{figure.name} {times:.3g} times {'larger' if figure.log_ratio > 0 else 'smaller'}"
