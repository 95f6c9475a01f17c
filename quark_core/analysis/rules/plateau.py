"""A training that learns nothing at all."""

from __future__ import annotations

from quark_core.analysis.case import Case
from quark_core.analysis.learning_signs import improves_otherwise, knows_something
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.outcome import Progress
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["Plateau"]

_LEAST_POINTS = 30
_RELATIVE = 0.02
_CERTAIN = 0.06
_LEAST_FLAT = 6


class Plateau:
    """Fires where no loss falls and no accuracy or reward rises over the whole run.

    A run that starts with little left to learn is none: a high accuracy
    acquits, and so does a loss whose gradient is small against its start.
    """

    rule_id = "plateau"
    category: AlertCategory = "optimization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        outcome = case.outcome
        progress = outcome.train or outcome.validation
        if progress is None or progress.points < _LEAST_POINTS:
            return Verdict(
                reason=f"it needs {_LEAST_POINTS} points of a loss", missing=("train/loss",)
            )
        fall = progress.start - min(progress.best, progress.final)
        significance = fall / progress.error if progress.error > 0 else float("inf") * (fall > 0)
        quiet = Verdict(
            reason="a loss falls, or an accuracy rises",
            observed=progress.relative_fall,
            threshold=_RELATIVE,
        )
        if outcome.non_finite_step is not None or improves_otherwise(case):
            return quiet
        if progress.has_fallen and progress.relative_fall > _RELATIVE:
            return quiet
        if outcome.train is None and outcome.other_progress:
            return quiet
        if outcome.accuracy is not None and outcome.accuracy >= 0.9:
            return quiet
        if progress.regression > 0.5 and progress.final - progress.best > 8 * progress.error:
            return quiet
        if not any(
            _is_flat(item) for item in (outcome.train, outcome.validation) if item is not None
        ):
            return Verdict(
                reason="the loss is too noisy to tell a plateau from a slow fall",
                observed=progress.relative_fall, threshold=_RELATIVE,
            )  # fmt: skip
        if knows_something(case, progress.start):
            return Verdict(
                reason="it starts with more right answers than an untrained model has at that loss",
                observed=progress.relative_fall, threshold=_RELATIVE,
            )  # fmt: skip
        if progress.final <= 0:
            return Verdict(
                reason="a loss that may be negative says nothing by its level alone",
                observed=progress.relative_fall, threshold=_RELATIVE,
            )  # fmt: skip
        last = int(progress.smoothed.step[-1])
        return Verdict(
            findings=(
                Finding(
                    culprit=progress.key,
                    severity="error" if progress.points >= 4 * _LEAST_POINTS else "warning",
                    title="Nothing is learned",
                    fact=f"{progress.key} went from {format_number(progress.start)} to "
                    f"{format_number(progress.final)} over {progress.points} points; its noise is "
                    f"{format_number(progress.noise)}.",
                    inference="The updates do not lower the loss: they are too small or too "
                    "large, lead nowhere, or there is nothing to learn from the data.",
                    suggested_check="Try to fit a single batch; look at the learning rate, the "
                    "labels, the inputs, and at which parameters the optimizer has.",
                    evidence=(
                        observe("metric", progress.key, "share by which it fell",
                                progress.relative_fall, _RELATIVE,
                                int(progress.smoothed.step[0]), last),
                    ),
                    step=int(progress.smoothed.step[0]),
                    step_end=last,
                    confidence=0.8,
                ),
            ),
            observed=min(significance, 1e6),
            threshold=4.0,
        )  # fmt: skip


def _is_flat(progress: Progress) -> bool:
    """Whether the noise is small enough to say that a curve does not fall."""
    doubt = abs(progress.drift) + 2.0 * progress.drift_error
    return progress.points >= _LEAST_FLAT and doubt <= _CERTAIN * abs(progress.start)
