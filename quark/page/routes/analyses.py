"""The analyses of runs: stored ones, or ones that are computed for the page.

Nothing that is computed is stored. It is computed for one run after the other.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quark.analysis.health import is_of_another_end, place_alert, tell_end
from quark.page.recent import Recent
from quark.page.routes.run_analysis import Analysis
from quark_core.backends.contract import SupportsGenerations
from quark_core.errors import QuarkError, RunNotFoundError
from quark_core.formatting import format_span
from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord, format_time, parse_time
from quark_core.records.base import now_us

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import RunAnalyzer
    from quark_core.backends.run_summary import RunSummary

_log = logging.getLogger("quark")

_STORED_KEPT_S = 2.0
_EXIT_S = 60.0
_MOST_KEPT = 256
_MOST_WAITING = 64
# What is younger than this beside an analysis is on its way to the next one.
_STALE_S = 60.0
# Whoever goes from run to run asks again within that.
_IDLE_S = 60.0


# A run to analyze, "" to load what that needs, or what else is asked of the analyzer.
_Job = str | Callable[["RunAnalyzer"], None]


@dataclass(slots=True)
class _Computed:
    analysis: Analysis
    began: str
    of: tuple[str, str | None]
    at_s: float = field(default_factory=time.monotonic)


class AnalysisDesk:
    """Finds the analyses of runs; every method may be called from any thread.

    Args:
        source: What is looked at.
        analyzer: Computes what is not stored; closed with the desk.
    """

    live_every_s = 60.0
    """Of a run that goes on it is computed so often."""

    def __init__(self, source: PageSource, analyzer: RunAnalyzer) -> None:
        self._source = source
        self._analyzer = analyzer
        self._lock = threading.Lock()
        self._computed = Recent[str, _Computed](_MOST_KEPT)
        self._stored = Recent[tuple[str, str], tuple[float, Analysis | None]](_MOST_KEPT)
        self._waiting: set[str] = set()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def find(self, summary: RunSummary) -> Analysis | None:
        """What is known of a run now; nothing is computed for it.

        Raises:
            RunNotFoundError: There is no such run.
            SessionStoreError: The store cannot be read.
        """
        stored = self._read_stored(summary)
        if stored is not None and (told := _tell_end(stored, summary)) is not None:
            return _note_age(told, summary)
        with self._lock:
            computed = self._find_computed(summary)
        return None if computed is None else _tell_end(computed.analysis, summary)

    def request(self, summary: RunSummary) -> Analysis | None:
        """The same, and have it computed where nothing is stored and what is known is old.

        Of a run that goes on it is computed each `live_every_s`; None where it will be there later.
        """
        found = self.find(summary)
        if found is not None and found.state == "stored":
            return found
        run_id, of = summary.run_id, (summary.state, summary.last_metric_at)
        with self._lock:
            known = self._find_computed(summary)
            if known is not None:
                is_live = summary.state == "running"
                rests = is_live and time.monotonic() - known.at_s < self.live_every_s
                if known.of == of or rests:
                    return known.analysis
            if run_id not in self._waiting and len(self._waiting) < _MOST_WAITING:
                self._waiting.add(run_id)
                self._start()
                self._queue.put(run_id)
        return found

    def prepare(self) -> None:
        """Have loaded what the first analysis needs; it is not waited for."""
        with self._lock:
            self._start()
            self._queue.put("")

    def submit(self, job: Callable[[RunAnalyzer], None]) -> None:
        """Have something else asked of the analyzer, in its turn; the job itself never raises."""
        with self._lock:
            self._start()
            self._queue.put(job)

    def settle(self, summary: RunSummary) -> Analysis:
        """What is stored, else what is computed now, in the thread that calls."""
        return self.find(summary) or self._compute_of(summary.run_id)[2]

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
        self._analyzer.close()
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
        while (job := self._take()) is not None and not self._closed:
            if callable(job):
                job(self._analyzer)
                continue
            if not job:
                self._analyzer.prepare()
                continue
            run_id = job
            began, of, analysis = self._compute_of(run_id)
            with self._lock:
                self._computed[run_id] = _Computed(analysis, began, of)
                self._waiting.discard(run_id)

    def _take(self) -> _Job | None:
        """What is next, or None at the end; the analyzer rests meanwhile."""
        try:
            return self._queue.get(timeout=_IDLE_S)
        except queue.Empty:
            self._analyzer.rest()
        return self._queue.get()

    def _compute_of(self, run_id: str) -> tuple[str, tuple[str, str | None], Analysis]:
        """An analysis, after which beginning of the run it is of, and up to where."""
        began = ""
        of: tuple[str, str | None] = ("", None)
        try:
            summary = self._source.summarize(run_id)
            began = _tell_begin(summary)
            of = summary.state, summary.last_metric_at
            return began, of, self._analyzer.analyze(run_id)
        except RunNotFoundError:
            note = "the run does not exist any more"
        except QuarkError as error:
            note = str(error)
        except Exception as error:  # noqa: BLE001 - a plugin's rule may raise anything
            _log.exception("run %s cannot be analyzed", run_id)
            note = f"{type(error).__name__}: {error}"
        return began, of, Analysis(state="failed", note=note)

    def _find_computed(self, summary: RunSummary) -> _Computed | None:
        """What was computed of a run, and not of another one of its id; the lock is held."""
        known = self._computed.get(summary.run_id)
        return known if known is not None and known.began == _tell_begin(summary) else None

    def _read_stored(self, summary: RunSummary) -> Analysis | None:
        reader: object = self._source.reader
        if not isinstance(reader, SupportsGenerations):
            return None
        now_s = time.monotonic()
        run_id, place = summary.run_id, (summary.run_id, _tell_begin(summary))
        with self._lock:
            kept = self._stored.get(place)
        if kept is not None and now_s - kept[0] < _STORED_KEPT_S:
            return kept[1]
        found = _read_outputs(reader, run_id)
        with self._lock:
            self._stored[place] = (now_s, found)
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
    alerts = sorted(alerts, key=place_alert)
    return Analysis(
        state="stored",
        at=format_time(at_us) if at_us else None,
        alerts=tuple(alerts),
        scores=records,
        phases=tuple(phases.to_records()),
        generation=int(generation) if generation.isdigit() else None,
    )


def _tell_end(analysis: Analysis, summary: RunSummary) -> Analysis | None:
    """The analysis with the end of the run; None where it tells an end that the run has not."""
    if is_of_another_end(summary.stored, analysis.alerts):
        return None
    found = tell_end(summary.stored, analysis.alerts, analysis.scores, summary.newest_step)
    return replace(analysis, alerts=found[0], scores=found[1])


def _note_age(analysis: Analysis, summary: RunSummary) -> Analysis:
    """The analysis, with a note where the run has gone on for long since."""
    if analysis.at is None or summary.last_metric_at is None or analysis.note is not None:
        return analysis
    behind_s = (parse_time(summary.last_metric_at) - parse_time(analysis.at)) / 1e6
    if behind_s < _STALE_S:
        return analysis
    age_s = max(0.0, (now_us() - parse_time(analysis.at)) / 1e6)
    return replace(
        analysis,
        note=f"this was stored {format_span(age_s)} ago; the run has logged "
        f"{format_span(behind_s)} more since then",
    )


def _tell_begin(summary: RunSummary) -> str:
    """Tells a run from another one of the same id, in a store that was made anew."""
    return summary.stored.run.created_at
