"""Runs as a store knows them, without their points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from quark_core.presentation import bundle, paint
from quark_core.records import ConfigSnapshot, EnvironmentSnapshot, ProjectRecord, RunRecord
from quark_core.records.names import decode_name, encode_name
from quark_core.records.runs import RunDigests, RunEnding, RunProgress, StopRequest
from quark_core.records.sweeps import TrialClaim

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as a store knows it.

    Attributes:
        project: Its project.
        run: Its record, with the stored status.
        state: The status, or "lost" where the status still says running but
            the process is gone.
        config: The newest attempt's configuration, or None.
        environment: The newest attempt's environment, or None.
        heartbeat_at: When the newest attempt was last heard of, or None.
        lost_reason: Why the run counts as lost, or None.
        exit_code: Status with which the newest attempt's process ended, where that ended
            the run; None where it ended before, by a signal, or nobody can say.
        ending: Why the newest attempt ended before its program was through, where the
            system reveals it; None for a run that goes on or has completed.
        stop: That somebody has asked its newest attempt to stop, the first to do so; or None.
        fields: What was noted of it in fields, by name.
        digests: What it was made of, where the store knows.
        progress: How far its newest attempt has said to have come, or None.
        trial: The claim by which it has a trial of a sweep, or None.
        superseded: Whether somebody has claimed that trial since.
    """

    project: ProjectRecord
    run: RunRecord
    state: str
    config: ConfigSnapshot | None = None
    environment: EnvironmentSnapshot | None = None
    heartbeat_at: str | None = None
    lost_reason: str | None = None
    exit_code: int | None = None
    ending: RunEnding | None = None
    stop: StopRequest | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    digests: RunDigests = field(default_factory=RunDigests)
    progress: RunProgress | None = None
    trial: TrialClaim | None = None
    superseded: bool = False

    def __post_init__(self) -> None:
        if self.ending is None and self.state == "lost":
            vanished = RunEnding("vanished", self.lost_reason or "its process has ended")
            object.__setattr__(self, "ending", vanished)

    @property
    def is_broken_off(self) -> bool:
        """Whether the run has ended, and not by completing."""
        return self.state in ("failed", "interrupted", "lost")

    def describe_end(self) -> str:
        """The state and its cause in one line: `failed: ZeroDivisionError: division by zero`."""
        return self.state if self.ending is None else f"{self.state}: {self.ending.describe()}"

    def __repr__(self) -> str:
        name = f" {self.run.name!r}" if self.run.name else ""
        return f"StoredRun({self.run.id}{name}, project {self.project.name!r}, {self.state})"

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {each.name: _to_plain(getattr(self, each.name)) for each in fields(self)}


def measure_duration_s(stored: StoredRun, last_metric_at: str | None = None) -> float:
    """How long a run took, or has taken, in seconds.

    Args:
        stored: The run.
        last_metric_at: When its newest metric was logged. A lost run counts to
            its last sign of life: this, or its last heartbeat.
    """
    end = stored.run.ended_at
    if end is None and stored.state == "lost":
        beats = [moment for moment in (stored.heartbeat_at, last_metric_at) if moment is not None]
        end = max(beats, key=datetime.fromisoformat, default=None)
    stop = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
    return max(0.0, (stop - datetime.fromisoformat(stored.run.created_at)).total_seconds())


def _to_plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """Summary of one metric of a run.

    Points that a resumed attempt replaced are not included.

    Attributes:
        key: Stored key.
        count: Number of points.
        non_finite: Number of points that are NaN or infinite.
        first, last: First and newest value in order of storage, or None if not finite.
        low, high: Minimum and maximum of the finite values, or None.
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
    """Run with a summary of its metrics, as returned by a search.

    Attributes:
        stored: Stored record of the run.
        newest_step: Highest step of a metric, or None.
        last_metric_at: Time of the newest metric, or None.
        metrics: Key -> summary, sorted by key. A metric is also found by the name that was logged:
            `metrics["train/acc@1"]`.
        fingerprints: Key -> digest of the newest fingerprint, for searches that ask for it.
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
        """ID of the run."""
        return self.stored.run.id or ""

    @property
    def state(self) -> str:
        """Status of the run, or "lost"."""
        return self.stored.state

    @property
    def config(self) -> Mapping[str, Any]:
        """Config of the newest attempt; may be empty."""
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
        """Return the summary as a new dict of JSON values."""
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
