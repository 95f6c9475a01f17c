"""Detection of broken running runs: their loss of progress, compared with similar runs.

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

from quark.analysis.analysis_context import Case, Progress, measure_progress, negate
from quark.analysis.curves import Curve
from quark.analysis.metric_roles import is_player_loss
from quark.analysis.observations import format_number
from quark_core.records.names import decode_name

Breakage = Literal["non_finite", "exploded", "nothing_learned"]

_LEAST_NON_FINITE = 3  # points in a row at the end: one batch may hold anything
_LEAST_EXPLODED = 100  # points in a row at the end: many a training finds its way back
_EXPLODED_PART = 4  # a quarter of the run, at its end, is beyond the limit
_FAR_UP = 3.0  # times the first value
_COMING_DOWN = 0.9  # of its level a half ago: it is on its way back
_LEAST_GAIN = 0.02  # of the start
_UNSEEN = 2.0  # standard errors by which a gain may be larger than it seems
_MOST_UNSEEN = 5.0  # times a gain that is next to nothing
_LITTLE_SHARE = 0.05  # of right answers: guesses move by so much
_LEAST_POINTS = 8
_LEAST_EPOCHS = 4
_LEAST_PEERS = 5
_BETTER_PART = 2  # of those that learned, the better half: only a late one of these counts
_PATIENCE = 2.0  # times the step at which the latest of these showed that it learns
_LEAST_PART = 0.25  # of the length of the others
_MOST_PREFIXES = 48


@dataclass(frozen=True, slots=True)
class Peer:
    """What another training of the same sweep is to one that goes on.

    Attributes:
        metric: Key of the metric by which it is compared.
        shown_at: The step from which on its curves showed that it learns.
        ended_at: Its last step.
        rank: How good it was in the end; lower is better.
    """

    metric: str
    shown_at: int
    ended_at: int
    rank: float


@dataclass(frozen=True, slots=True)
class StopDecision:
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


FindPeers = Callable[[], Sequence[Peer]]
"""Finds the trainings of a sweep that have ended and learned."""


def decide_stop(case: Case, find_peers: FindPeers) -> StopDecision | None:
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


def make_peer(case: Case) -> Peer | None:
    """What a training that has ended is to others; None where it did not learn."""
    with np.errstate(all="ignore"):
        judged = list(list_judged_curves(case))
        named = case.objective
        chosen = next((each for each in judged if named and each[0] is named.curve), None)
        chosen = chosen or (judged[0] if judged else None)
        if chosen is None or all(_has_nothing(curve, mode) for curve, mode in judged):
            return None
        curve, mode = chosen
        progress = measure_progress(curve if mode == "min" else negate(curve))
        last = max(int(each.step[-1]) for each, _ in judged)
        if progress is None:
            return None
        return Peer(curve.key, _find_shown(judged, last), last, progress.final)


def _find_shown(judged: Sequence[tuple[Curve, str]], last: int) -> int:
    """The first step at which the curves, as they were until then, show that it learns."""
    longest = max((curve for curve, _ in judged), key=len)
    count = min(_MOST_PREFIXES, len(longest))
    places = np.unique(np.geomspace(1, len(longest), count).astype(np.int64)) - 1
    for step in longest.step[places].tolist():
        known = [(curve.between(None, step), mode) for curve, mode in judged]
        if not any(_is_long_enough(curve) for curve, _ in known):
            continue
        if not all(_has_nothing(curve, mode) for curve, mode in known):
            return int(step)
    return last


def _find_non_finite(loss: Curve) -> StopDecision | None:
    finite = np.flatnonzero(np.isfinite(loss.value))
    first = int(finite[-1]) + 1 if len(finite) else 0
    if len(loss) - first < _LEAST_NON_FINITE:
        return None
    step, value = int(loss.step[first]), format_number(float(loss.value[-1]))
    return StopDecision(
        "non_finite", loss.key, step,
        f"{decode_name(loss.key)} is {value} since {loss.unit} {step}",
    )  # fmt: skip


def _find_explosion(loss: Curve) -> StopDecision | None:
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
    return StopDecision(
        "exploded", loss.key, since,
        f"{decode_name(loss.key)} rose from {format_number(progress.first)} to "
        f"{format_number(float(after))} and stays there since {loss.unit} {since}",
    )  # fmt: skip


def _find_nothing_learned(case: Case, find_peers: FindPeers) -> StopDecision | None:
    """Nothing has got better, at a time when all good ones had shown long since that they learn."""
    judged = list(list_judged_curves(case))
    if not any(_is_long_enough(curve) for curve, _ in judged):
        return None
    if not all(_has_nothing(curve, mode) for curve, mode in judged):
        return None
    keys = {curve.key for curve, _ in judged}
    peers = sorted((p for p in find_peers() if p.metric in keys), key=lambda peer: peer.rank)
    if len(peers) < _LEAST_PEERS:
        return None
    better = peers[: max(_LEAST_PEERS, -(-len(peers) // _BETTER_PART))]
    latest = max(peer.shown_at for peer in better)
    length = float(np.median([peer.ended_at for peer in peers]))
    step = max(int(curve.step[-1]) for curve, _ in judged)
    if step < max(_PATIENCE * latest, _LEAST_PART * length):
        return None
    curve, mode = max(judged, key=lambda each: len(each[0]))
    progress = measure_progress(curve if mode == "min" else negate(curve))
    if progress is None:
        return None
    sign = 1.0 if mode == "min" else -1.0
    return StopDecision(
        "nothing_learned", curve.key, step,
        f"{decode_name(curve.key)} is {format_number(sign * progress.final)} at {curve.unit} "
        f"{step} and began at {format_number(sign * progress.start)}: nothing is learned, and "
        f"the {len(better)} best of {len(peers)} other trials that learned had shown it by "
        f"{curve.unit} {latest}",
    )  # fmt: skip


def _is_long_enough(curve: Curve) -> bool:
    return len(curve.merged) >= (_LEAST_EPOCHS if curve.unit == "epoch" else _LEAST_POINTS)


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
            yield curve, mode


def _has_nothing(curve: Curve, mode: str) -> bool:
    """Whether nothing of what a curve has won is left, or it has won nothing.

    Where noise hides it, what seems to be won counts as won: nobody is stopped for his noise.
    """
    progress = measure_progress(curve if mode == "min" else negate(curve))
    if progress is None:
        return True
    few = _find_little(progress, is_share=mode == "max" and float(curve.finite.value.max()) <= 1.0)
    # What may be there, too, and the noise hides.
    most = max(
        progress.gain + _UNSEEN * progress.error, progress.drift + _UNSEEN * progress.drift_error
    )
    return max(progress.gain, progress.drift) <= few and most <= _MOST_UNSEEN * few


def _find_little(progress: Progress, *, is_share: bool) -> float:
    """How much of a gain is next to nothing."""
    if is_share:
        return _LITTLE_SHARE
    if min(progress.start, progress.best) > 0:
        return _LEAST_GAIN * progress.start
    return _LEAST_GAIN * float(np.ptp(progress.smoothed.value))
