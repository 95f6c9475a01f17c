"""One metric of a run as a curve: every point, or fewer that stand for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quark_core.errors import SchemaValidationError
from quark_core.records.query import check_index

if TYPE_CHECKING:
    from numpy.typing import NDArray


_RANK_POINTS = 1_024


ENTRY_ARRAYS = (
    "step",
    "epoch",
    "time_us",
    "low",
    "high",
    "mean",
    "last",
    "low_step",
    "high_step",
    "count",
    "non_finite",
)
"""What a `Series` has of each of its entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Metric as a curve: NumPy arrays of one length.

    Each entry summarizes `count` consecutive points. If `exact` is True, each entry is one point,
    and `low`, `high`, `mean` and `last` are its value. A spike of one point is visible in `low` or
    `high`, even in a short curve.

    Entries of one rank are in order of storage. With several ranks, entries are sorted by attempt,
    then by step (or epoch), and combine the points of all ranks.

    Attributes:
        key: Stored key of the metric.
        step: Step of the first point of each entry, or -1.
        epoch: Epoch of the first point of each entry, or -1.
        time_us: Time of the first point of each entry, in microseconds since 1970.
        low, high, mean: Minimum, maximum and mean of the finite values, or NaN.
        last: Last value of each entry, finite or not.
        low_step, high_step: Steps of the minimum and the maximum, or -1.
        count: Number of points of each entry.
        non_finite: Number of points that are NaN or infinite.
        exact: Whether each entry is one point.
        ranks: Ranks of the points, sorted.
    """

    key: str
    step: NDArray[Any]
    epoch: NDArray[Any]
    time_us: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    mean: NDArray[Any]
    last: NDArray[Any]
    low_step: NDArray[Any]
    high_step: NDArray[Any]
    count: NDArray[Any]
    non_finite: NDArray[Any]
    exact: bool
    ranks: tuple[int, ...] = ()

    @property
    def points(self) -> int:
        """Total number of points."""
        return int(self.count.sum())

    def __len__(self) -> int:
        return len(self.step)


def check_max_points(max_points: object) -> int | None:
    """Return the bound of a series as a plain int; None, which is no bound, stays None.

    Raises:
        SchemaValidationError: Not a positive integer.
    """
    refusal = "max_points must be a positive integer, or None for every point"
    if type(max_points) is int and max_points <= 0:
        raise SchemaValidationError(refusal)
    try:
        bound = check_index(max_points, "max_points")
    except SchemaValidationError as error:
        raise error if type(max_points) is int else SchemaValidationError(refusal) from None
    if bound is not None and bound < 1:
        raise SchemaValidationError(refusal)
    return bound


def reduce_points(
    key: str,
    step: NDArray[Any],
    epoch: NDArray[Any],
    time_us: NDArray[Any],
    value: NDArray[Any],
    max_points: int | None = None,
) -> Series:
    """Reduce the points of one metric to at most `max_points` entries.

    The entries stand for equal numbers of points (to within one) that follow
    each other. Of equal extremes the first one gives the step.

    Args:
        key: The metric's stored key.
        step, epoch: int64 in persistence order, -1 where there is none.
        time_us: int64, microseconds since the epoch.
        value: float64; what is not finite is counted and in no extreme.
        max_points: The bound, positive; None keeps every point.
    """
    import numpy as np

    points = len(value)
    finite = np.isfinite(value)
    if max_points is None or points <= max_points:
        shown = np.where(finite, value, np.nan)
        its_step = np.where(finite, step, -1)
        return Series(
            key=key,
            step=step,
            epoch=epoch,
            time_us=time_us,
            low=shown,
            high=shown,
            mean=shown,
            last=value,
            low_step=its_step,
            high_step=its_step,
            count=np.ones(points, dtype=np.int64),
            non_finite=(~finite).astype(np.int64),
            exact=True,
        )
    edges = np.arange(max_points + 1, dtype=np.int64) * points // max_points
    starts, count = edges[:-1], np.diff(edges)
    finite_count = np.add.reduceat(finite.astype(np.int64), starts)
    low = np.minimum.reduceat(np.where(finite, value, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, value, -np.inf), starts)
    return Series(
        key=key,
        step=step[starts],
        epoch=epoch[starts],
        time_us=time_us[starts],
        low=np.where(finite_count, low, np.nan),
        high=np.where(finite_count, high, np.nan),
        mean=_average(np.where(finite, value, 0.0), starts, finite_count, low, high),
        last=value[edges[1:] - 1],
        low_step=_find_steps(step, value == np.repeat(low, count), edges, finite),
        high_step=_find_steps(step, value == np.repeat(high, count), edges, finite),
        count=count,
        non_finite=count - finite_count,
        exact=False,
    )


def choose_rank_points(max_points: int | None) -> int | None:
    """How many entries of each rank make a curve across ranks of at most `max_points`.

    Ranks that keep no common step have their entries in different places: finer ones
    come together at nearly the same steps.
    """
    return None if max_points is None else max(max_points, _RANK_POINTS)


def merge_ranks(
    key: str, attempts: Sequence[Sequence[Series]], max_points: int | None = None
) -> Series:
    """One curve across ranks, out of a curve of each rank in each attempt.

    Args:
        key: The metric's stored key.
        attempts: For each attempt, in order, the curves of its ranks, in
            order; each says its rank, and has at least one entry, and at most
            as many as `choose_rank_points` says.
        max_points: The bound on entries, positive; None for one at each step.
    """
    import numpy as np

    every = [series for ranks in attempts for series in ranks]
    attempt = np.repeat(
        [place for place, ranks in enumerate(attempts) for _ in ranks],
        [len(series) for series in every],
    )
    joined = _take(every, slice(None))
    epoch = np.where(joined["step"] < 0, joined["epoch"], 0)
    order = np.lexsort((epoch, joined["step"], attempt))
    joined = _take(every, order)
    attempt, epoch = attempt[order], epoch[order]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = np.diff(attempt) != 0
    begins[1:] |= (np.diff(joined["step"]) != 0) | (np.diff(epoch) != 0)
    starts = np.flatnonzero(begins)
    if max_points is not None and len(starts) > max_points:
        starts = starts[np.arange(max_points, dtype=np.int64) * len(starts) // max_points]
    ranks = tuple(sorted({rank for series in every for rank in series.ranks}))
    sorted_entries = Series(key=key, exact=False, **joined)
    return replace(group_entries(key, sorted_entries, starts), ranks=ranks)


def join_series(parts: Sequence[Series], max_points: int | None = None) -> Series:
    """One curve of several of one metric, each of which follows the one before.

    Args:
        parts: At least one, in order; without a bound, or with at most `max_points` entries each.
        max_points: The bound on entries, positive; None keeps every entry.
    """
    import numpy as np

    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return some[0] if some else parts[-1]
    key = some[0].key
    exact = all(part.exact for part in some)
    joined = Series(key=key, exact=exact, **_take(some, slice(None)))
    if max_points is not None and len(joined) > max_points:
        points = np.cumsum(joined.count)
        edges = np.arange(max_points, dtype=np.int64) * int(points[-1]) // max_points
        starts = np.unique(np.searchsorted(points, edges, side="right"))
        joined = group_entries(key, joined, starts)
    ranks = tuple(sorted({rank for part in some for rank in part.ranks}))
    return replace(joined, ranks=ranks)


def group_entries(key: str, entries: Any, starts: NDArray[Any]) -> Series:
    """Fewer entries, each of which stands for all that the ones from a start to the next do.

    Args:
        key: The metric's stored key.
        entries: At least one, as arrays of a `Series`' names.
        starts: int64, rising from 0; of equal extremes the first one gives the step.
    """
    import numpy as np

    edges = np.append(starts, len(entries.count))
    sizes = np.diff(edges)
    points = np.add.reduceat(entries.count, starts)
    non_finite = np.add.reduceat(entries.non_finite, starts)
    finite = entries.count - entries.non_finite
    low, low_step = _reduce(np.minimum, entries.low, np.inf, entries.low_step, starts, sizes)
    high, high_step = _reduce(np.maximum, entries.high, -np.inf, entries.high_step, starts, sizes)
    weights = np.maximum(points - non_finite, 1)
    some = finite > 0
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduceat(np.where(some, entries.mean * finite, 0.0), starts) / weights
        if not np.isfinite(mean).all():
            # The sum of large values overflows where their mean does not.
            shares = np.where(some, entries.mean * (finite / np.repeat(weights, sizes)), 0.0)
            mean = np.where(np.isfinite(mean), mean, np.add.reduceat(shares, starts))
    return Series(
        key=key,
        step=entries.step[starts],
        epoch=entries.epoch[starts],
        time_us=entries.time_us[starts],
        low=low,
        high=high,
        # Rounding can carry the mean of equal values past them.
        mean=np.where(points > non_finite, np.clip(mean, low, high), np.nan),
        last=entries.last[edges[1:] - 1],
        low_step=low_step,
        high_step=high_step,
        count=points,
        non_finite=non_finite,
        exact=False,
    )


def _take(parts: Sequence[Series], rows: Any) -> dict[str, Any]:
    """Rows of several curves, one after the other, by the name of the column."""
    import numpy as np

    return {
        name: np.concatenate([getattr(part, name) for part in parts])[rows] for name in ENTRY_ARRAYS
    }


def _reduce(
    function: Any,
    values: NDArray[Any],
    neutral: float,
    steps: NDArray[Any],
    starts: NDArray[Any],
    sizes: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Extreme of each group, and the step of the first entry that has it."""
    import numpy as np

    missing = np.isnan(values)
    filled = np.where(missing, neutral, values) if missing.any() else values
    extremes = function.reduceat(filled, starts)
    hits = np.flatnonzero((filled == np.repeat(extremes, sizes)) & ~missing)
    groups = np.repeat(np.arange(len(starts)), sizes)[hits]
    its_step = np.full(len(starts), -1, dtype=np.int64)
    # Written backwards, the first hit of each group stays.
    its_step[groups[::-1]] = steps[hits[::-1]]
    known = np.zeros(len(starts), dtype=np.bool_)
    known[groups] = True
    return np.where(known, extremes, np.nan), its_step


def _average(
    filled: NDArray[Any],
    starts: NDArray[Any],
    finite_count: NDArray[Any],
    low: NDArray[Any],
    high: NDArray[Any],
) -> NDArray[Any]:
    """Means of the finite values (0 stands for the others); NaN where there is none."""
    import numpy as np

    divisor = np.maximum(finite_count, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduceat(filled, starts) / divisor
        if not np.isfinite(mean).all():
            # The sum of large values overflows where their mean does not.
            count = np.diff(np.append(starts, len(filled)))
            parts = np.add.reduceat(filled / np.repeat(divisor, count), starts)
            mean = np.where(np.isfinite(mean), mean, parts)
    # Rounding can carry the mean of equal values past them.
    return np.where(finite_count, np.minimum(np.maximum(mean, low), high), np.nan)


def _find_steps(
    step: NDArray[Any], found: NDArray[Any], edges: NDArray[Any], finite: NDArray[Any]
) -> NDArray[Any]:
    """Step of the first found point between two edges; -1 where there is none."""
    import numpy as np

    places = np.flatnonzero(found & finite)
    if not len(places):
        return np.full(len(edges) - 1, -1, dtype=np.int64)
    first = places[np.minimum(np.searchsorted(places, edges[:-1]), len(places) - 1)]
    inside = (first >= edges[:-1]) & (first < edges[1:])
    return np.where(inside, step[first], -1)
