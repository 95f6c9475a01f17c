"""Whether a training that goes on is broken: what it lost, and what others like it had by then.

A search gives the time of a trial that is broken to another one, so that the question is harder
than that of an alert: what is stopped never shows that it would have come round. So only three
things count, each over a stretch and by more than the noise: a loss that is no number any more, a
loss that has exploded and does not come down, and nothing learned at a time when every other
training of the sweep that learned had learned long since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.curves import Curve
from quark_core.analysis.metric_roles import is_player_loss
from quark_core.analysis.observations import format_number
from quark_core.analysis.outcome import Progress, measure_progress, negate
from quark_core.records.names import decode_name

__all__ = [
    "Breakage",
    "Peer",
    "Hopeless",
    "find_learning_step",
    "judge_hopeless",
    "list_judged_curves",
    "make_peer",
]

Breakage = Literal["non_finite", "exploded", "nothing_learned"]

_LEAST_NON_FINITE = 3  # points in a row at the end: one batch may hold anything
_LEAST_EXPLODED = 8  # points since the loss has left its start
_EXPLODED_PART = 5  # a fifth of the run, at its end, is beyond the limit
_FAR_UP = 3.0  # times the first value
_COMING_DOWN = 0.9  # of its level a half ago: it is on its way back
_SIGNIFICANT = 4.0  # standard errors
_LEAST_GAIN = 0.02  # of the start
_LEAST_POINTS = 8
_LEAST_EPOCHS = 4
_LEAST_PEERS = 3
_LEARNED_PART = 0.2  # of its fall: there a training has begun to learn
_PATIENCE = 2.0  # times the step at which the latest of the others had begun
_LEAST_PART = 0.2  # of the length of the others


@dataclass(frozen=True, slots=True)
class Peer:
    """What another training of the same sweep is to one that goes on.

    Attributes:
        learned_at: The step at which it had begun to learn.
        ended_at: Its last step.
        start, final: Level of the metric at its start and its end.
    """

    learned_at: int
    ended_at: int
    start: float
    final: float


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Why a training is broken.

    Attributes:
        breakage: In which way.
        metric: Key of the metric that shows it.
        step: Since when, or, where nothing was learned, at which step that was enough.
        reason: The same in a sentence, with the figures.
    """

    breakage: Breakage
    metric: str
    step: int
    reason: str


FindPeers = Callable[[str], Sequence[Peer]]
"""Finds the trainings of a sweep that have ended and learned, by the key of a metric."""


def judge_hopeless(case: Case, find_peers: FindPeers) -> Hopeless | None:
    """Whether the run of a case is broken as far as it has come; None where it may get on.

    Args:
        case: The run.
        find_peers: Asked only where nothing of the run has got better.
    """
    loss, rewarded = case.train_loss or case.validation_loss, case.outcome.rewarded
    with np.errstate(all="ignore"):
        if loss is not None:
            found = _find_non_finite(loss)
            if found is None and not rewarded and not is_player_loss(loss.key):
                found = _find_explosion(loss)
            if found is not None:
                return found
        return None if rewarded else _find_nothing_learned(case, find_peers)


def make_peer(curve: Curve, mode: str) -> Peer | None:
    """What a training that has ended is to others by one metric; None where it did not learn."""
    downwards = curve if mode == "min" else negate(curve)
    learned_at = find_learning_step(downwards)
    progress = measure_progress(downwards)
    if learned_at is None or progress is None or not len(curve):
        return None
    sign = 1.0 if mode == "min" else -1.0
    ended_at = int(curve.step[-1])
    return Peer(learned_at, ended_at, sign * progress.start, sign * progress.final)


def find_learning_step(curve: Curve) -> int | None:
    """The step at which a curve that should fall had made a fifth of its fall; None of none.

    By its smoothed values, and only where it ended with a gain beyond its noise.
    """
    progress = measure_progress(curve)
    if progress is None or _is_stuck(progress):
        return None
    limit = progress.start - _LEARNED_PART * progress.fall
    below = np.flatnonzero(progress.smoothed.value <= limit)
    return int(progress.smoothed.step[below[0]]) if len(below) else None


def _find_non_finite(loss: Curve) -> Hopeless | None:
    finite = np.flatnonzero(np.isfinite(loss.value))
    first = int(finite[-1]) + 1 if len(finite) else 0
    if len(loss) - first < _LEAST_NON_FINITE:
        return None
    step, value = int(loss.step[first]), format_number(float(loss.value[-1]))
    return Hopeless(
        "non_finite", loss.key, step,
        f"{decode_name(loss.key)} is {value} since {loss.unit} {step}",
    )  # fmt: skip


def _find_explosion(loss: Curve) -> Hopeless | None:
    """A loss that is far above its first value for a fifth of the run, and stays up there."""
    progress = measure_progress(loss)
    if progress is None or not progress.has_blown_up:
        return None
    values, steps = progress.values.value, progress.values.step
    high = values > _FAR_UP * progress.first
    lasting = int(np.argmin(high[::-1])) if not bool(high.all()) else len(high)
    if lasting < max(_LEAST_EXPLODED, len(values) // _EXPLODED_PART):
        return None
    half = lasting // 2
    before, after = np.median(values[-lasting:-half]), np.median(values[-half:])
    if after < _COMING_DOWN * before:
        return None
    since = int(steps[-lasting])
    return Hopeless(
        "exploded", loss.key, since,
        f"{decode_name(loss.key)} rose from {format_number(progress.first)} to "
        f"{format_number(float(after))} and stays there since {loss.unit} {since}",
    )  # fmt: skip


def _find_nothing_learned(case: Case, find_peers: FindPeers) -> Hopeless | None:
    """Nothing has got better, at a time when all who learned had begun to long since."""
    judged = [(curve, mode) for curve, mode in list_judged_curves(case)]
    if not any(_is_long_enough(curve) for curve, _ in judged):
        return None
    if not all(_has_nothing(curve, mode) for curve, mode in judged):
        return None
    # The one with the most points says the most.
    for curve, mode in sorted(judged, key=lambda each: -len(each[0])):
        peers = find_peers(curve.key) if _is_long_enough(curve) else ()
        if len(peers) >= _LEAST_PEERS:
            return _hold_against(curve, mode, peers)
    return None


def _is_long_enough(curve: Curve) -> bool:
    return len(curve.merged) >= (_LEAST_EPOCHS if curve.unit == "epoch" else _LEAST_POINTS)


def _hold_against(curve: Curve, mode: str, peers: Sequence[Peer]) -> Hopeless | None:
    latest = max(peer.learned_at for peer in peers)
    length = float(np.median([peer.ended_at for peer in peers]))
    step = int(curve.merged.step[-1])
    progress = measure_progress(curve if mode == "min" else negate(curve))
    if progress is None or step < max(_PATIENCE * latest, _LEAST_PART * length):
        return None
    sign = 1.0 if mode == "min" else -1.0
    return Hopeless(
        "nothing_learned", curve.key, step,
        f"{decode_name(curve.key)} is {format_number(sign * progress.final)} at {curve.unit} "
        f"{step} and began at {format_number(sign * progress.start)}: nothing is learned, while "
        f"the {len(peers)} other trials that learned had begun to by {curve.unit} {latest}",
    )  # fmt: skip


def list_judged_curves(case: Case) -> Iterable[tuple[Curve, Literal["min", "max"]]]:
    """Every curve that says whether something is learned, with the way in which it is better."""
    seen = set()
    losses = (case.train_loss, case.validation_loss)
    scores = (case.train_accuracy, case.validation_accuracy, *case.scores)
    named = case.objective
    for curve, mode in (
        *((curve, "min") for curve in losses),
        *((curve, "max") for curve in scores),
        *(((named.curve, named.mode),) if named is not None else ()),
    ):
        if curve is not None and len(curve.finite) and curve.key not in seen:
            seen.add(curve.key)
            yield curve, mode  # type: ignore[misc]


def _has_nothing(curve: Curve, mode: str) -> bool:
    progress = measure_progress(curve if mode == "min" else negate(curve))
    return progress is None or _is_stuck(progress)


def _is_stuck(progress: Progress) -> bool:
    """Whether nothing of what a curve has won is left, or it has won nothing beyond its noise."""
    scale = abs(progress.start)
    if min(progress.start, progress.best) <= 0:
        scale = float(np.ptp(progress.smoothed.value))
    few = max(_SIGNIFICANT * progress.error, _LEAST_GAIN * scale)
    if progress.gain > few:
        return False
    # What falls slowly all the time may be told from its noise by all of its points.
    return not progress.drift > _SIGNIFICANT * progress.drift_error > 0.0
