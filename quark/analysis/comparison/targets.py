"""When runs reached a target, with runs that never did kept as what they are: censored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quark.analysis.comparison.config import MetricTargetSpec
from quark.analysis.comparison.results import TargetDiff, TargetOutcome
from quark.analysis.comparison.statistics import permute_sides
from quark.analysis.curves import Curve

_TESTED_RUNS = 3


@dataclass(frozen=True, slots=True)
class Reach:
    """When one run reached a target.

    Attributes:
        at: The step, or the last step that the run has where it did not.
        reached: Whether it did.
        confirmed: Whether it held for the points that were asked for.
    """

    at: int
    reached: bool
    confirmed: bool

    def is_before(self, other: Reach) -> bool:
        """Whether this run certainly reached the target before the other one."""
        if not self.reached:
            return False
        return self.at < other.at if other.reached else self.at <= other.at


def find_reach(curve: Curve, target: MetricTargetSpec, persistence: int) -> Reach:
    """The first of `persistence` points in a row that meet the target.

    Where the curve ends sooner, all points from there on must meet it.
    """
    above = target.direction == "at_least"
    with np.errstate(invalid="ignore"):
        met = curve.value >= target.target_value if above else curve.value <= target.target_value
    sums = np.concatenate([[0], np.cumsum(met)])
    if len(met) >= persistence:
        held = np.flatnonzero(sums[persistence:] - sums[:-persistence] == persistence)
        if len(held):
            return Reach(int(curve.step[held[0]]), True, True)
    failed = np.flatnonzero(~met)
    start = int(failed[-1]) + 1 if len(failed) else 0
    if start < len(met):
        return Reach(int(curve.step[start]), True, False)
    return Reach(int(curve.step[-1]), False, False)


def compare_targets(
    primary: Sequence[Curve],
    reference: Sequence[Curve],
    target: MetricTargetSpec,
    persistence: int,
    error_rate: float,
) -> TargetDiff:
    """The time to a target on both sides, over all points that each run has."""
    sides = [
        [find_reach(curve, target, persistence) for curve in curves if len(curve)]
        for curves in (primary, reference)
    ]
    unit = next((curve.unit for curve in (*primary, *reference) if len(curve)), "step")
    outcomes = [_sum_up(reaches, unit) for reaches in sides]
    one, two = (outcome.step for outcome in outcomes)
    difference = None if one is None or two is None else one - two
    p_value, earlier = None, None
    if min(map(len, sides)) >= _TESTED_RUNS:
        scores = _score(sides[0], sides[1])
        p_value = permute_sides(*scores)
        lead = float(scores[0].mean() - scores[1].mean())
        if p_value <= error_rate and lead:
            earlier = "primary" if lead > 0 else "reference"
    elif len(sides[0]) == len(sides[1]) == 1:
        earlier = _order(sides[0][0], sides[1][0])
    summary = f"primary: {outcomes[0].summary}; reference: {outcomes[1].summary}"
    return TargetDiff(
        float(target.target_value),
        target.direction,
        outcomes[0],
        outcomes[1],
        difference,
        earlier,
        p_value,
        summary,
    )


def _order(primary: Reach, reference: Reach) -> str | None:
    if primary.is_before(reference):
        return "primary"
    if reference.is_before(primary):
        return "reference"
    return "same" if primary.reached and reference.reached else None


def _sum_up(reaches: Sequence[Reach], unit: str) -> TargetOutcome:
    count, reached = len(reaches), sum(reach.reached for reach in reaches)
    censored = [reach.at for reach in reaches if not reach.reached]
    step = _find_median(reaches)
    lowest = min(censored, default=None)
    if not count:
        words = "no points"
    elif count == 1:
        at = f"by {unit} {reaches[0].at}"
        words = f"reached at {unit} {reaches[0].at}" if reached else f"not reached {at}"
        if reached and not reaches[0].confirmed:
            words += " (held to the end, which came soon after)"
    else:
        words = f"reached by {reached} of {count} runs"
        if step is not None:
            words += f", by half of them at {unit} {step:g}"
        if lowest is not None:
            words += f"; not reached by {unit} {lowest} at the soonest"
    confirmed = any(r.reached for r in reaches) and all(r.confirmed for r in reaches if r.reached)
    return TargetOutcome(step, lowest, reached, count, confirmed, words)


def _find_median(reaches: Sequence[Reach]) -> float | None:
    """The step by which half of the runs reached it (Kaplan and Meier 1958), or None."""
    share = 1.0
    for at in sorted({reach.at for reach in reaches if reach.reached}):
        at_risk = sum(reach.at >= at for reach in reaches)
        share *= 1.0 - sum(reach.reached and reach.at == at for reach in reaches) / at_risk
        if share <= 0.5 + 1e-12:
            return float(at)
    return None


def _score(primary: Sequence[Reach], reference: Sequence[Reach]) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]
]:  # fmt: skip
    """Of each run, how many it certainly beat less how many beat it (Gehan 1965)."""
    everyone = [*primary, *reference]
    scores = np.array(
        [
            float(sum(own.is_before(other) - other.is_before(own) for other in everyone))
            for own in everyone
        ]
    )
    return scores[: len(primary)], scores[len(primary) :]
