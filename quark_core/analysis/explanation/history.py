"""The runs of a project, each with its traits and the end of one metric: what history knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quark_core.analysis.explanation.traits import RunTraits, describe_traits, encode_value
from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_summary import RunSummary
from quark_core.records.run_digests import digest_config
from quark_core.runs.searching import build_search, find_runs

__all__ = ["PastRun", "load_history", "select_alike"]

_MOST_RUNS = 2_000


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run of the project.

    Attributes:
        run_id: The run.
        traits: What it was made of.
        value: The metric's last value, or None where it has none that is finite.
        first: Its first value, likewise.
        state: Its status, or lost.
        config_digest: Of its configuration without seeds, or None without one.
        code: What tells its code, or None.
        seed: Its seeds as a text, or None.
    """

    run_id: str
    traits: RunTraits
    value: float | None
    first: float | None
    state: str
    config_digest: str | None
    code: bytes | None
    seed: bytes | None

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end and has the metric."""
        return self.state == "completed" and self.value is not None


def load_history(reader: SupportsRead, project: str, metric_key: str | None) -> list[PastRun]:
    """The newest runs of a project, newest first, without reading a point.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    found = find_runs(reader, build_search(project=project, limit=_MOST_RUNS))
    return [_make(each, metric_key) for each in found]


def _make(summary: RunSummary, metric_key: str | None) -> PastRun:
    stored = summary.stored
    traits = describe_traits(stored)
    metric = None if metric_key is None else summary.metrics.get(metric_key)
    digest = stored.digests.config
    if digest is None and stored.config is not None:
        digest = digest_config(stored.config.values)
    return PastRun(
        summary.run_id,
        traits,
        None if metric is None else metric.last,
        None if metric is None else metric.first,
        stored.state,
        digest,
        _encode(traits, "code"),
        _encode(traits, "seed"),
    )


def _encode(traits: RunTraits, kind: str) -> bytes | None:
    values = [(place, value) for (of, place), value in traits.values.items() if of == kind]
    return encode_value(sorted(values, key=lambda item: item[0])) if values else None


def select_alike(history: Sequence[PastRun], run: PastRun) -> list[PastRun]:
    """Runs of the same configuration and code, the run itself included."""
    return [
        other
        for other in history
        if run.config_digest is not None
        and other.config_digest == run.config_digest
        and other.code == run.code
    ]
