"""Runs of any length in bounded memory: rows come in parts, and of very many fewer are kept.

Up to `METRIC_POINTS` points of a metric (and `ALL_POINTS` of all metrics
together), `TABLE_ROWS` rows of telemetry or of batches, and `PROBE_ROWS` rows
of layers or parameters, every row is kept and nothing here changes a figure.

Of a longer metric every second, fourth, eighth … point is kept: single points,
no means, so that noise and levels stay what they are. What such a sample would
miss is kept beside it: the first and the last point, the lowest and the
highest, where the values stop and begin to be finite, and the points that
stand out most from those about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import Curve
from quark_core.records.columns import Columns

METRIC_POINTS = 131_072
"""A metric of more points is judged by a half of so many, at least."""

ALL_POINTS = 4_194_304
"""Where all metrics have more, the longest are judged by fewer points."""

TABLE_ROWS = 131_072
"""Telemetry, or batches, of more rows is judged by a half of so many, at least."""

PROBE_ROWS = 262_144
"""Layers, or parameters, of more rows are judged at every second, fourth … probe."""

_LEAST_POINTS = 64
_PENDING = 1_024
_BLOCK = 256

STANDS_OUT = 8.0
"""Robust deviations from the points about it, beyond which a point is kept."""

_MOST_OUTSTANDING = 1_024
_NORMAL = 1.4826

Integers = NDArray[np.int64]
Points = NDArray[np.void]

_POINT = np.dtype(
    [("number", "i8"), ("step", "i8"), ("epoch", "i8"), ("value", "f8"), ("score", "f8")]
)


def make_points(
    step: Integers,
    epoch: Integers,
    value: NDArray[np.float64],
    number: Integers | None = None,
) -> Points:
    """Points with their places in the metric; by default those from 0 on."""
    points = np.empty(len(value), dtype=_POINT)
    points["number"] = np.arange(len(value)) if number is None else number
    points["step"], points["epoch"], points["value"] = step, epoch, value
    points["score"] = 0.0
    return points


def make_curve(key: str, points: Points) -> Curve:
    """A curve over steps, or over epochs where no point has a step."""
    step, epoch, value = (
        np.ascontiguousarray(points[field]) for field in ("step", "epoch", "value")
    )
    unit, over = "step", step
    if len(step) and bool((step < 0).any()):
        if bool((step >= 0).any()):
            kept = step >= 0
            step, epoch, value = step[kept], epoch[kept], value[kept]
            over = step
        else:
            unit, over = "epoch", epoch
    if len(over) > 1 and bool((over[1:] < over[:-1]).any()):
        order = np.argsort(over, kind="stable")
        over, epoch, value = over[order], epoch[order], value[order]
    return Curve(key, over, value, epoch, unit)


class MetricSamples:
    """Takes the metrics of a run part by part, in persistence order."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._bound = METRIC_POINTS

    def add(self, columns: Columns) -> None:
        """Take further rows."""
        from quark.analysis.histories import factorize

        codes, names = factorize(columns["metric_key"])
        order = np.argsort(codes, kind="stable")
        ends = np.searchsorted(codes[order], np.arange(len(names) + 1))
        step, epoch, value = (columns[name][order] for name in ("step", "epoch", "value"))
        for name, (low, high) in zip(names, pairwise(ends.tolist()), strict=True):
            series = self._series.setdefault(name, _Series())
            series.add(step[low:high], epoch[low:high], value[low:high], self._bound)
        while sum(len(series) for series in self._series.values()) > ALL_POINTS:
            longest = max(len(series) for series in self._series.values())
            if longest <= _LEAST_POINTS:
                break
            self._bound = max(_LEAST_POINTS, longest // 2)
            for series in self._series.values():
                series.keep_to(self._bound)

    def take(self) -> Iterator[tuple[str, Points]]:
        """Key and points (`step`, `epoch`, `value`) of each metric, in order of appearance."""
        for name in list(self._series):
            yield name, self._series.pop(name).finish()

    def peek(self) -> Iterator[tuple[str, int, Callable[[], Points]]]:
        """Key, number of points so far, and what gives those that are kept, of each metric."""
        for name, series in self._series.items():
            yield name, series.seen, series.peek


class _Series:
    """One metric: a sample of its points, and those that stand out of it."""

    __slots__ = (
        "_ends", "_kept", "_outstanding", "_pending", "_seen", "_size", "_stride", "_waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self._stride = 1
        self._seen = 0
        self._size = 0
        self._waiting = 0
        self._pending: list[Points] = []
        self._kept: list[Points] = []
        self._outstanding = np.empty(0, dtype=_POINT)
        # Lowest, highest, last finite point and the one after it.
        self._ends: dict[str, Points] = {}

    def __len__(self) -> int:
        return self._size + self._waiting

    @property
    def seen(self) -> int:
        """How many points came."""
        return self._seen

    def peek(self) -> Points:
        """What is kept so far, in order; more may come after it."""
        if self._stride == 1:
            self._pending = [np.concatenate(self._pending)]
            return self._pending[0]
        other = copy(self)
        other._pending, other._kept = [*self._pending], [*self._kept]
        other._ends = dict(self._ends)
        return other.finish()

    def add(self, step: Integers, epoch: Integers, value: NDArray[np.float64], bound: int) -> None:
        points = make_points(step, epoch, value, np.arange(self._seen, self._seen + len(value)))
        self._seen += len(value)
        self._pending.append(points)
        self._waiting += len(points)
        if self._stride > 1 and self._waiting >= _PENDING:
            self._sift()
        if len(self) > bound:
            self.keep_to(bound)

    def keep_to(self, bound: int) -> None:
        """Keep at most so many points, but for those that stand out."""
        while len(self) > bound:
            self._stride *= 2
            if self._pending:
                self._sift()
            kept = np.concatenate(self._kept)
            kept = kept[kept["number"] % self._stride == 0]
            self._kept, self._size = [kept], len(kept)

    def finish(self) -> Points:
        """What is kept, in order."""
        if self._stride == 1:
            return np.concatenate(self._pending)
        if self._pending:
            last = self._pending[-1][-1:]
            self._sift()
            self._ends["last"] = last
        elif self._kept:
            self._ends.setdefault("last", self._kept[-1][-1:])
        every = np.concatenate([*self._kept, self._outstanding, *self._ends.values()])
        return every[np.unique(every["number"], return_index=True)[1]]

    def _sift(self) -> None:
        points = np.concatenate(self._pending)
        self._pending, self._waiting = [], 0
        self._note_ends(points)
        _score(points)
        standing = points[points["score"] > STANDS_OUT]
        if len(standing):
            standing = np.concatenate([self._outstanding, standing])
            if len(standing) > _MOST_OUTSTANDING:
                # Of equal scores the earliest stay.
                order = np.lexsort((standing["number"], -standing["score"]))
                standing = standing[np.sort(order[:_MOST_OUTSTANDING])]
            self._outstanding = standing
        self._kept.append(points[points["number"] % self._stride == 0])
        self._size += len(self._kept[-1])
        self._ends["last"] = points[-1:]

    def _note_ends(self, points: Points) -> None:
        finite = np.flatnonzero(np.isfinite(points["value"]))
        if not len(finite):
            self._ends.setdefault("after", points[:1])
            return
        values = points["value"][finite]
        for name, place, is_beyond in (
            ("low", int(values.argmin()), np.less),
            ("high", int(values.argmax()), np.greater),
        ):
            known = self._ends.get(name)
            if known is None or is_beyond(values[place], known["value"][0]):
                self._ends[name] = points[finite[place] : finite[place] + 1]
        last = int(finite[-1])
        self._ends["finite"] = points[last : last + 1]
        self._ends.pop("after", None)
        if last + 1 < len(points):
            self._ends["after"] = points[last + 1 : last + 2]


def _score(points: Points) -> None:
    """By how many robust deviations each point stands out of the block that it is in."""
    values = points["value"]
    finite = np.isfinite(values)
    changes = np.flatnonzero(finite[1:] != finite[:-1])
    points["score"][np.union1d(changes, changes + 1)] = np.inf
    edges = [*range(0, max(1, len(values) - _BLOCK // 2), _BLOCK), len(values)]
    for low, high in pairwise(edges):
        inside = finite[low:high]
        block = values[low:high][inside]
        if len(block) < 3:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            off = np.abs(block - np.median(block))
            scale = _NORMAL * float(np.median(off))
            # Where most are equal, whatever differs stands out.
            scores = off / scale if scale > 0 else np.where(off > 0, np.inf, 0.0)
        scores = np.maximum(scores, points["score"][low:high][inside])
        points["score"][low:high][inside] = np.nan_to_num(scores, nan=np.inf, posinf=np.inf)


class RowSample:
    """Takes rows part by part, and keeps every second, fourth … of them where there are many.

    Args:
        kind: Of the rows.
        most: Rows that are kept at most.
    """

    def __init__(self, kind: str, most: int) -> None:
        self._kind, self._most = kind, most
        self._kept: list[tuple[Columns, Integers]] = []
        self._stride, self._seen = 1, 0

    def add(self, part: Columns) -> None:
        """Take further rows."""
        numbers = np.arange(self._seen, self._seen + part.count)
        self._seen += part.count
        self._kept.append(_keep_each(part, numbers, self._stride))
        self.keep_to(self._most)

    def keep_to(self, most: int) -> None:
        """Keep at most so many rows from now on."""
        self._most = most
        while sum(columns.count for columns, _ in self._kept) > most:
            self._stride *= 2
            self._kept = [_keep_each(*entry, self._stride) for entry in self._kept]

    def finish(self) -> Columns:
        """What is kept, in order."""
        return Columns.concatenate(
            self._kind, [columns for columns, _ in self._kept if columns.count]
        )


def sample_rows(kind: str, parts: Iterable[Columns]) -> Columns:
    """The rows of some parts; of more than `TABLE_ROWS` every second, fourth and so on."""
    sample = RowSample(kind, TABLE_ROWS)
    for part in parts:
        sample.add(part)
    return sample.finish()


def sample_probes(kind: str, parts: Iterable[Columns]) -> Columns:
    """The rows of some parts; of more than `PROBE_ROWS` those of every second, fourth … step.

    Rows of one step stay together, so that layers and parameters stay comparable.
    """
    kept: list[tuple[Columns, Integers]] = []
    places: dict[int, int] = {}
    stride = 1
    for part in parts:
        steps = part["step"].tolist()
        numbers = np.array([places.setdefault(step, len(places)) for step in steps], dtype=np.int64)
        kept.append(_keep_each(part, numbers, stride))
        while sum(columns.count for columns, _ in kept) > PROBE_ROWS and stride < len(places):
            stride *= 2
            kept = [_keep_each(columns, numbers, stride) for columns, numbers in kept]
    return Columns.concatenate(kind, [columns for columns, _ in kept if columns.count])


def _keep_each(columns: Columns, numbers: Integers, stride: int) -> tuple[Columns, Integers]:
    """The rows whose number is a multiple; nothing of the others stays in memory."""
    mask = numbers % stride == 0
    if bool(mask.all()):
        return columns, numbers
    return columns.take(mask).make_all(), numbers[mask]
