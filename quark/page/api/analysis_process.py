"""Computes analyses in a process of their own: a run that is too large ends that, not the page."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quark.page.api.run_analysis import Analysis, ComparedPair, RuleCoverage
from quark_core.errors import RunNotFoundError, SessionStoreError
from quark_core.hosting.child_process import ChildGone, ChildProcess
from quark_core.hosting.protocol import load_value

if TYPE_CHECKING:
    from quark.page.api.source import PageSource

_MODULE = "quark.page.api.analysis_worker"
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


class AnalysisReply(msgspec.Struct, frozen=True):
    """What became of it.

    Attributes:
        outcome: `ok`, `no_run`, `unreadable`, `no_memory` or `failed`.
        text: What the error says.
        at, phase_notes, note: As `Analysis` has them.
        records: What `dump_value` made of its alerts, scores and phases.
        rules, without_data: Its coverage.
        comparison: The result of a comparison, as JSON.
        peak_bytes: The most memory that the process has held; 0 where nobody knows.
    """

    outcome: str = "ok"
    text: str = ""
    at: str | None = None
    phase_notes: tuple[str, ...] = ()
    note: str | None = None
    records: bytes = b""
    rules: int = 0
    without_data: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    comparison: bytes = b""
    peak_bytes: int = 0


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
            reply = self._ask(run_id)
        except OSError as error:
            reason = error.strerror or str(error)
            return _fail(f"the process that analyzes cannot be started: {reason}")
        except ChildGone as error:
            self._give_up(self._child)
            return _fail(self._explain(error, run_id))
        if reply.outcome != "ok" or reply.peak_bytes > self._limits.kept_bytes:
            self.rest()
        match reply.outcome:
            case "ok":
                return _read(reply)
            case "no_run":
                raise RunNotFoundError(reply.text)
            case "unreadable":
                raise SessionStoreError(reply.text)
            case "no_memory":
                return _fail(
                    f"its analysis needs more than the {self._limits.memory_bytes / _MIB:.0f} MiB "
                    f"that it has here; {_offer(run_id)}"
                )
        return _fail(reply.text)

    def compare(self, pair: ComparedPair) -> dict[str, Any]:
        """See `RunAnalyzer`."""
        try:
            reply = self._ask("", pair)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SessionStoreError(
                f"the process that compares cannot be started: {reason}"
            ) from error
        except ChildGone as error:
            self._give_up(self._child)
            raise SessionStoreError(_tell_lost(error, self._limits)) from error
        if reply.outcome != "ok" or reply.peak_bytes > self._limits.kept_bytes:
            self.rest()
        match reply.outcome:
            case "ok":
                found: dict[str, Any] = msgspec.json.decode(reply.comparison)
                return found
            case "no_run":
                raise RunNotFoundError(reply.text)
            case "no_memory":
                raise SessionStoreError(
                    f"the comparison needs more than the {self._limits.memory_bytes / _MIB:.0f} "
                    "MiB that it has here; `quark compare` has no such bounds"
                )
        raise SessionStoreError(reply.text)

    def prepare(self) -> None:
        """See `RunAnalyzer`; what goes wrong is told by the next analysis."""
        try:
            self._ask("")
        except (OSError, ChildGone):
            self._give_up(self._child)

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

    def _ask(self, run_id: str, pair: ComparedPair | None = None) -> AnalysisReply:
        reopening = self._source.reopening
        message = AnalyzeRun(
            run_id=run_id,
            pair=pair,
            storage_dir=str(self._source.storage_dir),
            backend=self._source.specification,
            memory_bytes=self._limits.memory_bytes,
            import_path=tuple(sys.path),
            opener="" if reopening is None else reopening.opener,
            argument="" if reopening is None else reopening.argument,
        )
        return self._find_child().request(message, AnalysisReply, self._limits.time_s)

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

    def _explain(self, error: ChildGone, run_id: str) -> str:
        if error.was_late:
            return (
                f"its analysis was ended after {self._limits.time_s:g} s, which is all that it "
                f"has here; {_offer(run_id)}"
            )
        if error.exit_status is None:
            return f"the process that analyzes cannot be used: {error}"
        return (
            f"the process that analyzes ended in the middle of it "
            f"({_describe_exit(error.exit_status)}); {_offer(run_id)}"
        )


def _tell_lost(error: ChildGone, limits: AnalysisLimits) -> str:
    """Why a comparison has no result."""
    if error.was_late:
        return (
            f"the comparison was ended after {limits.time_s:g} s, which is all that it has here; "
            "`quark compare` has no such bounds"
        )
    status = error.exit_status
    said = str(error) if status is None else _describe_exit(status)
    return f"the process that compares ended in the middle of it ({said})"


def _read(reply: AnalysisReply) -> Analysis:
    alerts, scores, phases = load_value(reply.records)
    return Analysis(
        state="computed",
        at=reply.at,
        alerts=alerts,
        scores=scores,
        phases=phases,
        phase_notes=reply.phase_notes,
        coverage=RuleCoverage(count=reply.rules, without_data=reply.without_data),
        note=reply.note,
    )


def _fail(note: str) -> Analysis:
    return Analysis(state="failed", note=note)


def _offer(run_id: str) -> str:
    return f"`quark analyze {run_id}` has no such bounds"


def _describe_exit(status: int) -> str:
    if status == -9:
        return "killed, perhaps since the machine had no memory left"
    return f"by signal {-status}" if status < 0 else f"exit status {status}"
