"""The curve of what an alert holds to be at fault, drawn small, its first step marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from quark.cli.plots import draw_curve
from quark_core.analysis.curves import Curve
from quark_core.analysis.observations import format_number, say_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.analysis.case import Case
    from quark_core.analysis.histories import History, ParameterHistory
    from quark_core.analysis_records import AlertRecord

__all__ = ["CulpritCurve", "describe_curve", "draw_culprit", "find_culprit_curve"]

_LOG_RATIO = 100.0
_HEIGHT = 2
_NOT_FINITE = "\u00d7"
# Rule -> where its figure is looked for first.
_PLACES: dict[str, tuple[str, ...]] = {
    "exploding_gradients": ("gradient", "parameter_gradient"),
    "vanishing_gradients": ("parameter_gradient", "gradient"),
    "stagnant_layers": ("update", "parameter_gradient"),
    "update_ratio": ("update",),
    "activation_collapse": ("activation",),
}
_KINDS: dict[str, tuple[str, ...]] = {
    "gradient": ("gradient", "parameter_gradient"),
    "parameter": ("value", "update"),
}
_ANY = ("activation", "gradient", "update", "parameter_gradient", "value")
_FIGURES = {
    "update": ("update_to_parameter_ratio", "update"),
    "parameter_gradient": ("gradient_norm", "gradient norm"),
    "value": ("value_norm", "norm"),
}


@dataclass(frozen=True)
class CulpritCurve:
    """A curve to draw.

    Attributes:
        label: What it is, such as `train/loss` or `gradient of layers.2`.
        curve: Its points, those that are not finite included.
    """

    label: str
    curve: Curve


def find_culprit_curve(case: Case, alert: AlertRecord) -> CulpritCurve | None:
    """The curve that shows best what an alert says of its culprit; None where the run has none."""
    culprit = alert.culprit
    if culprit is None:
        return None
    found = _find_metric(case, culprit)
    if found is not None:
        return CulpritCurve(culprit, found) if len(found) > 1 else None
    kind = alert.evidence[0].kind if alert.evidence else ""
    places = _PLACES.get(alert.rule_id) or _KINDS.get(kind) or ()
    for place in dict.fromkeys((*places, *_ANY)):
        made = _find_figure(case, culprit, place, alert)
        if made is not None and len(made.curve) > 1:
            return made
    return None


def draw_culprit(item: CulpritCurve, first: int | None, width: int, style: str) -> Text:
    """Three lines: the curve in two, and a mark under a step.

    What is before the step is cyan, the rest in the style. Points that are not
    finite, where no others follow, are crosses.

    Args:
        item: The curve.
        first: The step to mark, or the epoch of a curve over epochs; None marks nothing.
        width: Columns of the terminal that it may take.
        style: Of what comes from the step on.
    """
    curve = item.curve
    x, y = curve.step.astype(float), curve.value
    finite = np.isfinite(y)
    low, high = float(x[0]), float(x[-1])
    text = Text(no_wrap=True, overflow="crop")
    mark = None if first is None else _place(first, low, high, width)
    if finite.any():
        known = y[finite]
        begin, end = _place(x[finite][0], low, high, width), _place(x[finite][-1], low, high, width)
        drawn = draw_curve(
            x[finite],
            np.log10(known) if _is_wide(known) else known,
            width=end - begin + 1,
            height=_HEIGHT,
        )
        rows = [
            " " * begin + row.ljust(end - begin + 1) + _NOT_FINITE * (width - 1 - end)
            for row in drawn.splitlines()
        ]
    else:
        rows = [_NOT_FINITE * width] * _HEIGHT
    for row in rows:
        cut = len(row) if mark is None else mark
        text.append(row[:cut], style="cyan")
        text.append(row[cut:].rstrip() + "\n", style=style)
    if mark is not None:
        label = f"{curve.unit} {first}"
        right = mark + 2 + len(label) <= width
        line = f"{' ' * mark}▲ {label}" if right else f"{label} ▲".rjust(mark + 1)
        text.append(line, style=style)
    text.rstrip()
    return text


def describe_curve(item: CulpritCurve) -> str:
    """What a curve is of and what it spans, such as `train/loss, 0.1 to 2.3, steps 0 to 99`."""
    curve, parts = item.curve, [item.label]
    finite = np.isfinite(curve.value)
    if finite.any():
        known = curve.value[finite]
        scale = " on a log scale" if _is_wide(known) else ""
        low, high = float(known.min()), float(known.max())
        parts.append(f"{format_number(low)} to {format_number(high)}{scale}")
    if lost := int((~finite).sum()):
        parts.append(f"{lost} not finite")
    parts.append(say_steps(int(curve.step[0]), int(curve.step[-1]), curve.unit))
    return ", ".join(parts)


def _is_wide(known: NDArray[np.float64]) -> bool:
    """Whether finite values span so much that only a log scale shows them."""
    return bool(known.min() > 0 and known.max() > _LOG_RATIO * known.min())


def _place(step: float, low: float, high: float, width: int) -> int:
    """Column of a step, from 0."""
    if not high > low:
        return 0
    return int(min(max((step - low) / (high - low), 0.0), 1.0) * (width - 1))


def _find_metric(case: Case, name: str) -> Curve | None:
    found = case.run.metrics.get(name)
    if found is not None:
        return case.run.place_on_steps(found)
    if case.train_loss is not None and case.train_loss.key == name:
        return case.train_loss
    rows = case.run.telemetry
    if not rows.count or name not in ("step_time_ms", "data_time_ms", "compute_time_ms"):
        return None
    steps, values = rows["step"], rows[name]
    kept = np.flatnonzero((steps >= 0) & np.isfinite(values))
    kept = kept[np.argsort(steps[kept], kind="stable")]
    return Curve(name, steps[kept], values[kept], np.full(len(kept), -1))


def _find_figure(case: Case, name: str, place: str, alert: AlertRecord) -> CulpritCurve | None:
    if place in _FIGURES:
        parameter = _find_parameter(case, name)
        figure, words = _FIGURES[place]
        return None if parameter is None else _take(parameter, figure, words)
    table = case.run.activations if place == "activation" else case.run.gradients
    layer = table.get(name)
    if layer is None:
        return None
    if place == "gradient":
        return _take(layer, "norm", "gradient norm")
    said = " ".join((alert.title, *(piece.summary for piece in alert.evidence[:1]))).lower()
    if "dead" in said:
        return _take(layer, "dead_unit_ratio", "share of dead units")
    if "saturat" in said:
        return _take(layer, "saturation_ratio", "share of saturated outputs")
    return _take(layer, "std", "deviation of the outputs")


def _take(history: History, figure: str, words: str) -> CulpritCurve | None:
    curve = history.curve(figure)
    is_counted = "nan_count" in history.figures
    if is_counted:
        # NaN stands for "no figure"; where elements are NaN, it is one.
        broken = np.nan_to_num(history["nan_count"]) + np.nan_to_num(history["inf_count"]) > 0
        kept = np.isfinite(curve.value) | broken
        values = np.where(broken, np.nan, curve.value)
        curve = Curve(curve.key, curve.step, values, curve.epoch).take(kept)
    else:
        curve = curve.finite
    return CulpritCurve(f"{words} of {history.name}", curve) if len(curve) else None


def _find_parameter(case: Case, name: str) -> ParameterHistory | None:
    table = case.run.parameters
    for key in (name, f"{name}.weight"):
        if key in table:
            return table[key]
    return next((item for item in table.values() if item.module_name == name), None)
