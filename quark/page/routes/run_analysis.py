"""The analysis of one run: how it is computed, here or in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from quark_core.errors import RunNotFoundError, SessionStoreError
from quark_core.hosting.child_process import ChildGone, ChildProcess
from quark_core.hosting.protocol import Reply, load_value
from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord, format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quark.analysis.rule import Verdict
    from quark.page.routes.page_source import PageSource
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


_MODULE = "quark.page.routes.analysis_worker"
_TITLE = "the analyses"
# Of one core; and no more address space than they need.
_SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisLimits:
    """What an analysis may take.

    Attributes:
        memory_bytes: What it may have beside what its process has before the first one.
        time_s: How long it may last; the start of the process, where there has to be one, counts.
        kept_bytes: A process that has held more than this is not kept for the next one.
    """

    memory_bytes: int = 1024 * _MIB
    time_s: float = 120.0
    kept_bytes: int = 256 * _MIB


class AnalyzeRun(msgspec.Struct, frozen=True):
    """Asks for an analysis, or for a comparison.

    Attributes:
        run_id: The run; "" to load what an analysis needs, and no more.
        pair: What is compared, in place of the analysis of a run, or None.
        storage_dir: The storage root.
        backend: Name or URI of the backend that is read in place of its store, or None.
        memory_bytes: As `AnalysisLimits` has it.
        import_path: `sys.path` of the process that asks.
        opener, argument: As `Reopening` has them; "" where root and backend say what to open.
    """

    run_id: str
    pair: ComparedPair | None
    storage_dir: str
    backend: str | None
    memory_bytes: int
    import_path: tuple[str, ...]
    opener: str = ""
    argument: str = ""


class _NoResult(SessionStoreError):
    """An analysis or a comparison that has come to no result here; the message says why."""


class AnalysisProcess:
    """One process, started when it is needed and kept until `rest`; see `RunAnalyzer`.

    Args:
        source: What is looked at; the process opens it once more.
        limits: What an analysis may take.
    """

    def __init__(self, source: PageSource, limits: AnalysisLimits | None = None) -> None:
        self._source = source
        self._limits = limits or AnalysisLimits()
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Id of the process, where there is one."""
        child = self._child
        return None if child is None else child.pid

    def analyze(self, run_id: str) -> Analysis:
        """See `RunAnalyzer`."""
        try:
            found = self._ask(run_id)
        except _NoResult as error:
            return Analysis(state="failed", note=str(error))
        count, without_data = found.pop("coverage")
        return Analysis(**found, coverage=RuleCoverage(count=count, without_data=without_data))

    def compare(self, pair: ComparedPair) -> dict[str, Any]:
        """See `RunAnalyzer`."""
        found: dict[str, Any] = msgspec.json.decode(self._ask("", pair))
        return found

    def prepare(self) -> None:
        """See `RunAnalyzer`; what goes wrong is told by the next analysis."""
        with suppress(SessionStoreError):
            self._ask("")

    def rest(self) -> None:
        """See `RunAnalyzer`: the process ends."""
        self._give_up(self._child)

    def close(self) -> None:
        """See `RunAnalyzer`: the process is killed."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end(wait_s=0.0)

    def _ask(self, run_id: str, pair: ComparedPair | None = None) -> Any:
        """Return the findings of the process: the parts of an `Analysis`, or a comparison as JSON.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read, or there is no result.
        """
        reopening, limits = self._source.reopening, self._limits
        message = AnalyzeRun(
            run_id=run_id,
            pair=pair,
            storage_dir=str(self._source.storage_dir),
            backend=self._source.specification,
            memory_bytes=limits.memory_bytes,
            import_path=tuple(sys.path),
            opener="" if reopening is None else reopening.opener,
            argument="" if reopening is None else reopening.argument,
        )
        what, does = (
            ("its analysis", "analyzes") if pair is None else ("the comparison", "compares")
        )
        offer = f"quark analyze {run_id}" if pair is None else "quark compare"
        unbounded = f"; `{offer}` does not have these limits"
        try:
            reply = self._find_child().request(message, Reply, limits.time_s)
        except OSError as error:
            reason = error.strerror or str(error)
            raise _NoResult(f"the process that {does} cannot be started: {reason}") from error
        except ChildGone as error:
            self._give_up(self._child)
            if error.was_late:
                said = f"{what} was stopped after {limits.time_s:g} s, its time limit"
            elif error.exit_status is None:
                raise _NoResult(f"the process that {does} cannot be used: {error}") from error
            else:
                ended = _describe_exit(error.exit_status)
                said = f"the process that {does} ended unexpectedly ({ended})"
            raise _NoResult(said + unbounded) from error
        if reply.outcome == "ok":
            found, peak_bytes = load_value(reply.value)
            if peak_bytes > limits.kept_bytes:
                self.rest()
            return found
        self.rest()
        match reply.outcome:
            case "no_run":
                raise RunNotFoundError(reply.text)
            case "unreadable":
                raise SessionStoreError(reply.text)
            case "no_memory":
                mib = limits.memory_bytes / _MIB
                raise _NoResult(f"{what} requires more than its limit of {mib:.0f} MiB{unbounded}")
        raise _NoResult(reply.text)

    def _find_child(self) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise ChildGone("the page is closed")
            if self._child is None:
                environment = {**os.environ, **dict.fromkeys(_SINGLE, "1")}
                self._child = ChildProcess(_MODULE, _TITLE, None, environment)
            return self._child

    def _give_up(self, child: ChildProcess | None) -> None:
        with self._lock:
            if child is None or child is not self._child:
                return
            self._child = None
        child.end()


def _describe_exit(status: int) -> str:
    if status == -9:
        return "killed, perhaps because the machine ran out of memory"
    return f"by signal {-status}" if status < 0 else f"exit status {status}"
