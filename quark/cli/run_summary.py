"""What a run's metrics amount to: first, last, best."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quark_core.query import Query
from quark_core.records import MetricRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.backend import SupportsRead

__all__ = ["MetricSummary", "find_direction", "last_loss", "summarize_metrics"]

_LOSS_KEYS = ("train/loss", "training/loss", "loss", "val/loss", "validation/loss")
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
        x: Steps, or epochs where there are no steps.
        y: Values.
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


def summarize_metrics(reader: SupportsRead, run_id: str) -> list[MetricSummary]:
    """One summary per metric of a run, sorted by key."""
    columns = reader.read(run_id, MetricRecord.KIND, Query())
    if columns.count == 0:
        return []
    keys = columns["metric_key"]
    # Sorting once by key and slicing is linear in the points, however many metrics there are.
    names, indexes = np.unique(keys.astype(str), return_inverse=True)
    order = np.argsort(indexes, kind="stable")
    bounds = np.searchsorted(indexes[order], np.arange(len(names) + 1))
    values, steps, epochs = columns["value"], columns["step"], columns["epoch"]
    summaries = []
    for index, name in enumerate(names):
        rows = order[bounds[index] : bounds[index + 1]]
        x = np.where(steps[rows] >= 0, steps[rows], epochs[rows])
        summaries.append(_summarize(str(name), x, values[rows]))
    return summaries


def last_loss(reader: SupportsRead, run_id: str) -> float | None:
    """The newest value of the first conventional loss that a run has, or None."""
    for key in _LOSS_KEYS:
        found = reader.read(run_id, MetricRecord.KIND, Query(equals={"metric_key": key}, limit=1))
        if found.count:
            return float(found["value"][-1])
    return None


def _summarize(key: str, x: NDArray[Any], y: NDArray[Any]) -> MetricSummary:
    finite = np.isfinite(y)
    direction = find_direction(key)
    low = high = best = best_at = None
    if finite.any():
        low, high = float(y[finite].min()), float(y[finite].max())
        if direction is not None:
            best = low if direction == "min" else high
            best_at = int(x[finite][np.argmax(y[finite] == best)])
    return MetricSummary(
        key=key,
        count=len(y),
        first=float(y[0]) if finite[0] else None,
        last=float(y[-1]) if finite[-1] else None,
        best=best,
        best_at=best_at,
        direction=direction,
        low=low,
        high=high,
        non_finite=int(len(y) - finite.sum()),
        x=x,
        y=y,
    )
