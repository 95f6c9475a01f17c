"""One metric over the ranks of a run, worked out when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quark_core.records.checks import check_choice

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """Statistics of a metric over the ranks of a run, one entry per step.

    NumPy arrays of one length, sorted by step. If a rank logged several values at one step, the
    newest is used. Non-finite values are counted but not included. An entry without a finite value
    has NaN and rank -1.

    Attributes:
        key: Stored key of the metric.
        by: "step" or "epoch".
        at: Steps or epochs.
        ranks: Ranks that logged the metric, sorted.
        count: Number of ranks with a finite value.
        mean: Mean over the ranks.
        low, high: Minimum and maximum.
        std: Population standard deviation.
        spread: `high - low`.
        low_rank, high_rank: Rank with the minimum or maximum; the lowest of equal ones.
        non_finite: Number of ranks with a NaN or infinite value.
    """

    key: str
    by: str
    at: NDArray[Any]
    ranks: tuple[int, ...]
    count: NDArray[Any]
    mean: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    std: NDArray[Any]
    spread: NDArray[Any]
    low_rank: NDArray[Any]
    high_rank: NDArray[Any]
    non_finite: NDArray[Any]

    def __len__(self) -> int:
        return len(self.at)

    def to_dicts(self) -> Iterator[dict[str, Any]]:
        """Return one dict of plain numbers per entry."""
        names = ("count", "mean", "low", "high", "std", "spread", "low_rank", "high_rank")
        columns = [getattr(self, name).tolist() for name in (*names, "non_finite")]
        for at, *values in zip(self.at.tolist(), *columns, strict=True):
            yield {self.by: at, **dict(zip((*names, "non_finite"), values, strict=True))}


def check_axis(by: object) -> Literal["step", "epoch"]:
    """Return what entries are sorted by.

    Raises:
        SchemaValidationError: Neither "step" nor "epoch".
    """
    return "step" if check_choice(by, "by", ("step", "epoch")) == "step" else "epoch"


def compare_ranks(
    columns: Mapping[str, NDArray[Any]], key: str, by: Literal["step", "epoch"]
) -> RankStatistics:
    """Work out a metric over the ranks.

    Args:
        columns: The metric's rows, in persistence order: `rank`, `value`, and `by`.
        key: Its stored key.
        by: What the entries are sorted by; rows without it are left out.
    """
    import numpy as np

    rows = np.flatnonzero(columns[by] >= 0)
    at, rank, value = (np.asarray(columns[name])[rows] for name in (by, "rank", "value"))
    ranks = tuple(int(one) for one in np.unique(rank))
    # Rows of one rank are in the order of its attempts already.
    order = np.lexsort((rank, at))
    at, rank, value = at[order], rank[order], value[order].astype(np.float64)
    newest = np.ones(len(at), dtype=np.bool_)
    newest[:-1] = (at[1:] != at[:-1]) | (rank[1:] != rank[:-1])
    at, rank, value = at[newest], rank[newest], value[newest]
    if not len(at):
        empty, none = np.empty(0), np.empty(0, dtype=np.int64)
        return RankStatistics(
            key=key,
            by=by,
            at=none,
            ranks=ranks,
            count=none,
            mean=empty,
            low=empty,
            high=empty,
            std=empty,
            spread=empty,
            low_rank=none,
            high_rank=none,
            non_finite=none,
        )
    starts = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    sizes = np.diff(np.append(starts, len(at)))
    finite = np.isfinite(value)
    count = np.add.reduceat(finite.astype(np.int64), starts)
    some = count > 0
    low = np.minimum.reduceat(np.where(finite, value, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, value, -np.inf), starts)
    divisor = np.maximum(count, 1)
    # Divided first, since the sum of large values overflows where their mean does not.
    shares = np.where(finite, value, 0.0) / np.repeat(divisor, sizes)
    mean = np.clip(np.add.reduceat(shares, starts), low, np.maximum(low, high))
    with np.errstate(over="ignore", invalid="ignore"):
        spread = high - low
        scale = np.where(some & (spread > 0), spread, 1.0)
        off = np.where(finite, value - np.repeat(mean, sizes), 0.0) / np.repeat(scale, sizes)
        std = scale * np.sqrt(np.add.reduceat(off * off, starts) / divisor)
    low_rank = _find_ranks(rank, finite & (value == np.repeat(low, sizes)), starts)
    high_rank = _find_ranks(rank, finite & (value == np.repeat(high, sizes)), starts)
    return RankStatistics(
        key=key,
        by=by,
        at=at[starts],
        ranks=ranks,
        count=count,
        mean=np.where(some, mean, np.nan),
        low=np.where(some, low, np.nan),
        high=np.where(some, high, np.nan),
        std=np.where(some, std, np.nan),
        spread=np.where(some, spread, np.nan),
        low_rank=low_rank,
        high_rank=high_rank,
        non_finite=sizes - count,
    )


def _find_ranks(rank: NDArray[Any], found: NDArray[Any], starts: NDArray[Any]) -> NDArray[Any]:
    """The lowest found rank from each start on; -1 where there is none."""
    import numpy as np

    most = np.iinfo(np.int64).max
    lowest = np.minimum.reduceat(np.where(found, rank, most), starts)
    return np.where(lowest == most, -1, lowest)
