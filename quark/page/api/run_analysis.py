"""The analysis of one run as the page has it, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord, format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quark.analysis.rule import Verdict
    from quark_core.runs.run_reader import RunReader

_NOTE = "analyzed for this page; `quark analyze` stores it with the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCoverage:
    """Which rules could look at a run.

    Attributes:
        count: How many were asked.
        without_data: Of those that lacked what they need: id, reason, what was lacking.
    """

    count: int
    without_data: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    @classmethod
    def measure(cls, verdicts: Mapping[str, Verdict]) -> RuleCoverage:
        """That of an analysis, whose rules have said this by their ids."""
        lacking = tuple(
            (rule_id, verdict.reason, verdict.missing)
            for rule_id, verdict in sorted(verdicts.items())
            if verdict.state == "no_data"
        )
        return cls(count=len(verdicts), without_data=lacking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What analyzers say of one run.

    Attributes:
        state: `stored`, `computed` here, or `failed`.
        at: Time of the newest record that was looked at, or None.
        alerts, scores, phases: The outputs.
        phase_notes: Why there are no phases, and the like.
        coverage: Which rules could look; None where only the scores may say it.
        generation: Under which the alerts are stored, or None.
        note: What a reader should know of it, or None.
    """

    state: Literal["stored", "computed", "failed"]
    at: str | None = None
    alerts: tuple[AlertRecord, ...] = ()
    scores: tuple[HealthScoreRecord, ...] = ()
    phases: tuple[PhaseRecord, ...] = ()
    phase_notes: tuple[str, ...] = ()
    coverage: RuleCoverage | None = None
    generation: int | None = None
    note: str | None = None

    @property
    def mark(self) -> str:
        """Differs from that of any other analysis of the run."""
        counts = f"{len(self.alerts)}.{len(self.phases)}"
        return f"{self.state}.{self.generation or 0}.{self.at}.{counts}"


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two sides that are compared.

    Attributes:
        primary, reference: The ids of the runs of each.
        target: A metric, `at_least` or `at_most`, and a value, or None.
        explains: Whether it is asked why the primary is not as the reference is, rather than
            how the two differ.
        metric: The metric that is explained, or None for the one that the runs are about.
    """

    primary: tuple[str, ...]
    reference: tuple[str, ...]
    target: tuple[str, str, float] | None = None
    explains: bool = False
    metric: str | None = None


class RunAnalyzer(Protocol):
    """Computes analyses, one at a time; nothing is stored."""

    def analyze(self, run_id: str) -> Analysis:
        """The analysis of a run, of state `failed` with a note where there can be none.

        Raises:
            QuarkError: The run cannot be read.
        """

    def compare(self, pair: ComparedPair) -> dict[str, Any]:
        """What `ComparisonEngine` says of two sides, as a dict of JSON-like values.

        Raises:
            QuarkError: A run cannot be read, or there is too little memory or time.
        """

    def prepare(self) -> None:
        """Load what the next analysis needs."""

    def rest(self) -> None:
        """Give up what is kept for the next one."""

    def close(self) -> None:
        """The same, for good, from any thread; an analysis under way may end before it is done."""


class LocalAnalyzer:
    """Computes in the thread that asks, without bounds: a `RunAnalyzer` for commands.

    Args:
        open_run: Opens a run for reading.
    """

    def __init__(self, open_run: Callable[[str], RunReader]) -> None:
        self._open_run = open_run

    def analyze(self, run_id: str) -> Analysis:
        """See `RunAnalyzer`."""
        return analyze(self._open_run(run_id))

    def compare(self, pair: ComparedPair) -> dict[str, Any]:
        """See `RunAnalyzer`."""
        return compare(self._open_run, pair)

    def prepare(self) -> None:
        """See `RunAnalyzer`: there is nothing to do."""

    def rest(self) -> None:
        """See `RunAnalyzer`: there is nothing to do."""

    def close(self) -> None:
        """See `RunAnalyzer`: there is nothing to do."""


def analyze(run: RunReader) -> Analysis:
    """Analyze a run in this thread, and find its phases.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
        MemoryError: There is too little for it.
    """
    from quark.analysis.engine import analyze_run
    from quark.analysis.outputs import AnalysisTarget
    from quark.analysis.phases import analyze_phases

    # Bounded in memory, as far as it can be: of very long runs `RunData` keeps a sample.
    data = AnalysisTarget(run).load()
    result = analyze_run(data)
    phases = analyze_phases(data)
    return Analysis(
        state="computed",
        at=format_time(data.newest_us) if data.newest_us else None,
        alerts=result.alerts,
        scores=result.health_scores,
        phases=phases.phases,
        phase_notes=phases.notes,
        coverage=RuleCoverage.measure(result.verdicts),
        note=_NOTE,
    )


def compare(open_run: Callable[[str], RunReader], pair: ComparedPair) -> dict[str, Any]:
    """Compare two sides, or explain their difference, in this thread.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
        MemoryError: There is too little for it.
    """
    from quark.analysis.comparison.engine import ComparisonEngine
    from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec

    if pair.explains:
        return _explain(open_run, pair)
    targets: tuple[MetricTargetSpec, ...] = ()
    if pair.target is not None:
        key, direction, value = pair.target
        is_least = direction == "at_least"
        targets = (MetricTargetSpec(key, value, "at_least" if is_least else "at_most"),)
    primary, reference = list(map(open_run, pair.primary)), list(map(open_run, pair.reference))
    config = ComparisonEngineConfig(metric_targets=targets)
    return ComparisonEngine.compare_runs(primary, reference, config=config).to_dict()


def _explain(open_run: Callable[[str], RunReader], pair: ComparedPair) -> dict[str, Any]:
    from quark.analysis.explanation.engine import explain_change
    from quark.analysis.explanation.results import describe_change, list_rows, tell_ends

    before, after = list(map(open_run, pair.reference)), list(map(open_run, pair.primary))
    found = explain_change(before, after, pair.metric)
    rows = [
        {"label": row.label, "kind": row.kind, "place": row.place, "words": row.words}
        for row in list_rows(found)
    ]
    headline = " ".join((*tell_ends(found), describe_change(found)))
    return {**found.to_dict(), "headline": headline, "rows": rows}
