"""What a run's metrics amount to: first, last, best."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quark_core.reading import read_series

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.backend import SupportsRead
    from quark_core.run_summary import MetricSummary as StoredSummary
    from quark_core.run_summary import RunSummary
    from quark_core.series import Series

__all__ = ["MetricSummary", "find_direction", "summarize_metrics"]

# More than any terminal shows.
_CURVE_POINTS = 500
_WORDS = re.compile(r"[a-z]+[0-9]*")
_DOWN = frozenset("loss error err perplexity ppl mse mae rmse nll wer cer fid".split())
_UP = frozenset(
    "acc accuracy f1 auc auroc precision recall score bleu rouge reward return iou miou map psnr"
    " ssim r2 top1 top5".split()
)


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric of a run.

    Attributes:
        key: Metric key.
        count: Number of values.
        first, last: The values that came first and last, None if not finite.
        best: The least or greatest finite value, None where it is not known
            which is better.
        best_at: Step (or epoch) of the best value.
        direction: "min", "max" or None.
        low, high: Least and greatest finite value.
        non_finite: How many values are NaN or infinite.
        x: Steps, or epochs where there are no steps, of the points to draw.
        y: Their values.
    """

    key: str
    count: int
    first: float | None
    last: float | None
    best: float | None
    best_at: int | None
    direction: str | None
    low: float | None
    high: float | None
    non_finite: int
    x: NDArray[Any]
    y: NDArray[Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-like values, without the points."""
        values = asdict(self)
        del values["x"], values["y"]
        return values


def find_direction(key: str) -> str | None:
    """Whether less ("min") or more ("max") of a metric is better, by its name; None if unknown."""
    words = set(_WORDS.findall(key.rpartition("/")[2].lower()))
    if not words.isdisjoint(_DOWN):
        return "min"
    return None if words.isdisjoint(_UP) else "max"


def summarize_metrics(reader: SupportsRead, run: RunSummary) -> list[MetricSummary]:
    """One summary per metric of a run, sorted by key, without reading every point."""
    return [
        _summarize(metric, read_series(reader, run.run_id, metric.key, _CURVE_POINTS))
        for metric in run.metrics.values()
    ]


def _summarize(metric: StoredSummary, series: Series) -> MetricSummary:
    direction = find_direction(metric.key)
    best = best_at = None
    if direction is not None and metric.low is not None:
        downwards = direction == "min"
        best = metric.low if downwards else metric.high
        extremes = series.low if downwards else series.high
        entry = int(np.nanargmin(extremes) if downwards else np.nanargmax(extremes))
        step = int((series.low_step if downwards else series.high_step)[entry])
        best_at = step if step >= 0 else int(series.epoch[entry])
    x, y = _draw_points(series)
    return MetricSummary(
        key=metric.key,
        count=metric.count,
        first=metric.first,
        last=metric.last,
        best=best,
        best_at=best_at,
        direction=direction,
        low=metric.low,
        high=metric.high,
        non_finite=metric.non_finite,
        x=x,
        y=y,
    )


def _draw_points(series: Series) -> tuple[NDArray[Any], NDArray[Any]]:
    """The points of a curve to draw: all of them, or the extremes of each entry."""
    if series.exact:
        return np.where(series.step >= 0, series.step, series.epoch), series.last
    ends = [
        (np.where(steps >= 0, steps, series.epoch), values)
        for steps, values in ((series.low_step, series.low), (series.high_step, series.high))
    ]
    x = np.stack([x for x, _ in ends], axis=1)
    y = np.stack([y for _, y in ends], axis=1)
    order = np.argsort(x, axis=1, kind="stable")
    return np.take_along_axis(x, order, 1).ravel(), np.take_along_axis(y, order, 1).ravel()
