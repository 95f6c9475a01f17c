"""A loss that goes up and down from step to step instead of falling."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["Oscillation"]

_LEAST_POINTS = 60
_CORRELATION = -0.6
_AMPLITUDE = 0.1


class Oscillation:
    """Informs where successive losses of the last half lie on opposite sides of their trend.

    Noise of batches has no memory; steps that jump over the minimum give
    differences to the trend that change their sign each time.
    """

    rule_id = "oscillation"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        loss, progress = case.train_loss, case.outcome.train
        if loss is None or progress is None or progress.points < _LEAST_POINTS:
            return Verdict(
                reason=f"it needs {_LEAST_POINTS} points of the training loss",
                missing=("train/loss",),
            )
        curve = loss.merged
        half = curve.take(slice(len(curve) // 2, None))
        values = half.value[-4000:]
        trend = np.convolve(np.pad(values, 2, "edge"), np.ones(5) / 5, "valid")
        rest = values - trend
        spread = float(np.sum(rest**2))
        correlation = float(np.sum(rest[1:] * rest[:-1]) / spread) if spread > 0 else 0.0
        # Taking off the mean of five points correlates neighbours by itself, to about -0.2.
        amplitude = float(np.std(rest)) / max(abs(float(np.median(values))), progress.fall, 1e-300)
        if correlation > _CORRELATION or amplitude < _AMPLITUDE:
            return Verdict(
                reason="the loss does not swing around its trend",
                observed=-correlation,
                threshold=-_CORRELATION,
            )
        first = int(half.step[0])
        finding = Finding(
            culprit=loss.key,
            severity="info",
            title="The loss oscillates",
            fact=f"From step {first} on {loss.key} swings around its trend from point to point, by "
            f"{format_number(amplitude)} of its level (correlation of neighbours "
            f"{correlation:.2f}).",
            inference="Steps jump over the minimum and back.",
            suggested_check="Lower the rate or the momentum.",
            evidence=(
                observe("metric", loss.key, "correlation of neighbouring points", correlation,
                        _CORRELATION, first, int(half.step[-1])),
            ),
            step=first,
            confidence=0.7,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=-correlation, threshold=-_CORRELATION)
