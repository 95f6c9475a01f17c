"""Losses that jump far above their neighbours and come back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.case import Case
from quark_core.analysis.curves import local_spread, spread, trailing_median
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory, AlertSeverity

__all__ = ["LossSpike"]

Floats = NDArray[np.float64]

_DEVIATIONS = 10.0
_WINDOW = 30
_LEAST_POINTS = 20
_LEAST_SPIKES = 2
_LASTING = 3
_SHARE = 0.5  # of all that the run had won


class LossSpike:
    """Fires for losses that stand far out of the noise before them and undo half of the progress.

    One point that comes back at once is told as info: a bad batch. Two or
    more, or one that lasts, are a warning.
    """

    rule_id = "loss_spike"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        loss = case.train_loss
        if loss is None or len(loss.finite) < _LEAST_POINTS:
            return Verdict(
                reason=f"it needs {_LEAST_POINTS} points of the training loss",
                missing=("train/loss",),
            )
        curve = loss.finite
        values = curve.value
        base = trailing_median(values, _WINDOW)
        distance = values - base
        residual = np.nan_to_num(distance)
        noise = np.maximum(local_spread(residual, _WINDOW), 0.25 * spread(residual))
        progress = case.outcome.train
        won = max(progress.fall, 0.0) if progress is not None else 0.0
        level = np.abs(base)
        limit = np.maximum(_DEVIATIONS * noise, np.maximum(_SHARE * won, 0.05 * level))
        with np.errstate(invalid="ignore"):
            high = distance > limit
        high[:8] = False
        groups = _group(high)
        # Noise with heavy tails throws single points, but none beyond where the loss began.
        start = float(values[: max(3, len(values) // 10)].max())
        groups = [
            part
            for part in groups
            if _comes_back(values, base, part)
            and (
                int(high[part[0] : part[1] + 1].sum()) >= _LASTING
                or float(values[part[0] : part[1] + 1].max()) > start
            )
        ]
        ratio = float(np.nanmax(distance[8:] / np.maximum(limit[8:], 1e-300), initial=0.0))
        if not groups:
            return Verdict(reason="no loss stands out of the noise before it", observed=ratio,
                           threshold=1.0)  # fmt: skip
        lasting = max(up - low + 1 for low, up in groups)
        severity: AlertSeverity = "info"
        if len(groups) >= _LEAST_SPIKES or lasting >= 3:
            severity = "error" if len(groups) >= 5 else "warning"
        worst = max(groups, key=lambda part: float(values[part[0] : part[1] + 1].max()))
        peak = float(values[worst[0] : worst[1] + 1].max())
        first = int(curve.step[groups[0][0]])
        return Verdict(
            findings=(
                Finding(
                    culprit=loss.key,
                    severity=severity,
                    title="The loss spikes" if len(groups) == 1 else "The loss spikes repeatedly",
                    fact=f"{loss.key} jumped "
                    + ("once, to " if len(groups) == 1 else f"{len(groups)} times, at most to ")
                    + f"{format_number(peak)} from {format_number(float(base[worst[0]]))} at "
                    f"step {int(curve.step[worst[0]])}.",
                    inference="Single batches undo what was learned.",
                    suggested_check="Look at those batches; clip the gradient's norm, lower the "
                    "rate, look at the optimizer's epsilon and second moment.",
                    evidence=tuple(
                        observe("metric", loss.key, "far above the points before it",
                                float(values[low : up + 1].max()), float(base[low] + limit[low]),
                                int(curve.step[low]), int(curve.step[up]))
                        for low, up in groups[:6]
                    ),
                    step=first,
                    step_end=int(curve.step[groups[-1][1]]),
                ),
            ),
            observed=ratio,
            threshold=1.0,
        )  # fmt: skip


def _comes_back(values: Floats, base: Floats, part: tuple[int, int]) -> bool:
    """Whether a rise is over soon: one that stays is a change, and one at the end is unknown."""
    low, up = part
    length = up - low + 1
    after = values[up + 1 : up + 1 + max(8, length)]
    if len(after) < 3 or length > max(5, len(values) // 8):
        return False
    peak = float(values[low : up + 1].max())
    return float(np.median(after)) <= float(base[low]) + 0.35 * (peak - float(base[low]))


def _group(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of true values, those with up to two others between as one."""
    out: list[tuple[int, int]] = []
    for index in np.flatnonzero(mask).tolist():
        if out and index - out[-1][1] <= 3:
            out[-1] = (out[-1][0], index)
        else:
            out.append((index, index))
    return out
