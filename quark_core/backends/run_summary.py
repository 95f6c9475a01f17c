"""What is known of a run without reading its points, also out of the dicts of `to_dict()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from quark_core.backends.contract import StoredRun
from quark_core.presentation import bundle, paint
from quark_core.records.names import decode_name, encode_name

T = TypeVar("T")


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


class MetricSummaries(Mapping[str, MetricSummary]):
    """Metrics of a run by stored key, which are also found by the name as it was logged.

    It iterates over the stored keys in the order of `stored`, and is equal to
    a mapping with the same stored keys and summaries.

    Args:
        stored: Stored key -> summary.
    """

    __slots__ = ("_stored",)

    def __init__(self, stored: Mapping[str, MetricSummary]) -> None:
        self._stored = stored

    def __getitem__(self, key: str) -> MetricSummary:
        try:
            return self._stored[key]
        except KeyError:
            # As readers do: a name that decodes to something else is itself a stored form.
            if not isinstance(key, str) or decode_name(key) != key:
                raise
        try:
            return self._stored[encode_name(key)]
        except KeyError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __repr__(self) -> str:
        return repr(dict(self._stored))

    def __reduce__(self) -> tuple[type[MetricSummaries], tuple[dict[str, MetricSummary]]]:
        # As a plain dict: what a store made of its rows need not be known where it is read.
        return MetricSummaries, (dict(self._stored),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run with its metrics summed up.

    Attributes:
        stored: The run as the store knows it.
        newest_step: Highest step of a metric, or None.
        last_metric_at: Time of the latest of its metrics' newest points, or None.
        metrics: Stored key -> summary, sorted by key. A metric is also found
            by its name as it was logged: `metrics["train/acc@1"]`.
        fingerprints: Key -> digest of its newest fingerprints, where a search that reads
            runs one by one has asked for them; no part of what is told of a run.
    """

    stored: StoredRun
    newest_step: int | None = None
    last_metric_at: str | None = None
    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.metrics, MetricSummaries):
            object.__setattr__(self, "metrics", MetricSummaries(self.metrics))

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

    def __repr__(self) -> str:
        run = self.stored.run
        name = f" {run.name!r}" if run.name else ""
        project = f"project {run.project_name!r}"
        return (
            f"RunSummary({self.run_id}{name}, {project}, {self.state}, {len(self.metrics)} metrics)"
        )

    def _repr_html_(self) -> str | None:
        return paint(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            **self.stored.to_dict(),
            "newest_step": self.newest_step,
            "last_metric_at": self.last_metric_at,
            "metrics": {key: asdict(metric) for key, metric in self.metrics.items()},
        }


class RunsFound(tuple[RunSummary, ...]):
    """The runs that a search has found: a tuple, which a notebook shows as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = [(each.stored.run.name or each.run_id)[:40] for each in self[:3]]
        more = f" and {len(self) - 3:,} more" if len(self) > 3 else ""
        return f"RunsFound({', '.join(map(repr, names))}{more})"

    def _repr_html_(self) -> str | None:
        return paint(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)
