"""Whether a mirror has as many records of a run as its primary: by metric, and by kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from quark_core.backend import SupportsRead
from quark_core.errors import RunNotFoundError
from quark_core.query import Query
from quark_core.records import ANALYSIS_TYPES, RECORD_TYPES, LifecycleRecord, MetricRecord

__all__ = ["Comparison", "RecordCounts", "compare_counts", "count_records"]

_ALL = Query(all_attempts=True)
_KINDS = tuple(
    kind
    for kind, record_type in RECORD_TYPES.items()
    if record_type is not LifecycleRecord and record_type not in ANALYSIS_TYPES
)


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """How many records a backend has of a run.

    Attributes:
        kinds: Kind -> records; what analyzers made and what travels as lifecycle left out.
        metrics: Metric key -> points.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a mirror has against what the primary has.

    Attributes:
        backend: How to ask for the mirror.
        metrics: Metric key -> (points in the primary, in the mirror), where they differ.
        kinds: Kind -> the same for its records, where they differ.
        not_kept: Kinds that the primary has and the mirror has nothing of.
        compared: How many records of the primary were compared.
        refusal: Why nothing could be compared, or None.
    """

    backend: str
    metrics: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    not_kept: tuple[str, ...] = ()
    compared: int = 0
    refusal: str | None = None

    @property
    def equal(self) -> bool:
        """Whether the mirror has all of every kind that it keeps, and all metrics."""
        return self.refusal is None and not self.metrics and not self.kinds

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {**asdict(self), "equal": self.equal}


def count_records(reader: SupportsRead, run_id: str) -> RecordCounts:
    """Count what a backend has of a run, hidden and non-finite points included.

    Raises:
        RunNotFoundError: It has no such run.
        SessionStoreError: It cannot be read.
    """
    import numpy as np

    counts = RecordCounts()
    for kind in _KINDS:
        columns = reader.read(run_id, kind, _ALL)
        counts.kinds[kind] = columns.count
        if kind == MetricRecord.KIND and columns.count:
            keys, points = np.unique(columns["metric_key"].astype(str), return_counts=True)
            counts.metrics.update(zip(keys.tolist(), points.tolist(), strict=True))
    return counts


def compare_counts(
    primary: RecordCounts, mirror: SupportsRead, run_id: str, backend: str
) -> Comparison:
    """Hold a mirror against what was counted in the primary.

    Args:
        primary: Counts of the primary.
        mirror: The mirror, opened for reading.
        run_id: The run.
        backend: How to ask for the mirror.

    Raises:
        SessionStoreError: The mirror cannot be read.
    """
    try:
        found = count_records(mirror, run_id)
    except RunNotFoundError:
        found = RecordCounts()
    metrics = {
        key: (primary.metrics.get(key, 0), found.metrics.get(key, 0))
        for key in sorted({*primary.metrics, *found.metrics})
    }
    kinds = {kind: (primary.kinds.get(kind, 0), found.kinds.get(kind, 0)) for kind in _KINDS}
    not_kept = tuple(
        kind for kind, (has, got) in kinds.items() if has and not got and kind != MetricRecord.KIND
    )
    if not any(found.kinds.values()):
        not_kept = ()  # it has nothing at all of the run, which is no choice of its
    return Comparison(
        backend=backend,
        metrics={key: pair for key, pair in metrics.items() if pair[0] != pair[1]},
        kinds={k: pair for k, pair in kinds.items() if pair[0] != pair[1] and k not in not_kept},
        not_kept=not_kept,
        compared=sum(count for kind, count in primary.kinds.items() if kind not in not_kept),
    )
