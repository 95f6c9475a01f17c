"""Records as MLflow metric points, under names that MLflow accepts.

What the curves are called, `quark_backends.mirror_records` says. Of layers and
parameters the worst of each step become curves.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from quark_backends.mirror_records import ALERT_LEVELS, MlflowCurves, find_raised_rule
from quark_backends.mirror_state import replace_file
from quark_core.api import (
    EventRecord,
    HealthScoreRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    StreamRecord,
    decode_name,
)

# Names that MLflow takes, and the map between them and Quark's keys.
#
# MLflow takes letters and digits of any script, `_`, `.`, `-`, space and `/`,
# in at most 250 characters, and no name that a path would resolve to another.
# A key is first decoded to what the user wrote, then encoded:
#
# val/AR@100   -> val/AR_at_100
# top 5 %      -> top 5 _pct_
# a//b:c       -> a/b_x3a_c
# over 250     -> its first 230 characters, _h_ and 12 hex digits of its SHA-256
#
# Two keys that come out the same stay apart, also where the database compares
# without regard to case or accents: the later one gets the `_h_` ending.

MAX_NAME_LENGTH = 250
NAME_MAP_VERSION = 1
_KEPT_LENGTH = 230
_SPELLED = {"@": "_at_", "%": "_pct_"}
# ":" is left out: a server on Windows refuses it.
_ILLEGAL = re.compile(r"[^\w.\- ]")


def encode_name(name: str) -> str:
    """Map any text to a name that MLflow takes; two texts may come out the same."""
    segments = [segment for segment in unicodedata.normalize("NFC", name).split("/") if segment]
    encoded = "/".join(map(_encode_segment, segments)) or "_"
    return encoded if len(encoded) <= MAX_NAME_LENGTH else _end_in_hash(encoded, name)


class NameMap:
    """Keys and the names they have in MLflow, kept in a file; a name never changes.

    Args:
        path: The file. The mirrors of several processes of one run share it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, dict[str, str]] = {}
        self._taken: dict[str, set[str]] = {}
        self._load()

    def find(self, group: str, wanted: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Names of keys, given now where there were none.

        Args:
            group: What the keys are of: names of two groups may be the same.
            wanted: Each key with the text that its name is made from.

        Returns:
            Key -> name, for every key of the group so far.
        """
        names = self._names.setdefault(group, {})
        new = {key: text for key, text in wanted if key not in names}
        if new:
            self._load()
            names = self._names.setdefault(group, {})
            taken = self._taken.setdefault(group, set())
            for key, text in new.items():
                if key not in names:
                    names[key] = self._choose(key, text, taken)
            replace_file(self._path, msgspec.json.encode(self._names))
        return names

    @property
    def has_changes(self) -> bool:
        """Whether a metric has another name in MLflow than the user gave it."""
        names = self._names.get("metrics", {})
        return any(decode_name(key.removeprefix("=")) != name for key, name in names.items())

    def to_dict(self) -> dict[str, Any]:
        """Keys and names of every group and process, and the version of this form."""
        self._load()
        return {"version": NAME_MAP_VERSION, **self._names}

    @staticmethod
    def _choose(key: str, text: str, taken: set[str]) -> str:
        name = encode_name(text)
        if _fold(name) in taken:
            name = _end_in_hash(name, key)
        taken.add(_fold(name))
        return name

    def _load(self) -> None:
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, str]])
        except (FileNotFoundError, msgspec.DecodeError):
            return
        for group, names in saved.items():
            # What was given here stays, though another process may have written over it.
            self._names[group] = {**names, **self._names.get(group, {})}
        self._taken = {group: set(map(_fold, m.values())) for group, m in self._names.items()}


def _encode_segment(segment: str) -> str:
    if segment in (".", ".."):
        return "_x2e_" * len(segment)
    return _ILLEGAL.sub(lambda match: _SPELLED.get(match[0], f"_x{ord(match[0]):02x}_"), segment)


def _end_in_hash(name: str, source: str) -> str:
    digest = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{name[:_KEPT_LENGTH]}_h_{digest}"


def _fold(name: str) -> str:
    """What is equal to the most forgiving collation of a database."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in plain if not unicodedata.combining(c)).rstrip()


MAX_POINTS = 1000
MAX_BYTES = 800_000
"""Servers take requests up to 1 MB, and so do proxies before them."""
_POINT_BYTES = 150
DERIVED_MARK = "="
"""Begins the key of a value that is of no metric; no metric's key begins so."""
_SYSTEM = f"{DERIVED_MARK}system/"

# Points know their rank, so that it is no part of these names.
_CURVES = MlflowCurves()
# Updates of about a thousandth of a parameter are the usual advice.
_USUAL_UPDATE_RATIO = 1e-3

CurveValue = tuple[str, float, StreamRecord]
"""Name as text, value, and the record that it is of."""

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
    is_derived = record.metric_key.startswith(DERIVED_MARK)
    text = record.metric_key[1:] if is_derived else decode_name(record.metric_key)
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


def list_values(kind: str, records: Sequence[Any], most: int) -> Iterator[CurveValue]:
    """The values of a batch that are shown as curves, in order; the same at each call.

    Of layers and parameters these are the worst of each step.

    Args:
        kind: Their kind; one that has figures, or phases.
        records: The batch's records.
        most: How many layers or parameters of each step are shown.
    """
    if kind == LayerSummaryRecord.KIND:
        records = _keep_worst(records, most, _layer_name, _rate_layer)
    elif kind == ParameterSummaryRecord.KIND:
        records = _keep_worst(records, most, _parameter_name, _rate_parameter)
    for record in records:
        if isinstance(record, PhaseRecord):
            yield _CURVES.phase_index(), float(record.sequence), record
        for name, value in _CURVES.list_plain(record):
            yield name, value, record


def count_events(
    records: Sequence[EventRecord], counts: dict[str, int]
) -> Iterator[tuple[str, float, EventRecord]]:
    """How many events of each severity there were, once for each severity in a batch.

    Args:
        records: The batch's events.
        counts: Severity -> how many the writer had before; brought up to date.
    """
    last: dict[str, EventRecord] = {}
    for record in records:
        counts[record.severity] = counts.get(record.severity, 0) + 1
        last[record.severity] = record
    for severity, record in last.items():
        yield _CURVES.event_count(severity), float(counts[severity]), record


def list_raised_alerts(records: Sequence[EventRecord]) -> Iterator[CurveValue]:
    """The alerts that a monitor has raised, which come as events while the run goes on."""
    for record in records:
        rule_id = find_raised_rule(record)
        if rule_id is not None:
            yield _CURVES.alert(rule_id), float(ALERT_LEVELS.get(record.severity, 0)), record


def make_metric(name: str, value: float, record: Any) -> MetricRecord:
    """A metric record of a value of a curve, with the identity, time and step of its source."""
    step = getattr(record, "step", getattr(record, "step_start", None))
    epoch = getattr(record, "epoch", getattr(record, "epoch_start", None))
    if isinstance(record, HealthScoreRecord):
        # A score is of the whole run so far: what tells two of them apart is the analysis.
        generation = record.writer_id.rpartition(".")[2]
        step = int(generation) if generation.isdecimal() else record.sequence
    key = f"{DERIVED_MARK}{name}"
    return MetricRecord(
        record.run_id,
        record.writer_id,
        record.attempt,
        record.rank,
        record.sequence,
        record.time_us,
        key,
        None,
        key,
        value,
        step,
        epoch,
    )


def _keep_worst(
    records: Sequence[Any], most: int, name_of: Callable[[Any], str], rate: Callable[[Any], float]
) -> list[Any]:
    """Of each step those of the worst names; of equally bad ones those that came first."""
    worst: dict[tuple[object, object], dict[str, float]] = {}
    for record in records:
        rated = worst.setdefault((record.step, record.epoch), {})
        name = name_of(record)
        rated[name] = max(rated.get(name, 0.0), rate(record))
    kept = {
        at: frozenset(sorted(rated, key=lambda name, rated=rated: -rated[name])[:most])  # type: ignore[misc]
        for at, rated in worst.items()
    }
    return [one for one in records if name_of(one) in kept[one.step, one.epoch]]


def _rate_layer(record: LayerSummaryRecord) -> float:
    bad = (record.nan_count or 0) + (record.inf_count or 0)
    shares = (record.dead_unit_ratio or 0.0, record.saturation_ratio or 0.0)
    # Tenths: smaller differences must not make curves come and go.
    return 100.0 if bad else float(int(10 * max(shares)))


def _rate_parameter(record: ParameterSummaryRecord) -> float:
    if record.non_finite_value_count or record.non_finite_gradient_count:
        return 100.0
    ratio = record.update_to_parameter_ratio
    if ratio is None:
        return 0.0
    # Orders of magnitude, whole ones, likewise.
    return float(int(abs(math.log10(max(ratio, 1e-12) / _USUAL_UPDATE_RATIO))))


def _layer_name(record: LayerSummaryRecord) -> str:
    return record.module_name or "model"


def _parameter_name(record: ParameterSummaryRecord) -> str:
    return record.parameter_name
