"""Runs that did not complete, on either side: they are told first, and limit what is said."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from quark.analysis.comparison.results import MetricDiff, RunReference
from quark.analysis.run_end import say_end
from quark_core.runs.run_ids import shorten_run_id

_BROKEN_OFF = ("failed", "interrupted", "lost")


def tell_ends(*sides: tuple[str, RunReference], running: bool = False) -> tuple[str, ...]:
    """A sentence on each run that broke off: which one, at which step, and why.

    Args:
        sides: What each side is called, and its runs.
        running: Whether runs that go on are told as well.
    """
    states = (*_BROKEN_OFF, "running") if running else _BROKEN_OFF
    return tuple(
        f"{say_end(run, f'{name} ({run.name or shorten_run_id(run.run_id)})', run.last_step)}."
        for name, side in sides
        for run in side.members or (side,)
        if run.state in states
    )


def _is_broken_off(side: RunReference) -> bool:
    """Whether any run of a side has ended without completing."""
    return any(run.state in _BROKEN_OFF for run in side.members or (side,))


def may_say(verdict: str, primary: RunReference, reference: RunReference) -> bool:
    """Whether a verdict may be said: a side that broke off is worse, or nobody knows."""
    barred = {"equivalent"} if _is_broken_off(primary) or _is_broken_off(reference) else set()
    barred |= {"better"} if _is_broken_off(primary) else set()
    barred |= {"worse"} if _is_broken_off(reference) else set()
    return verdict not in barred


def limit_verdicts(
    metrics: Sequence[MetricDiff], primary: RunReference, reference: RunReference
) -> tuple[MetricDiff, ...]:
    """The metrics with `inconclusive` in place of what may not be said of runs that broke off."""
    ends = tell_ends(("the primary", primary), ("the reference", reference))
    told = " ".join(ends).rstrip(".")
    return tuple(
        replace(diff, verdict="inconclusive", reason=f"{told}; up to there: {diff.reason}")
        if diff.verdict is not None and not may_say(diff.verdict, primary, reference)
        else diff
        for diff in metrics
    )
