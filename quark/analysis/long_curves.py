"""Metrics of very long runs, out of what the store has summed up: no point of most is read.

A store keeps a summary of every few hundred points that follow each other:
their last value, their extremes, and how many are not finite. Of a run with
more points than may be judged anyway, the last values are the sample, single
points at equal distances; beside them stand the extremes that stand out, and
where values stop being finite the points themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quark.analysis import reduction
from quark.analysis.curves import Curve
from quark.analysis.metric_roles import names_a_part
from quark.analysis.reduction import STANDS_OUT, Points, make_curve, make_points
from quark_core.backends.contract import SupportsRead, SupportsSearch, SupportsSeries
from quark_core.records import MetricRecord, parse_time
from quark_core.records.query import Query
from quark_core.runs.reading import read_rows, read_series

if TYPE_CHECKING:
    from quark_core.backends.series import Series

_ENTRY_POINTS = 128
"""Points that an entry stands for, at least, so that none of them needs to be read."""

_LEAST_ENTRIES = 64
_MOST_METRICS = 2_000
_GROUP = 256
_NORMAL = 1.4826

Integers = NDArray[np.int64]


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
        if entries < _LEAST_ENTRIES or (is_judged and count <= reduction.METRIC_POINTS):
            return self._read_points(key)
        bound = min(entries, reduction.METRIC_POINTS)
        curve = read_series(self.reader, self.run_id, key, bound)
        if len(curve.ranks) > 1:
            rank = min(curve.ranks)
            curve = read_series(self.reader, self.run_id, key, bound, rank=rank)
        return self._sample(key, curve)

    def _read_points(self, key: str) -> Points:
        rows = read_rows(
            self.reader, self.run_id, MetricRecord.KIND, Query(equals={"metric_key": key})
        )
        if rows.count and (ranks := rows["rank"]).min() != ranks.max():
            rows = rows.take(ranks == ranks.min())
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
        if rows.count and (ranks := rows["rank"]).min() != ranks.max():
            rows = rows.take(ranks == ranks.min())
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
    if sum(counts.values()) <= reduction.ALL_POINTS or len(counts) > _MOST_METRICS:
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
