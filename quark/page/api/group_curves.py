"""Runs of one side as one curve: their mean, the lowest and the highest run, and how many.

A group is put together by itself, on its own places: what other groups there are changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.backends.curves import Curve

Axis = Literal["step", "epoch", "relative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurve:
    """One metric of one run, over one axis.

    Attributes:
        x: Places of the entries, ascending; each is there once.
        mean, low, high: float64, over the finite points of each entry; NaN where it has none.
        non_finite: Points of each entry that are not finite.
        points: How many points stand behind all entries.
        exact: Whether each entry is one point.
    """

    x: NDArray[Any]
    mean: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    non_finite: NDArray[Any]
    points: int
    exact: bool

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCurve:
    """One metric of a group.

    Attributes:
        x: Places, ascending.
        mean: Over the runs that have a value there; NaN where none has.
        low, high: The lowest and the highest run there; of one run those of its own points.
        count: How many runs have a value there.
        non_finite: Points of all runs that are not finite, at the place nearest below.
        points: How many points stand behind it.
        exact: Whether every run has exactly these places, and a point at each.
    """

    x: NDArray[Any]
    mean: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    count: NDArray[Any]
    non_finite: NDArray[Any]
    points: int
    exact: bool


def join_attempts(curves: Sequence[Curve], axis: Axis, start_us: int = 0) -> RunCurve | None:
    """The curves of a run's attempts as one, in the order of the axis; None without an entry.

    Args:
        curves: Of one metric of one run, across ranks.
        axis: `step` (epochs, where a curve has no steps), `epoch`, or `relative`: seconds
            since `start_us`.
        start_us: When the run began, microseconds since 1970.
    """
    import numpy as np

    if not curves:
        return None
    x = np.concatenate([_place(curve, axis, start_us) for curve in curves])
    mean, low, high, non_finite = (
        np.concatenate([getattr(curve, name) for curve in curves])
        for name in ("mean", "low", "high", "non_finite")
    )
    kept = np.flatnonzero(np.isfinite(x))
    if not len(kept):
        return None
    # Of several entries at one place the last one counts, as it does for readers of a run.
    order = kept[np.argsort(x[kept], kind="stable")]
    is_last = np.append(np.diff(x[order]) > 0, True)
    order = order[is_last]
    return RunCurve(
        x=x[order],
        mean=mean[order],
        low=low[order],
        high=high[order],
        non_finite=non_finite[order],
        points=sum(curve.points for curve in curves),
        exact=all(curve.exact for curve in curves),
    )


def _place(curve: Curve, axis: Axis, start_us: int) -> NDArray[Any]:
    import numpy as np

    if axis == "relative":
        seconds: NDArray[Any] = (curve.time_us - start_us) / 1e6
        return seconds
    by_epoch = axis == "epoch" or bool((curve.step < 0).all())
    places = curve.epoch if by_epoch else curve.step
    return np.where(places < 0, np.nan, places.astype(np.float64))


def merge_runs(runs: Sequence[RunCurve], entries: int) -> GroupCurve:
    """The curve of a group.

    Where the runs have a place in common it is taken as it is; between two places a run
    is taken to go straight, and before its first and after its last value it has none.

    Args:
        runs: One curve of each run, one or more.
        entries: At most so many places where the runs have none in common.
    """
    import numpy as np

    if len(runs) == 1:
        one = runs[0]
        return GroupCurve(
            x=one.x,
            mean=one.mean,
            low=one.low,
            high=one.high,
            count=np.isfinite(one.mean).astype(np.int32),
            non_finite=one.non_finite,
            points=one.points,
            exact=one.exact,
        )
    x, is_common = _choose_places(runs, entries)
    values = np.stack([_read_at(run, x, is_common=is_common) for run in runs])
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    non_finite = np.zeros(len(x), dtype=np.int64)
    for run in runs:
        bad = np.flatnonzero(run.non_finite)
        at = np.clip(np.searchsorted(x, run.x[bad], side="right") - 1, 0, None)
        np.add.at(non_finite, at, run.non_finite[bad])
    return GroupCurve(
        x=x,
        mean=np.where(count > 0, total / np.maximum(count, 1), np.nan),
        low=np.where(count > 0, np.where(known, values, np.inf).min(axis=0), np.nan),
        high=np.where(count > 0, np.where(known, values, -np.inf).max(axis=0), np.nan),
        count=count.astype(np.int32),
        non_finite=non_finite,
        points=sum(run.points for run in runs),
        exact=is_common and all(run.exact for run in runs),
    )


def _choose_places(runs: Sequence[RunCurve], entries: int) -> tuple[NDArray[Any], bool]:
    """Places for all runs, and whether each run has just these."""
    import numpy as np

    first = runs[0].x
    if all(len(run) == len(first) and np.array_equal(run.x, first) for run in runs[1:]):
        return first, True
    union = np.unique(np.concatenate([run.x for run in runs]))
    if len(union) <= entries:
        return union, False
    return np.linspace(union[0], union[-1], entries), False


def _read_at(run: RunCurve, x: NDArray[Any], *, is_common: bool) -> NDArray[Any]:
    import numpy as np

    if is_common:
        return run.mean
    known = np.flatnonzero(np.isfinite(run.mean))
    if not len(known):
        return np.full(len(x), np.nan)
    values: NDArray[Any] = np.interp(x, run.x[known], run.mean[known], left=np.nan, right=np.nan)
    return values
