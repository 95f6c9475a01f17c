"""Curves of several metrics of one moment, by attempt and rank, and what came since then.

A curve is looked at through a window: a range of steps, epochs or times. What
came after the moment is asked for with its cursor, so that a curve and what is
added to it meet exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from quark_core.backends.series import (
    ENTRY_ARRAYS,
    Series,
    choose_rank_points,
    group_entries,
    reduce_points,
)
from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.names import check_key
from quark_core.records.query import check_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.records.columns import Columns

Axis = Literal["step", "epoch", "time_us"]
"""What a window may be a range of: columns of a metric."""

AXES: tuple[Axis, ...] = get_args(Axis)
"""All there are."""

_SINCE_START = "relative_us"
# As far as 64 bits reach.
_MOST_US = 2**63 - 1

EACH_RANK: Literal["each"] = "each"
"""Asks for a curve of each rank."""

RankChoice = Literal["each"] | tuple[int, ...] | None
"""One curve across all ranks (None), one of each, or one of each of these."""

Cursor = Mapping[str, int]
"""Up to where a run was read. A backend with `Capability.CHANGES` has for each writer the
number of its next batch; what other backends have is theirs. It is given back as it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A range of steps, epochs or times; its axis is also what curves are sorted by.

    Attributes:
        axis: One of `AXES`; times are microseconds since the epoch.
        low, high: Both inclusive; None leaves that side open. Within bounds of steps
            or epochs is no point that has none.
    """

    axis: Axis = "step"
    low: int | None = None
    high: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether every point is within."""
        return self.low is None and self.high is None

    @property
    def least(self) -> int | None:
        """The lowest value within: a point without a step or epoch has -1 there."""
        return 0 if self.low is None and self.high is not None and self._has_missing else self.low

    @property
    def _has_missing(self) -> bool:
        return self.axis != "time_us"

    def find_rows(self, values: NDArray[Any]) -> NDArray[Any] | None:
        """Which of these values of the axis are within, as a mask; None for all."""
        import numpy as np

        if self.is_open:
            return None
        inside = np.ones(len(values), dtype=np.bool_)
        if self.least is not None:
            inside &= values >= self.least
        if self.high is not None:
            inside &= values <= self.high
        return None if inside.all() else inside


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuery:
    """What curves are wanted; `build` checks it.

    Attributes:
        keys: Stored keys of metrics, each once; one that the run has not logged gives no curve.
        entries: At most so many of each curve: one for each pixel that there is. The low and
            high of each are those of its points. None gives every point.
        window: What part of them.
        since_start: Whether the window's bounds are times since the run began.
            `quark_core.runs.following` makes them times; no backend is asked so.
        ranks: None for a curve across all ranks that have logged the metric, "each" for a
            curve of each rank, or the ranks of which there shall be a curve.
        all_attempts: Also points that a later attempt, resumed from an earlier step, has
            hidden.
    """

    keys: tuple[str, ...]
    entries: int | None
    window: Window = Window()
    since_start: bool = False
    ranks: RankChoice = None
    all_attempts: bool = False

    @classmethod
    def build(
        cls,
        keys: Sequence[str],
        *,
        entries: int | None,
        axis: str = "step",
        low: int | None = None,
        high: int | None = None,
        ranks: Literal["each"] | Sequence[int] | None = None,
        all_attempts: bool = False,
    ) -> CurveQuery:
        """Check what is asked for.

        Args:
            keys, entries, ranks, all_attempts: As in the class.
            axis: What the window is a range of, and the curves are sorted by: "step", "epoch",
                "time_us" (microseconds since the epoch) or "relative_us" (since the run began).
            low, high: The window, both inclusive; None leaves that side open.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
        """
        check_choice(axis, "axis", (*AXES, _SINCE_START))
        window = _check_window("time_us" if axis == _SINCE_START else axis, low, high)
        return cls(
            keys=check_keys(keys),
            entries=_check_entries(entries),
            window=window,
            since_start=axis == _SINCE_START and not window.is_open,
            ranks=_check_ranks(ranks),
            all_attempts=bool(all_attempts),
        )

    def begin_at(self, began_us: int) -> CurveQuery:
        """The same with a window of times, where its bounds are since the run began."""
        if not self.since_start:
            return self
        low, high = (
            None if bound is None else min(began_us + bound, _MOST_US)
            for bound in (self.window.low, self.window.high)
        )
        return replace(self, window=replace(self.window, low=low, high=high), since_start=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Series):
    """A `Series` of one attempt, of one rank or across ranks, within a window.

    It is sorted by the window's axis; steps that go back within an attempt stand
    where they belong. Entries are points where the window holds no more points of one
    rank than were asked for (`exact`), and stand for about equally many points otherwise.
    No entry is of two attempts, and of two ranks only across ranks. An entry ends where the
    next one begins; where very many points go back, or across ranks that keep no common step,
    it may reach somewhat beyond, and `low_step` and `high_step` say how far.

    Attributes:
        attempt: Whose points these are.
        rank: Likewise; None across ranks, which `ranks` lists.
        non_finite_step: Step of the first point of each entry that is not finite; -1 where
            there is none, or it has no step.
    """

    attempt: int
    rank: int | None
    non_finite_step: NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSet:
    """Curves of one moment.

    Attributes:
        curves: By the order of the keys that were asked for, then attempt, then rank; none
            of what has no point in the window.
        cursor: What `read_changes` returns everything after that moment with.
    """

    curves: tuple[Curve, ...]
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeads:
    """How far a run has come.

    Attributes:
        cursor: What `read_changes` returns everything after this moment with.
        outputs: How many generations of outputs there are, which no cursor speaks of.
    """

    cursor: Cursor
    outputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanges:
    """What came into a run since a cursor.

    Attributes:
        cursor: To go on with.
        records: By kind, in persistence order; a kind of which nothing came is not there.
        more: Whether more has come, which the new cursor leads to.
        stale: Whether what was read before the cursor is not to be added to, but read anew:
            another attempt hides a part of it, or the cursor is not of this run as it is now.
            Nothing else is in here then but `outputs`.
        outputs: As in `RunHeads`.
    """

    cursor: Cursor
    records: Mapping[str, Columns] = field(default_factory=dict)
    more: bool = False
    stale: bool = False
    outputs: int = 0

    def __bool__(self) -> bool:
        """Whether anything came."""
        return bool(self.records) or self.more or self.stale


def _check_window(axis: Any, low: object, high: object) -> Window:
    window = Window(axis=axis, low=check_index(low, "low"), high=check_index(high, "high"))
    if window.low is not None and window.high is not None and window.low > window.high:
        raise SchemaValidationError(
            f"low must not be above high, got {window.low} and {window.high}"
        )
    return window


def _check_entries(entries: object) -> int | None:
    bound = check_index(entries, "entries")
    if bound == 0:
        raise SchemaValidationError("entries must be a positive integer, or None for every point")
    return bound


def check_keys(keys: object) -> tuple[str, ...]:
    """Return the metrics' stored keys, each once, in their order.

    Raises:
        SchemaValidationError: One of them is no name, or this is no sequence of them.
    """
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise SchemaValidationError(f"keys must be a list of metrics, not {type(keys).__name__}")
    return tuple(dict.fromkeys(check_key(key, "keys") for key in keys))


def _check_ranks(ranks: object) -> RankChoice:
    if ranks is None or ranks == EACH_RANK:
        return None if ranks is None else EACH_RANK
    if isinstance(ranks, str) or not isinstance(ranks, Sequence):
        raise SchemaValidationError(
            f'ranks must be None (across ranks), "each" or a list of ranks, got {ranks!r:.40}'
        )
    found = {check_index(rank, "ranks") for rank in ranks}
    if None in found:
        raise SchemaValidationError("ranks must be a list of ranks without None")
    return tuple(sorted(rank for rank in found if rank is not None))


def check_cursor(cursor: object) -> Cursor:
    """Return a cursor that has come back from outside, as plain numbers.

    Raises:
        SchemaValidationError: It is none.
    """
    if not isinstance(cursor, Mapping):
        raise SchemaValidationError(f"cursor must be a mapping, not {type(cursor).__name__}")
    found: dict[str, int] = {}
    for name, number in cursor.items():
        place = check_index(number, "cursor")
        if not isinstance(name, str) or place is None:
            raise SchemaValidationError("cursor must map names to numbers, as a reply does")
        found[name] = place
    return found


def reduce_curves(columns: Columns, query: CurveQuery) -> tuple[Curve, ...]:
    """Curves out of rows of metrics.

    Args:
        columns: Rows of these metrics, perhaps of others too; none that is hidden.
        query: What is wanted of them.
    """
    import numpy as np

    entries, window, ranks = query.entries, query.window, query.ranks
    inside = window.find_rows(columns[window.axis])
    rows = columns if inside is None else columns.take(inside)
    names = rows["metric_key"]
    out: list[Curve] = []
    for key in query.keys:
        its = rows.take(names == key)
        for attempt in np.unique(its["attempt"]).tolist():
            of_attempt = its.take(its["attempt"] == attempt)
            parts = [
                _reduce_rank(key, attempt, rank, of_attempt, query)
                for rank in np.unique(of_attempt["rank"]).tolist()
                if not isinstance(ranks, tuple) or rank in ranks
            ]
            out += parts if ranks is not None else [merge_curves(parts, entries, window.axis)]
    return tuple(out)


def _reduce_rank(
    key: str,
    attempt: int,
    rank: int,
    columns: Columns,
    query: CurveQuery,
) -> Curve:
    rows = columns.take(columns["rank"] == rank)
    several = query.ranks is None and rows.count < columns.count
    bound = choose_rank_points(query.entries) if several else query.entries
    arrays = (rows[name] for name in ("step", "epoch", "time_us", "value"))
    return make_curve(key, attempt, rank, *arrays, axis=query.window.axis, entries=bound)


def make_curve(
    key: str,
    attempt: int,
    rank: int,
    step: NDArray[Any],
    epoch: NDArray[Any],
    time_us: NDArray[Any],
    value: NDArray[Any],
    *,
    axis: str,
    entries: int | None,
) -> Curve:
    """The curve of one rank in one attempt, of all of its points within a window.

    Args:
        key: The metric's stored key.
        attempt, rank: Whose points they are.
        step, epoch: int64 in persistence order, -1 where there is none.
        time_us: int64, microseconds since the epoch.
        value: float64.
        axis: What they are sorted by.
        entries: At most so many; None keeps every point.
    """
    import numpy as np

    by = {"step": step, "epoch": epoch, "time_us": time_us}[axis]
    if len(by) > 1 and bool((by[1:] < by[:-1]).any()):
        order = np.argsort(by, kind="stable")
        step, epoch, time_us, value = (part[order] for part in (step, epoch, time_us, value))
    series = reduce_points(key, step, epoch, time_us, value, entries)
    bad = np.flatnonzero(~np.isfinite(value))
    starts = np.cumsum(series.count) - series.count
    at = np.searchsorted(starts, bad, side="right") - 1
    first = np.full(len(series), -1, dtype=np.int64)
    # Written backwards, the first one of each entry stays.
    first[at[::-1]] = step[bad[::-1]]
    return extend_series(series, attempt, rank, first)


def extend_series(
    series: Series, attempt: int, rank: int | None, non_finite_step: NDArray[Any]
) -> Curve:
    """A curve of what a series has."""
    fields = {name: getattr(series, name) for name in Series.__dataclass_fields__}
    if rank is not None:
        fields["ranks"] = (rank,)
    return Curve(**fields, attempt=attempt, rank=rank, non_finite_step=non_finite_step)


def sort_curve(curve: Curve, axis: Axis) -> Curve:
    """The entries of a curve in the order of another axis: where they begin on it."""
    import numpy as np

    by = getattr(curve, axis)
    if not bool((by[1:] < by[:-1]).any()):
        return curve
    order = np.argsort(by, kind="stable")
    arrays = {name: getattr(curve, name)[order] for name in (*ENTRY_ARRAYS, "non_finite_step")}
    return replace(curve, **arrays)


def merge_curves(curves: Sequence[Curve], entries: int | None, axis: str) -> Curve:
    """One curve across ranks.

    Args:
        curves: One of each rank, all of one metric and attempt; at least one. Each has at
            most as many entries as `choose_rank_points` says.
        entries: At most so many; None for one at each place of the axis.
        axis: What they are sorted by.
    """
    import numpy as np

    first = curves[0]
    if len(curves) == 1:
        return extend_series(first, first.attempt, None, first.non_finite_step)
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(curve, name) for curve in curves])
        for name in (*ENTRY_ARRAYS, "non_finite_step")
    }
    # Where there is no step, the epoch says what belongs together.
    other = np.where(joined["step"] < 0, joined["epoch"], 0) if axis == "step" else joined["step"]
    order = np.lexsort((other, joined[axis]))
    joined = {name: values[order] for name, values in joined.items()}
    other = other[order] if axis == "step" else np.zeros(len(order), dtype=np.int64)
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (np.diff(joined[axis]) != 0) | (np.diff(other) != 0)
    starts = np.flatnonzero(begins)
    if entries is not None and len(starts) > entries:
        starts = starts[np.arange(entries, dtype=np.int64) * len(starts) // entries]
    bad = joined.pop("non_finite_step")
    whole = Series(key=first.key, exact=False, **joined)
    series = group_entries(first.key, whole, starts)
    ranks = tuple(sorted({rank for curve in curves for rank in curve.ranks}))
    steps = find_first_steps(bad, whole.non_finite, starts)
    return replace(extend_series(series, first.attempt, None, steps), ranks=ranks)


def find_first_steps(
    steps: NDArray[Any], non_finite: NDArray[Any], starts: NDArray[Any]
) -> NDArray[Any]:
    """The step of the first entry of each group that has values which are not finite.

    Args:
        steps: Of the first such point of each entry.
        non_finite: How many there are in each entry.
        starts: Where the groups begin.
    """
    import numpy as np

    bad = np.flatnonzero(non_finite)
    groups = np.searchsorted(starts, bad, side="right") - 1
    out = np.full(len(starts), -1, dtype=np.int64)
    out[groups[::-1]] = steps[bad[::-1]]
    return out
