"""Metric records as MLflow points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from quark_core.names import decode_name
from quark_core.records import MetricRecord

__all__ = [
    "FIGURE_MARK",
    "Point",
    "TimeRange",
    "chunk",
    "key_and_text",
    "make_points",
    "name_key",
    "note_infinities",
]

MAX_POINTS = 1000
MAX_BYTES = 800_000
"""Servers take requests up to 1 MB, and so do proxies before them."""
_POINT_BYTES = 150
FIGURE_MARK = "="
"""Begins the key of a value that is of no metric; no metric's key begins so."""
_SYSTEM = f"{FIGURE_MARK}system/"

_Item = TypeVar("_Item")
_Value = tuple[str, int, float | None]
TimeRange = tuple[str, int, float | None, int, int]
"""Name, step and value (None: not finite) of points; the first and last millisecond they take."""


class Point(NamedTuple):
    """One value as MLflow takes it, and the record that it is made of."""

    name: str
    value: float
    timestamp_ms: int
    step: int
    record: MetricRecord

    @property
    def size_bytes(self) -> int:
        """What it takes in a request, at most."""
        return len(json.dumps(self.name)) + _POINT_BYTES


def name_key(record: MetricRecord) -> str:
    """What a record's name in MLflow is found by: ranks have names of their own."""
    if record.rank == 0 or record.metric_key.startswith(_SYSTEM):
        return record.metric_key
    # Under one name, equal points of two ranks would be one, and curves would jump.
    return f"rank{record.rank}:{record.metric_key}"


def key_and_text(record: MetricRecord) -> tuple[str, str]:
    """The key of a record's name, and what the user wrote for it."""
    key = name_key(record)
    is_figure = record.metric_key.startswith(FIGURE_MARK)
    text = record.metric_key[1:] if is_figure else decode_name(record.metric_key)
    return key, text if key == record.metric_key else f"rank{record.rank}/{text}"


def make_points(
    records: Sequence[MetricRecord], names: Mapping[str, str], recent: Sequence[TimeRange] = ()
) -> tuple[list[Point], list[TimeRange]]:
    """Points of one batch, in order; the same at each call with the same arguments.

    MLflow keeps one of two points that agree in name, step, value and
    millisecond. The later ones of such points are moved on by a millisecond
    each, so that every one is there, and a batch that comes again makes the
    same points again.

    Args:
        records: The batch's records.
        names: `name_key` of a record -> name in MLflow.
        recent: What this function returned for the writer's batch before.

    Returns:
        The points, and the times that the writer's next batch might meet.
    """
    ranges: dict[_Value, list[int]] = {
        (name, step, value): [low, high] for name, step, value, low, high in recent
    }
    sent: set[tuple[_Value, int]] = set()
    points = []
    newest_ms = 0
    for record in records:
        step = record.step
        if step is None:
            step = record.sequence if record.epoch is None else record.epoch
        name, timestamp_ms = names[name_key(record)], record.time_us // 1000
        newest_ms = max(newest_ms, timestamp_ms)
        # SQL stores have no infinity and would store the largest float64 instead, a lie in plots.
        finite = math.isfinite(record.value)
        same = name, step, record.value if finite else None
        taken = ranges.get(same)
        if taken is not None and taken[0] <= timestamp_ms <= taken[1]:
            taken[1] = timestamp_ms = taken[1] + 1
        else:
            ranges[same] = [timestamp_ms, timestamp_ms]
        while (same, timestamp_ms) in sent:
            timestamp_ms += 1
        sent.add((same, timestamp_ms))
        value = float(record.value) if finite else math.nan
        points.append(Point(name, value, timestamp_ms, step, record))
    kept = [(*same, low, high) for same, (low, high) in ranges.items() if high >= newest_ms]
    return points, kept


def note_infinities(points: Iterable[Point]) -> dict[str, dict[str, int]]:
    """Name -> `inf` or `-inf` -> the first step with it."""
    found: dict[str, dict[str, int]] = {}
    for point in points:
        if math.isinf(point.record.value):
            spelled = "inf" if point.record.value > 0 else "-inf"
            found.setdefault(point.name, {}).setdefault(spelled, point.step)
    return found


def chunk(
    items: Sequence[_Item], sizes: Iterable[int], max_count: int, max_bytes: int = MAX_BYTES
) -> Iterator[Sequence[_Item]]:
    """Cut into parts that one request can hold, in order.

    Args:
        items: What to cut.
        sizes: Bytes of each item.
        max_count: Most items of a part.
        max_bytes: Most bytes of a part; a larger item is a part of its own.
    """
    begin = total = 0
    for position, size in enumerate(sizes):
        if position > begin and (position - begin >= max_count or total + size > max_bytes):
            yield items[begin:position]
            begin, total = position, 0
        total += size
    if begin < len(items):
        yield items[begin:]
