"""Whether a mirror has as many records of a run as its primary: by metric, and by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import asdict, dataclass, field
from typing import Any

from quark_core.backends.contract import SupportsGenerations, SupportsRead
from quark_core.delivery.journal import split_generation
from quark_core.errors import RunNotFoundError, UnknownKindError
from quark_core.records import RECORD_TYPES, LifecycleRecord, MetricRecord
from quark_core.records.query import Query

_ALL = Query(all_attempts=True)


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """How many records a backend has of a run.

    Attributes:
        kinds: Kind -> records; what travels as lifecycle, and the outputs of analyzers, left out.
        metrics: Metric key -> points.
        outputs: Kind -> generation (its `writer_id`) -> records. Of a primary those that
            readers see; a mirror has those of earlier generations too.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, dict[str, int]] = field(default_factory=dict)


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
    for kind in _list_kinds():
        try:
            columns = reader.read(run_id, kind, _ALL)
        except UnknownKindError:
            continue  # the server does not have the plugin
        counts.kinds[kind] = columns.count
        if kind == MetricRecord.KIND and columns.count:
            keys, points = np.unique(columns["metric_key"].astype(str), return_counts=True)
            counts.metrics.update(zip(keys.tolist(), points.tolist(), strict=True))
        if RECORD_TYPES[kind].IS_ANALYSIS:
            writers = Counter(columns["writer_id"].tolist())
            outputs = {w: n for w, n in writers.items() if split_generation(w) is not None}
            counts.kinds[kind] -= sum(outputs.values())
            asked: object = reader
            if isinstance(asked, SupportsGenerations):
                stored = asked.read_outputs(run_id, kind)
                outputs = dict(Counter(stored["writer_id"].tolist()))
            counts.outputs[kind] = outputs
    return counts


def compare_counts(
    primary: RecordCounts,
    mirror: SupportsRead,
    run_id: str,
    backend: str,
    sent: Set[str] = frozenset(),
) -> Comparison:
    """Hold a mirror against what was counted in the primary.

    Of the outputs of analyzers those are compared that readers of the primary see.

    Args:
        primary: Counts of the primary.
        mirror: The mirror, opened for reading.
        run_id: The run.
        backend: How to ask for the mirror.
        sent: Generations that the mirror was sent: a kind of which it was sent all, and
            has nothing, is one that it does not keep.

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
    kinds = {kind: (primary.kinds.get(kind, 0), found.kinds.get(kind, 0)) for kind in _list_kinds()}
    for kind in (kind for kind in kinds if RECORD_TYPES[kind].IS_ANALYSIS):
        visible, theirs = primary.outputs.get(kind, {}), found.outputs.get(kind, {})
        has, got = kinds[kind]
        got += sum(count for writer, count in theirs.items() if writer in visible)
        kinds[kind] = has + sum(visible.values()), got
    not_kept = tuple(
        kind
        for kind, (has, got) in kinds.items()
        if has
        and not got
        and kind != MetricRecord.KIND
        and primary.outputs.get(kind, {}).keys() <= sent
    )
    if not any(got for _, got in kinds.values()):
        not_kept = ()  # it has nothing at all of the run, which is no choice of its
    return Comparison(
        backend=backend,
        metrics={key: pair for key, pair in metrics.items() if pair[0] != pair[1]},
        kinds={k: pair for k, pair in kinds.items() if pair[0] != pair[1] and k not in not_kept},
        not_kept=not_kept,
        compared=sum(has for kind, (has, _) in kinds.items() if kind not in not_kept),
    )


def _list_kinds() -> list[str]:
    return [kind for kind in RECORD_TYPES if kind != LifecycleRecord.KIND]
