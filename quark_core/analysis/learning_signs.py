"""Signs of learning beside the training loss: accuracies, rewards, validations, other players."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.metric_roles import is_player_loss
from quark_core.analysis.outcome import measure_progress, negate

__all__ = ["improves_otherwise", "knows_something"]

_RELATIVE = 0.02
_FALLS = 0.06
_CREEPS = 3e-3  # of a validation loss: a little is still a fall


def knows_something(case: Case, start: float) -> bool:
    """Whether the accuracy is twice that of guesses with this cross-entropy, exp(-loss)."""
    curve = case.train_accuracy or case.validation_accuracy
    if curve is None or not len(curve.finite):
        return False
    level = float(np.median(curve.finite.value[:20]))
    share = level / 100.0 if level > 1.5 else level
    return share > 2.0 * float(np.exp(-min(start, 50.0))) + 0.02 and share > 0.2


def improves_otherwise(case: Case) -> bool:
    """Whether something that is no loss gets better: the training accuracy, or a reward."""
    if case.train_accuracy is not None:
        progress = measure_progress(negate(case.train_accuracy))
        return progress is not None and progress.has_fallen
    if case.outcome.rewarded or _has_other_loss_that_falls(case):
        return True
    accuracy = case.validation_accuracy
    if accuracy is None:
        # With little left to win the training's noise hides what the validation shows.
        validation = case.outcome.validation
        if validation is None:
            return False
        if validation.has_fallen and validation.relative_fall > _RELATIVE:
            return True
        return validation.drift > max(2.0 * validation.drift_error, _CREEPS * validation.start)
    progress = measure_progress(negate(accuracy))
    return progress is not None and progress.has_fallen and progress.fall > 0.2


def _has_other_loss_that_falls(case: Case) -> bool:
    """Whether one of several losses falls: of two players, or of several tasks."""
    known = [curve.key for curve in (case.train_loss, case.validation_loss) if curve is not None]
    for key, curve in case.run.metrics.items():
        if "loss" not in key.lower() or key in known:
            continue
        # Two players that are equally good have losses that stand still.
        if is_player_loss(key):
            return True
        progress = measure_progress(curve)
        if progress is not None and progress.has_fallen and progress.relative_fall > _FALLS:
            return True
    return False
