"""The records of a run as analyzers read them, in bounded memory however long the run is.

Everything is read as columns, once, when it is first asked for, from any
backend that reads, part by part and in bounded memory: of very long runs a
sample is kept, as the comment before the reduction says. Where several ranks
have written, the lowest one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import (
    Curve,
    LayerHistory,
    ParameterHistory,
    collect_layers,
    collect_parameters,
    factorize,
    take_lowest_rank,
)
from quark.analysis.metric_roles import names_a_part
from quark_core.backends.contract import SupportsRead, SupportsSearch, SupportsSeries
from quark_core.records import (
    BatchDiagnosticRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
    parse_time,
)
from quark_core.records.columns import Columns
from quark_core.records.query import Query
from quark_core.runs.following import read_series
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark_core.backends.run_summary import StoredRun
    from quark_core.backends.series import Series

# Runs of any length in bounded memory: rows come in parts, and of very many fewer are kept.
#
# Up to `METRIC_POINTS` points of a metric (and `ALL_POINTS` of all metrics
# together), `TABLE_ROWS` rows of telemetry or of batches, and `PROBE_ROWS` rows
# of layers or parameters, every row is kept and nothing here changes a figure.
#
# Of a longer metric every second, fourth, eighth … point is kept: single points,
# no means, so that noise and levels stay what they are. What such a sample would
# miss is kept beside it: the first and the last point, the lowest and the
# highest, where the values stop and begin to be finite, and the points that
# stand out most from those about them.

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


# Metrics of very long runs, out of what the store has summed up: no point of most is read.
#
# A store keeps a summary of every few hundred points that follow each other:
# their last value, their extremes, and how many are not finite. Of a run with
# more points than may be judged anyway, the last values are the sample, single
# points at equal distances; beside them stand the extremes that stand out, and
# where values stop being finite the points themselves.

_ENTRY_POINTS = 128
"""Points that an entry stands for, at least, so that none of them needs to be read."""

_LEAST_ENTRIES = 64
_MOST_METRICS = 2_000
_GROUP = 256


@dataclass(frozen=True)
class LongCurves:
    """A run whose metrics are read as curves.

    Attributes:
        reader: A backend that has curves.
        run_id: The run.
        counts: Key -> points of each metric, in order.
        last_steps: Key -> step of its newest point, or None.
        newest_us: Time of the newest point, microseconds since the epoch.
    """

    reader: SupportsSeries
    run_id: str
    counts: Mapping[str, int]
    last_steps: Mapping[str, int | None]
    newest_us: int

    def load(self) -> Mapping[str, Curve]:
        """Every metric by its stored key."""
        return {key: make_curve(key, self.read(key)) for key in self.counts}

    def read(self, key: str) -> Points:
        """The sample of one metric, in order; of the lowest rank that has it."""
        count = self.counts[key]
        entries = count // _ENTRY_POINTS
        is_judged = names_a_part(key)
        if entries < _LEAST_ENTRIES or (is_judged and count <= METRIC_POINTS):
            return self._read_points(key)
        bound = min(entries, METRIC_POINTS)
        curve = read_series(self.reader, self.run_id, key, bound)
        if len(curve.ranks) > 1:
            rank = min(curve.ranks)
            curve = read_series(self.reader, self.run_id, key, bound, rank=rank)
        return self._sample(key, curve)

    def _read_points(self, key: str) -> Points:
        rows = read_rows(
            self.reader, self.run_id, MetricRecord.KIND, Query(equals={"metric_key": key})
        )
        rows = take_lowest_rank(rows)
        return make_points(rows["step"], rows["epoch"], rows["value"])

    def _sample(self, key: str, curve: Series) -> Points:
        count = len(curve)
        first = curve.step.astype(np.int64)
        # The last point of an entry comes before the first of the next one.
        last = first.copy()
        last[:-1] = np.maximum(first[:-1], first[1:] - 1)
        if count and (end := self.last_steps.get(key)) is not None:
            last[-1] = max(end, int(first[-1]))
        whole = self._find_whole(curve)
        parts = [make_points(last, curve.epoch, curve.last, 2 * np.arange(count) + 1)]
        for extreme, at, pick in (
            (curve.low, curve.low_step, np.nanargmin),
            (curve.high, curve.high_step, np.nanargmax),
        ):
            stands_out = _find_outstanding(extreme, curve.last)
            if np.isfinite(extreme).any():
                stands_out[int(pick(extreme))] = True
            stands_out[whole] = False
            rows = np.flatnonzero(stands_out)
            parts.append(make_points(at[rows], curve.epoch[rows], extreme[rows], 2 * rows))
        parts += [self._read_entry(key, first, last, place) for place in whole]
        broken = np.flatnonzero((curve.non_finite > 0) & np.isfinite(curve.last))
        at = np.setdiff1d(broken, np.array(whole, dtype=np.int64))
        parts.append(make_points(first[at], curve.epoch[at], np.full(len(at), np.nan), 2 * at))
        every = np.concatenate(parts)
        return every[np.argsort(every["number"], kind="stable")]

    @staticmethod
    def _find_whole(curve: Series) -> list[int]:
        """Entries of which every point is wanted: where values begin, first and last break off."""
        if not len(curve) or bool((curve.step < 0).any()):
            return []
        places = {0}
        broken = np.flatnonzero(curve.non_finite > 0)
        sound = np.flatnonzero(curve.non_finite < curve.count)
        if len(broken):
            places.add(int(broken[0]))
        if len(sound) and not np.isfinite(curve.last[-1]):
            places.add(int(sound[-1]))
        return sorted(places)

    def _read_entry(self, key: str, first: Integers, last: Integers, place: int) -> Points:
        """The points of one entry but for its last one."""
        low, high = int(first[place]), int(last[place]) - 1
        if high < low:
            return make_points(first[:0], first[:0], np.empty(0))
        equals = {"metric_key": key}
        query = Query.build(equals=equals, step_min=low, step_max=high)
        rows = read_rows(self.reader, self.run_id, MetricRecord.KIND, query)
        rows = take_lowest_rank(rows)
        number = np.full(rows.count, 2 * place)
        return make_points(rows["step"], rows["epoch"], rows["value"], number)


def find_long_curves(reader: SupportsRead, run_id: str) -> LongCurves | None:
    """The curves of a run that has more points than may be judged; None of any other run.

    None too where the backend has no curves, or where most metrics are short.
    """
    if not isinstance(reader, SupportsSeries) or not isinstance(reader, SupportsSearch):
        return None
    summary = reader.summarize(run_id)
    # Of metrics that say the same thing, the one that plays a part is named.
    keys = sorted(summary.metrics, key=lambda key: not names_a_part(key))
    counts = {key: summary.metrics[key].count for key in keys}
    if sum(counts.values()) <= ALL_POINTS or len(counts) > _MOST_METRICS:
        return None
    newest = summary.last_metric_at
    last_steps = {key: metric.last_step for key, metric in summary.metrics.items()}
    return LongCurves(
        reader, run_id, counts, last_steps, 0 if newest is None else parse_time(newest)
    )


def _find_outstanding(extreme: NDArray[np.float64], last: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which extremes are far from the last values of the entries about them."""
    out = np.zeros(len(last), dtype=np.bool_)
    for low in range(0, len(last), _GROUP):
        inside = slice(low, low + _GROUP)
        known = last[inside][np.isfinite(last[inside])]
        if len(known) < 3:
            continue
        middle = np.median(known)
        scale = _NORMAL * float(np.median(np.abs(known - middle)))
        with np.errstate(invalid="ignore", over="ignore"):
            out[inside] = np.abs(extreme[inside] - middle) > STANDS_OUT * scale
    return out & np.isfinite(extreme)


ReadColumns = Callable[[str, Query], "Columns"]
"""Reads the rows of one kind, in persistence order."""

IterateColumns = Callable[[str, Query], "Iterable[Columns]"]
"""The same in parts."""

Collected = TypeVar("Collected")

Floats = NDArray[np.float64]


class CurveSource(Protocol):
    """Where a run's metrics are curves already.

    Attributes:
        newest_us: Time of the newest point, microseconds since the epoch.
    """

    @property
    def newest_us(self) -> int:
        """See the class."""

    def load(self) -> Mapping[str, Curve]:
        """Every metric by its stored key."""


_MOMENT = "time"


class RunData:
    """One run, read through columns.

    Args:
        read: Reads rows of one kind.
        iterate: Reads them in parts, so that not all are in memory; without it
            they are read at once.
        run_id: The run.
        ended: Whether the run is over; of one that goes on, the last points may
            be the beginning of anything.
        config: The run's configuration, where there is one.
        stored: The run as its store knows it; None of one that goes on in this process.
        find_curves: Finds where metrics are curves already; None of it reads every point.
        with_torch: Whether the run's process has PyTorch, so that there is a model to watch.

    Attributes:
        newest_us: Microseconds since the epoch of the newest record read so far.
    """

    def __init__(
        self,
        read: ReadColumns,
        run_id: str,
        *,
        iterate: IterateColumns | None = None,
        ended: bool = True,
        config: Mapping[str, Any] | None = None,
        stored: StoredRun | None = None,
        find_curves: Callable[[], CurveSource | None] | None = None,
        with_torch: bool = False,
    ) -> None:
        self._iterate = iterate or (lambda kind, query: (read(kind, query),))
        self.run_id = run_id
        self.ended = ended
        self.config = config or {}
        self.stored = stored
        self.with_torch = with_torch
        self._find_curves = find_curves
        self.newest_us = 0
        # Kinds that several ranks have written.
        self._shared: set[str] = set()

    @cached_property
    def metrics(self) -> Mapping[str, Curve]:
        """Every metric by its stored key, non-finite values included."""
        source = None if self._find_curves is None else self._find_curves()
        if source is not None:
            self.newest_us = max(self.newest_us, source.newest_us)
            return source.load()
        samples = self._collect(MetricRecord.KIND, _sample_metrics)
        return {name: make_curve(name, points) for name, points in samples.take()}

    @cached_property
    def activations(self) -> Mapping[str, LayerHistory]:
        """Activations by module, in the order of the modules' first records."""
        return {name: item for (name, kind), item in self._layers.items() if kind == "activation"}

    @cached_property
    def gradients(self) -> Mapping[str, LayerHistory]:
        """Gradients of the modules' outputs by module, in the order of the activations."""
        order = {name: index for index, name in enumerate(self.activations)}
        found = [item for (_, kind), item in self._layers.items() if kind == "gradient"]
        found.sort(key=lambda item: order.get(item.name, len(order) + item.order))
        return {item.name: item for item in found}

    @cached_property
    def parameters(self) -> Mapping[str, ParameterHistory]:
        """Parameters by name, in the order of their first records."""
        kind = ParameterSummaryRecord.KIND
        return collect_parameters(self._collect(kind, partial(sample_probes, kind)))

    @cached_property
    def replicas(self) -> Mapping[int, Mapping[str, ParameterHistory]]:
        """Parameters by rank, where several ranks have written some; empty where one has."""
        if not self.parameters or ParameterSummaryRecord.KIND not in self._shared:
            return {}
        kind = ParameterSummaryRecord.KIND
        parts = (part for part in self._iterate(kind, Query()) if part.count)
        columns = sample_probes(kind, parts)
        ranks = columns["rank"]
        return {
            int(rank): collect_parameters(columns.take(ranks == rank)) for rank in np.unique(ranks)
        }

    @cached_property
    def batches(self) -> Columns:
        """Rows of batch diagnostics, in persistence order."""
        return self.read_rows(BatchDiagnosticRecord.KIND)

    @cached_property
    def telemetry(self) -> Columns:
        """Rows of telemetry of steps, in persistence order."""
        return self.read_rows(SystemTelemetryRecord.KIND)

    def read_rows(self, kind: str) -> Columns:
        """Rows of any kind of record, of the lowest rank, in persistence order.

        Args:
            kind: As "telemetry". Of more than `TABLE_ROWS` rows every second,
                fourth and so on.
        """
        return self._collect(kind, partial(sample_rows, kind))

    @cached_property
    def rank_telemetry(self) -> Mapping[int, Columns]:
        """Rows of telemetry of every rank, by rank, in persistence order.

        All ranks together have as many rows as one alone may have.
        """
        kind = SystemTelemetryRecord.KIND
        samples: dict[int, RowSample] = {}
        for part in self._read_parts(kind):
            ranks = part["rank"]
            for rank in np.unique(ranks).tolist():
                if rank not in samples:
                    samples[rank] = RowSample(kind, TABLE_ROWS)
                    for sample in samples.values():
                        sample.keep_to(TABLE_ROWS // len(samples))
                samples[rank].add(part.take(ranks == rank))
        return {rank: samples[rank].finish() for rank in sorted(samples)}

    def has_any(self, tables: Iterable[str]) -> bool:
        """Whether at least one of these tables of the run has rows.

        Args:
            tables: Names of attributes, such as "activations" or "telemetry".
        """
        found = (getattr(self, name) for name in tables)
        return any(table.count if isinstance(table, Columns) else table for table in found)

    def place_on_steps(self, curve: Curve) -> Curve:
        """A curve over epochs, put at the last step that another metric has in each epoch.

        Returns it as it is where it is over steps already or no metric has both.
        """
        if curve.unit == "step" or not len(curve):
            return curve
        ends = self._epoch_ends
        known = np.array([int(epoch) in ends for epoch in curve.epoch])
        if not known.any():
            return curve
        kept = curve.take(known)
        steps = np.array([ends[int(epoch)] for epoch in kept.epoch], dtype=np.int64)
        return Curve(curve.key, steps, kept.value, kept.epoch, "step")

    @cached_property
    def _epoch_ends(self) -> Mapping[int, int]:
        ends: dict[int, int] = {}
        for curve in self.metrics.values():
            if curve.unit != "step" or not len(curve) or int(curve.epoch.max()) < 0:
                continue
            for epoch in np.unique(curve.epoch[curve.epoch >= 0]).tolist():
                last = int(curve.step[curve.epoch == epoch][-1])
                ends[epoch] = max(last, ends.get(epoch, last))
        return ends

    @cached_property
    def last_step(self) -> int | None:
        """The highest step that any metric or probe has, or None."""
        steps = [int(curve.step[-1]) for curve in self.metrics.values() if curve.unit == "step"]
        tables = (self.activations, self.gradients, self.parameters)
        steps += [int(item.step[-1]) for table in tables for item in table.values()]
        return max(steps, default=None)

    @cached_property
    def probe_steps(self) -> Integers:
        """Steps at which any layer or parameter was looked at, ascending."""
        tables = (self.activations, self.gradients, self.parameters)
        steps = [item.step for table in tables for item in table.values()]
        return np.unique(np.concatenate(steps)) if steps else np.empty(0, dtype=np.int64)

    @cached_property
    def _layers(self) -> Mapping[tuple[str, str], LayerHistory]:
        kind = LayerSummaryRecord.KIND
        return collect_layers(self._collect(kind, partial(sample_probes, kind)))

    def _collect(self, kind: str, collect: Callable[[Iterable[Columns]], Collected]) -> Collected:
        """What is made of the rows of the lowest rank."""
        lowest: int | None = None
        while True:
            try:
                return collect(self._iterate_rank(kind, lowest))
            except _LowerRank as found:
                lowest = found.rank

    def _read_parts(self, kind: str) -> Iterator[Columns]:
        """All rows of a kind, but those that tell of a moment rather than of a step.

        The machine is looked at whether training goes on or not, so that those say nothing of it.
        """
        for part in self._iterate(kind, Query()):
            if kind == SystemTelemetryRecord.KIND and part.count:
                part = part.take(part["boundary"].astype(str) != _MOMENT)
            yield part

    def _iterate_rank(self, kind: str, lowest: int | None) -> Iterator[Columns]:
        """Rows of one rank, by default of the first; raises where a lower one comes later."""
        for part in self._read_parts(kind):
            if not part.count:
                continue
            self.newest_us = max(self.newest_us, int(part["time_us"].max()))
            ranks = part["rank"]
            least = int(ranks.min())
            if lowest is None:
                lowest = least
            elif least < lowest:
                self._shared.add(kind)
                raise _LowerRank(least)
            if bool((ranks != lowest).any()):
                self._shared.add(kind)
                part = part.take(ranks == lowest)
            if part.count:
                yield part


class _LowerRank(Exception):
    """An attempt that came later has a lower rank than all before it: begin anew."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def _sample_metrics(parts: Iterable[Columns]) -> MetricSamples:
    samples = MetricSamples()
    for part in parts:
        samples.add(part)
    return samples
