"""What is known of a run without reading its points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quark_core.backend import StoredRun

__all__ = ["MetricSummary", "RunSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """One metric of one run, over the points that readers see by default.

    Attributes:
        key: Its stored key.
        count: How many points it has.
        non_finite: How many of them are NaN or infinite.
        first, last: Value of the first and of the newest point in persistence
            order; None where that is not finite.
        low, high: Smallest and largest finite value, or None where there is none.
        last_step: Step of the newest point, or None.
    """

    key: str
    count: int
    non_finite: int
    first: float | None
    last: float | None
    low: float | None
    high: float | None
    last_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run with its metrics summed up.

    Attributes:
        stored: The run as the store knows it.
        newest_step: Highest step of a metric, or None.
        metrics: Stored key -> summary, sorted by key.
    """

    stored: StoredRun
    newest_step: int | None = None
    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.stored.run.id or ""

    @property
    def state(self) -> str:
        """The run's status, or "lost"."""
        return self.stored.state

    @property
    def config(self) -> Mapping[str, Any]:
        """The newest attempt's configuration; empty where there is none."""
        return {} if self.stored.config is None else self.stored.config.values

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            **self.stored.to_dict(),
            "newest_step": self.newest_step,
            "metrics": {key: asdict(metric) for key, metric in self.metrics.items()},
        }
