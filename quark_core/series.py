"""One metric of a run as a curve: every point, or fewer that stand for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Series"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric as a curve, in persistence order, as numpy arrays of one length.

    Each entry stands for `count` points that follow each other; where `exact`
    is true each stands for one point, and `low`, `high`, `mean` and `last` are
    all its value. The extremes are those of the points themselves: a spike of
    a single point is in `low` or `high` of its entry, however few entries
    there are.

    Attributes:
        key: The metric's stored key.
        step: Step of the entry's first point; -1 where it has none.
        epoch: Epoch of the entry's first point; -1 where it has none.
        time_us: Microseconds since the epoch of the entry's first point.
        low, high, mean: Over the finite values of the entry; NaN where it has none.
        last: Value of the entry's last point, finite or not.
        low_step, high_step: Step of the points that `low` and `high` are; -1
            where there is none.
        count: Points that the entry stands for.
        non_finite: How many of them are NaN or infinite.
        exact: Whether every entry is one point.
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

    @property
    def points(self) -> int:
        """How many points of the run the series stands for."""
        return int(self.count.sum())

    def __len__(self) -> int:
        return len(self.step)
