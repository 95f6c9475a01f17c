"""Stops the trial of a sweep that is broken: what `quark.sweep(…, stop_broken=True)` does.

Beside a run that has a trial, on a thread of its own, the curves that it logs are judged. As long
as they get better nothing else is looked at; only where they do not are other trials of the sweep
read, for what they had learned by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quark.analysis.analysis_context import Case
from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.early_stopping import Peer, StopDecision, decide_stop, make_peer
from quark.analysis.monitor_state import Pace, RunFeed
from quark.analysis.outputs import make_run_data
from quark.sweeps.sweep_store import StoreLink
from quark_core.errors import QuarkError
from quark_core.records import MetricRecord
from quark_core.records.json_object import JsonObject

if TYPE_CHECKING:
    from quark.sweeps.trial import Trial
    from quark_core.backends.contract import SupportsRead
    from quark_core.runs.open_run import OpenRun
    from quark_core.sessions.session import TrainingSession

BROKEN_EVENT_TYPE = "trial_broken"
"""The type of the event that tells why a trial was stopped."""

_log = logging.getLogger("quark")

_POLL_S = 0.5
_LEAST_S = 1.0
_SHARE = 0.02  # of the time, at most
_PEERS_S = 15.0  # from one look at other trials to the next
_MOST_PEERS = 24
_JOIN_S = 2.0
_LOOKS = 2  # in a row that find the same


def watch_trial(session: TrainingSession, trial: Trial) -> BrokenTrialWatch | None:
    """Watch a run that has begun for a trial, and stop it once it is broken.

    Returns at once. A trial that is found broken is told as failed, with the reason, and the next
    call of the run's that logs ends the training as at a rung. Whatever goes wrong here is logged,
    and the training goes on.

    Args:
        session: The run.
        trial: Its trial.
    """
    run = session.open_run
    if run.forked or not run.leads or not run.stream.active or run.is_over:
        return None
    try:
        return BrokenTrialWatch(run, trial)
    except Exception:  # noqa: BLE001 - a training does not end by what looks on
        _log.exception("run %s: broken trials are not detected", run.context.run_id)
        return None


class BrokenTrialWatch:
    """Looks at the curves of a run on a daemon thread, until it ends or is broken.

    Args:
        run: The run, which takes records.
        trial: Its trial.
    """

    looks_on = True
    """At the end of a run every other writer hands over first."""

    def __init__(self, run: OpenRun, trial: Trial) -> None:
        self._run = run
        self._trial = trial
        self._feed = RunFeed(run, (MetricRecord.KIND,))
        self._config = _make_config(trial)
        self._peers = _Peers(trial, self._config)
        self._pace = Pace(_LEAST_S, _SHARE)
        self._ending = threading.Event()
        self._looks = 0
        self._looked_at: tuple[int | None, int | None] = (None, None)
        self._told = False
        run.add_writer(self)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._watch, name="quark-broken-trial", daemon=True
        )
        self._thread.start()

    def settle(self) -> None:
        """The run ends: there is nothing to save any more."""
        self._ending.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def bind(self) -> None:
        """In a forked child: do nothing, since the thread is the parent's."""
        if self._run.forked:
            self._thread = None

    def _watch(self) -> None:
        """The thread."""
        try:
            self._feed.open()
        except QuarkError as error:
            self._tell(error)
        try:
            while not self._ending.wait(_POLL_S) and not self._run.is_over:
                try:
                    if self._turn():
                        return
                except Exception as error:  # noqa: BLE001 - the training goes on
                    self._tell(error)
        finally:
            self._feed.close()
            self._peers.close()
            with self._run.lock:
                self._run.writers.discard(self)
            self._run.remove_writer()

    def _turn(self) -> bool:
        """One look, where it is due; whether there is to be no other one."""
        began, spent_s = time.monotonic(), time.thread_time()
        feed = self._feed
        feed.poll()
        place = feed.step, feed.epoch
        if not self._pace.is_due(began) or (place == self._looked_at and not feed.is_alarmed):
            return False
        self._looked_at, feed.is_alarmed = place, False
        case = Case(feed.load(ended=False), self._config)
        found = decide_stop(case, self._peers.find)
        self._pace.note(began, time.thread_time() - spent_s)
        self._looks = 0 if found is None else self._looks + 1
        if found is None or self._looks < _LOOKS:
            return False
        self._stop(found)
        return True

    def _stop(self, found: StopDecision) -> None:
        run = self._run
        if run.is_over:
            return
        _log.warning(
            "run %s: trial %d is broken and is stopped: %s",
            run.context.run_id, self._trial.number, found.reason
        )  # fmt: skip
        payload = {
            "breakage": found.breakage,
            "metric": found.metric,
            "since": found.step,
            "message": found.reason,
        }
        run.emit_event(
            BROKEN_EVENT_TYPE, "error", step=self._feed.step, payload=JsonObject(payload)
        )
        self._trial.stop_with("failed", found.reason)

    def _tell(self, error: Exception) -> None:
        """Log once that looking fails."""
        if self._told:
            return
        self._told = True
        _log.warning(
            "run %s: it is unknown if its trial is broken: %s: %s",
            self._run.context.run_id, type(error).__name__, error
        )  # fmt: skip


class _Peers:
    """What other trials of a sweep had learned by which step, each read once.

    Args:
        trial: The trial that is held against them.
        config: How they are judged.
    """

    def __init__(self, trial: Trial, config: AnalyzerEngineConfig) -> None:
        self._trial = trial
        self._config = config
        self._link = StoreLink(trial.storage_dir, read_only=True)
        self._known: dict[str, Peer | None] = {}
        self._due = 0.0

    def find(self) -> Sequence[Peer]:
        """Those that have ended and learned, as far as they were read some seconds ago."""
        if time.monotonic() >= self._due:
            try:
                self._read()
            finally:
                self._due = time.monotonic() + _PEERS_S
        return [peer for peer in self._known.values() if peer is not None]

    def close(self) -> None:
        """Let go of the store."""
        self._link.close()

    def _read(self) -> None:
        trials = self._link.store.list_trials(self._trial.claim.sweep_id)
        completed = [
            each.run_id for each in trials if each.state == "completed" and each.run_id is not None
        ]
        reader: SupportsRead = self._link.primary
        for run_id in completed[-_MOST_PEERS:]:
            if run_id not in self._known:
                data = make_run_data(reader, reader.load_run(run_id))
                self._known[run_id] = make_peer(Case(data, self._config))


def _make_config(trial: Trial) -> AnalyzerEngineConfig:
    """Trials are judged by the first of the sweep's metrics, beside what names say."""
    objective = trial.objective
    return AnalyzerEngineConfig(objective=objective.metric, objective_mode=objective.mode)
