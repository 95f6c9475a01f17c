"""What is known of runs by analysis: what their stores keep, else what is computed here.

Nothing that is computed here is stored. One thread computes, one run after the other.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quark_core.backends.contract import SupportsGenerations
from quark_core.errors import QuarkError, RunNotFoundError
from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord, format_time, parse_time
from quark_core.records.times import now_us

if TYPE_CHECKING:
    from quark.page.api.source import PageSource
    from quark_core.analysis.rule import Verdict
    from quark_core.backends.run_summary import RunSummary

__all__ = ["Analysis", "AnalysisDesk"]

_log = logging.getLogger("quark")

_LIVE_EVERY_S = 60.0
_STORED_KEPT_S = 2.0
_EXIT_S = 60.0
_MOST_KEPT = 256
_MOST_WAITING = 64
# What is younger than this beside an analysis is on its way to the next one.
_STALE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What analyzers say of one run.

    Attributes:
        state: `stored`, `computed` here, or `failed`.
        at: Time of the newest record that was looked at, or None.
        alerts, scores, phases: The outputs.
        phase_notes: Why there are no phases, and the like.
        verdicts: What each rule said, by its id; None where that was not kept.
        generation: Under which the alerts are stored, or None.
        note: What a reader should know of it, or None.
    """

    state: Literal["stored", "computed", "failed"]
    at: str | None = None
    alerts: tuple[AlertRecord, ...] = ()
    scores: tuple[HealthScoreRecord, ...] = ()
    phases: tuple[PhaseRecord, ...] = ()
    phase_notes: tuple[str, ...] = ()
    verdicts: Mapping[str, Verdict] | None = None
    generation: int | None = None
    note: str | None = None

    @property
    def mark(self) -> str:
        """Differs from that of any other analysis of the run."""
        return f"{self.state}.{self.generation or 0}.{self.at}.{len(self.phases)}"


@dataclass(slots=True)
class _Computed:
    analysis: Analysis
    of: tuple[str, str | None]
    at_s: float = field(default_factory=time.monotonic)


class AnalysisDesk:
    """Finds the analyses of runs; every method may be called from any thread.

    Args:
        source: What is looked at.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._computed: OrderedDict[str, _Computed] = OrderedDict()
        self._stored: OrderedDict[str, tuple[float, Analysis | None]] = OrderedDict()
        self._waiting: set[str] = set()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def find(self, summary: RunSummary) -> Analysis | None:
        """What is known of a run now; nothing is computed for it.

        Raises:
            RunNotFoundError: There is no such run.
            SessionStoreError: The store cannot be read.
        """
        stored = self._read_stored(summary.run_id)
        if stored is not None:
            return _note_age(stored, summary)
        with self._lock:
            computed = self._computed.get(summary.run_id)
        return None if computed is None else computed.analysis

    def request(self, summary: RunSummary) -> Analysis | None:
        """The same, and have it computed where nothing is stored and what is known is old.

        Of a run that goes on it is computed once a minute; None where it will be there later.
        """
        found = self.find(summary)
        if found is not None and found.state == "stored":
            return found
        run_id, of = summary.run_id, (summary.state, summary.last_metric_at)
        with self._lock:
            known = self._computed.get(run_id)
            if known is not None:
                is_live = summary.state == "running"
                rests = is_live and time.monotonic() - known.at_s < _LIVE_EVERY_S
                if known.of == of or rests:
                    return known.analysis
            if run_id not in self._waiting and len(self._waiting) < _MOST_WAITING:
                self._waiting.add(run_id)
                self._start()
                self._queue.put(run_id)
        return found

    def is_computing(self, run_id: str) -> bool:
        """Whether a run waits for its analysis."""
        with self._lock:
            return run_id in self._waiting

    def close(self, timeout_s: float = 0.0) -> bool:
        """Compute no more; what is under way is waited for so long, and at the end of the process.

        Returns:
            Whether nothing is under way: before that what is read must not be closed.
        """
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._queue.put(None)
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        is_done = not thread.is_alive()
        if is_done:
            atexit.unregister(self.close)
        return is_done

    def _start(self) -> None:
        """Have the thread; the lock is held."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name="quark-page-analysis", daemon=True
            )
            self._thread.start()
            # The end of the interpreter closes connections, which would crash who reads by them.
            atexit.register(self.close, _EXIT_S)

    def _run(self) -> None:
        """The thread."""
        while (run_id := self._queue.get()) is not None and not self._closed:
            of: tuple[str, str | None] = ("", None)
            try:
                summary = self._source.summarize(run_id)
                of = summary.state, summary.last_metric_at
                analysis = self._compute(run_id)
            except RunNotFoundError:
                analysis = Analysis(state="failed", note="the run is gone")
            except QuarkError as error:
                analysis = Analysis(state="failed", note=str(error))
            except Exception as error:  # noqa: BLE001 - a plugin's rule may raise anything
                _log.exception("run %s cannot be analyzed", run_id)
                analysis = Analysis(state="failed", note=f"{type(error).__name__}: {error}")
            with self._lock:
                self._computed[run_id] = _Computed(analysis, of)
                self._computed.move_to_end(run_id)
                while len(self._computed) > _MOST_KEPT:
                    self._computed.popitem(last=False)
                self._waiting.discard(run_id)

    def _compute(self, run_id: str) -> Analysis:
        from quark_core.analysis.diagnosis import analyze_run
        from quark_core.analysis.outputs import AnalysisTarget
        from quark_core.analysis.phases import analyze_phases

        # Bounded in memory: of very long runs `RunData` keeps a sample.
        data = AnalysisTarget(self._source.open_run(run_id)).load()
        result = analyze_run(data)
        phases = analyze_phases(data)
        return Analysis(
            state="computed",
            at=format_time(data.newest_us) if data.newest_us else None,
            alerts=result.alerts,
            scores=result.health_scores,
            phases=phases.phases,
            phase_notes=phases.notes,
            verdicts=result.verdicts,
            note="analyzed for this page; `quark analyze` stores it with the run",
        )

    def _read_stored(self, run_id: str) -> Analysis | None:
        reader: object = self._source.reader
        if not isinstance(reader, SupportsGenerations):
            return None
        now_s = time.monotonic()
        with self._lock:
            kept = self._stored.get(run_id)
        if kept is not None and now_s - kept[0] < _STORED_KEPT_S:
            return kept[1]
        found = _read_outputs(reader, run_id)
        with self._lock:
            self._stored[run_id] = (now_s, found)
            self._stored.move_to_end(run_id)
            while len(self._stored) > _MOST_KEPT:
                self._stored.popitem(last=False)
        return found


def _read_outputs(reader: SupportsGenerations, run_id: str) -> Analysis | None:
    """What is stored of a run: of several analyzers the newest scores, and the alerts of all."""
    scores: Any = reader.read_outputs(run_id, HealthScoreRecord.KIND)
    if not scores.count:
        return None
    newest = scores["writer_id"][-1]
    for writer in dict.fromkeys(scores["writer_id"].tolist()):
        if str(writer).startswith("analyzer."):
            newest = writer
    records: Any = scores.take(scores["writer_id"] == newest).to_records()
    alerts: Any = reader.read_outputs(run_id, AlertRecord.KIND).to_records()
    phases: Any = reader.read_outputs(run_id, PhaseRecord.KIND)
    if phases.count:
        phases = phases.take(phases["writer_id"] == phases["writer_id"][-1])
    generation = str(newest).rpartition(".")[2]
    at_us = int(max(record.time_us for record in records))
    alerts = sorted(alerts, key=lambda alert: _SEVERITIES.index(alert.severity))
    return Analysis(
        state="stored",
        at=format_time(at_us) if at_us else None,
        alerts=tuple(alerts),
        scores=records,
        phases=tuple(phases.to_records()),
        generation=int(generation) if generation.isdigit() else None,
    )


_SEVERITIES = ("critical", "error", "warning", "info")


def _note_age(analysis: Analysis, summary: RunSummary) -> Analysis:
    """The analysis, with a note where the run has gone on for long since."""
    if analysis.at is None or summary.last_metric_at is None or analysis.note is not None:
        return analysis
    behind_s = (parse_time(summary.last_metric_at) - parse_time(analysis.at)) / 1e6
    if behind_s < _STALE_S:
        return analysis
    from dataclasses import replace

    age_s = max(0.0, (now_us() - parse_time(analysis.at)) / 1e6)
    return replace(
        analysis,
        note=f"this is what was stored {_tell_s(age_s)} ago; the run has logged "
        f"{_tell_s(behind_s)} more since",
    )


def _tell_s(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
