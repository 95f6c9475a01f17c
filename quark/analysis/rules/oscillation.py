"""A loss that goes up and down from step to step instead of falling."""

from __future__ import annotations

import numpy as np

from quark.analysis.analysis_context import Case
from quark.analysis.curves import SMALLEST
from quark.analysis.observations import at_step, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_POINTS = 60
_MOST_POINTS = 4000  # the last ones: an oscillation is as fast as it is long
_TREND_POINTS = 5  # whose mean is the trend; taking it off correlates neighbours to about -0.2
_CORRELATION = -0.6
_AMPLITUDE = 0.1  # of the loss's level, or of what it has fallen
_CONFIDENCE = 0.7  # a schedule of two alternating batches swings as well


class Oscillation(BaseRule):
    """Informs where successive losses of the last half lie on opposite sides of their trend.

    Noise of batches has no memory; steps that jump over the minimum give
    differences to the trend that change their sign each time.
    """

    rule_id = "oscillation"
    category: AlertCategory = "optimization"
    needs = f"it needs {_LEAST_POINTS} points of the training loss"
    data = ("train/loss",)
    threshold = -_CORRELATION

    def judge(self, case: Case) -> Verdict | None:
        """Look for neighbouring points of the last half on opposite sides of their trend.

        Silent where they swing by less than a tenth of the loss, and where they
        are as independent as the noise of batches is.
        """
        loss, progress = case.train_loss, case.outcome.train
        if loss is None or progress is None or progress.points < _LEAST_POINTS:
            return None
        curve = loss.merged
        half = curve.take(slice(len(curve) // 2, None))
        values = half.value[-_MOST_POINTS:]
        kernel = np.ones(_TREND_POINTS) / _TREND_POINTS
        trend = np.convolve(np.pad(values, _TREND_POINTS // 2, "edge"), kernel, "valid")
        rest = values - trend
        spread = float(np.sum(rest**2))
        correlation = float(np.sum(rest[1:] * rest[:-1]) / spread) if spread > 0 else 0.0
        level = max(abs(float(np.median(values))), progress.fall, SMALLEST)
        amplitude = float(np.std(rest)) / level
        if correlation > _CORRELATION or amplitude < _AMPLITUDE:
            return self.stay_quiet("the loss does not swing around its trend", -correlation)
        first = int(half.step[0])
        finding = Finding(
            culprit=loss.key,
            severity="info",
            title="The loss oscillates",
            fact=say(
                "From step {first} on {key} swings around its trend from point to point: between "
                "{low} and {high}, with neighbours on opposite sides.",
                first=at_step(first), key=loss.key,
                low=case.measure_curve(loss.key, "lowest", first=first),
                high=case.measure_curve(loss.key, "highest", first=first),
            ),
            inference="Steps jump over the minimum and back.",
            suggested_check="Lower the rate or the momentum.",
            evidence=(
                observe("metric", loss.key, "correlation of neighbouring points", correlation,
                        _CORRELATION, first, int(half.step[-1])),
            ),
            step=first,
            confidence=_CONFIDENCE,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=-correlation, threshold=self.threshold)
