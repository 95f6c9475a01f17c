"""Looks at a run while it trains: the analyzer's rules, on a thread of their own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, get_args

from quark.analysis.config import AnalyzerEngineConfig, check_config
from quark.analysis.engine import AnalyzerResult, analyze_run
from quark.analysis.health import is_note
from quark.analysis.monitor_state import (
    AlertDeduplicator,
    Pace,
    RaisedAlerts,
    RunFeed,
    describe_alert,
)
from quark.analysis.outputs import AnalysisTarget
from quark.analysis.rule import SEVERITIES
from quark.analysis.rules.registry import choose_rules
from quark.notifications.notifier import attach_notifier
from quark.notifications.targets import NotifyArgument
from quark_core.backends.registry import default_registry
from quark_core.config import settings
from quark_core.config.migration_hints import explain_argument_errors
from quark_core.errors import (
    InvalidRunStateError,
    SchemaValidationError,
    SessionStoreError,
    TrainingHalted,
)
from quark_core.records.checks import check_choice
from quark_core.records.kinds.findings import ALERT_RAISED, AlertRecord
from quark_core.runs.open_run import OpenRun
from quark_core.runs.opening import resolve_target
from quark_core.runs.run_reader import RunReader
from quark_core.system.process import list_members

_log = logging.getLogger("quark")

HaltOn = Literal["error", "critical"]

_SHARE = 0.05
_LAST_LOOK_S = 5.0
_HAND_OVER_S = 1.0
_OTHERS_S = 10.0
_SLOW_S = 10.0
_POLL_S = 0.5


def _check_arguments(steps: Any, on_alert: Any, halt_on: Any, interval: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SchemaValidationError(f"every_n_steps must be a positive integer, got {steps!r:.60}")
    if on_alert is not None and not callable(on_alert):
        raise SchemaValidationError(
            f"on_alert must be a function of one alert, not {type(on_alert).__name__}"
        )
    if halt_on is not None:
        check_choice(halt_on, "halt_on", get_args(HaltOn))
    is_number = isinstance(interval, (int, float)) and not isinstance(interval, bool)
    if not is_number or not isfinite(interval) or interval <= 0:
        raise SchemaValidationError(
            f"min_interval_s must be a positive number of seconds, got {interval!r:.60}"
        )


MONITOR_NAME = "monitor"
"""Under this name its alerts are stored; those of an AnalyzerEngine have another."""


@explain_argument_errors
def monitor(
    session: object,
    *,
    every_n_steps: int = 100,
    on_alert: Callable[[AlertRecord], object] | None = None,
    halt_on: HaltOn | None = None,
    config: AnalyzerEngineConfig | None = None,
    min_interval_s: float = 0.5,
    notify: NotifyArgument = None,
    notify_on: str | Iterable[str] | None = None,
) -> TrainingMonitor:
    """Check a running run for problems in a background thread.

    Returns at once. Alerts are appended to `alerts` of the monitor, logged to the run as
    `alert_raised` events, and passed to `on_alert`. The monitor stops when the run ends.

    Args:
        session: A TrainingSession, or its RunContext.
        every_n_steps: Number of steps between two checks.
        on_alert: Function called with each alert, in the monitor's thread.
        halt_on: `error` or `critical`: raise TrainingHalted at the next logging call after such an
            alert. None does not halt.
        config: Rules and their options. Defaults to `AnalyzerEngineConfig()`.
        min_interval_s: Minimum number of seconds between two checks.
        notify: Notification targets: a URL of Apprise (`slack://…`, `mailto://…`; extra `notify`),
            `webhook+https://…`, a function, or a list of them. Each alert is reported once per run.
            URLs are treated as secrets: they are not logged. Defaults to QUARK_NOTIFY.
        notify_on: Events to report: a minimum severity, and any of `failed`, `lost`, `interrupted`,
            `finished`. Defaults to QUARK_NOTIFY_ON, then to "error, failed, lost".

    Returns:
        The running monitor.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        InvalidRunStateError: The run has ended, is open for reading, or already has a monitor, or
            this process was forked.
    """
    return TrainingMonitor(
        session,
        every_n_steps=every_n_steps,
        on_alert=on_alert,
        halt_on=halt_on,
        config=config,
        min_interval_s=min_interval_s,
        notify=notify,
        notify_on=notify_on,
    )


class TrainingMonitor:
    """Background monitor of a running run; `quark.monitor` creates one.

    A check runs after `every_n_steps` steps, after a metric becomes non-finite, and after each
    epoch if the run only counts epochs. Checks use at most 5 % of the time. Metrics from other
    processes are included about 10 s later.

    A critical alert is raised at once. Other alerts are raised if two consecutive checks, or the
    last check, find them. Each alert

    - is in `alerts`,
    - is logged to the run, and to its mirrors, as an `alert_raised` event,
    - is stored apart from the results of `AnalyzerEngine.analyze`,
    - is passed to `on_alert`. An exception raised there is logged once.

    With `halt_on`, the next logging call of this process raises TrainingHalted, once per alert.
    That call logs nothing. Later calls work again.

    The monitor ends with the run, after a last check of up to 5 s. It runs on rank 0 only, not in
    forked children, and not with `backends="none"`.

    Args:
        session, every_n_steps, on_alert, halt_on, config, min_interval_s, notify, notify_on: See
            `quark.monitor`.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        InvalidRunStateError: The run has ended, is open for reading, or already has a monitor, or
            this process was forked.
    """

    looks_on = True
    """At the end of a run every other writer hands over first."""

    def __init__(
        self,
        session: object,
        *,
        every_n_steps: int = 100,
        on_alert: Callable[[AlertRecord], object] | None = None,
        halt_on: HaltOn | None = None,
        config: AnalyzerEngineConfig | None = None,
        min_interval_s: float = 0.5,
        notify: NotifyArgument = None,
        notify_on: str | Iterable[str] | None = None,
    ) -> None:
        _check_arguments(every_n_steps, on_alert, halt_on, min_interval_s)
        self._every = every_n_steps
        self._on_alert = on_alert
        self._halt_rank = len(SEVERITIES) if halt_on is None else SEVERITIES.index(halt_on)
        self._config = check_config(config, AnalyzerEngineConfig)
        # Loaded here, so that the thread imports nothing that a fork would have to wait for.
        choose_rules(self._config.rules, self._config.excluded_rules)
        self._run = run = resolve_target(session)
        if run.is_over:
            run.refuse("monitor")
        if run.forked:
            raise InvalidRunStateError("monitor: not in a forked process. Create it in the parent")
        self._poll_s = min(_POLL_S, float(min_interval_s))
        self._pace = Pace(float(min_interval_s), _SHARE)
        self._target = AnalysisTarget(RunReader.of(run))
        self._feed = RunFeed(run)
        self._sightings = AlertDeduplicator()
        self._alerts: tuple[AlertRecord, ...] = ()
        self._earlier: tuple[AlertRecord, ...] = ()
        self._unwritten = False
        self._result: AnalyzerResult | None = None
        self._halts: list[TrainingHalted] = []
        self._looked_at: tuple[int | None, int | None] = (None, None)
        self._spent_s = 0.0
        self._others_due = time.monotonic() + _OTHERS_S
        self._told: set[str] = set()
        self._ending = threading.Event()
        self._run_ends = False
        self._looks_again = True
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.refusal = _find_refusal(run)
        """Why it does nothing, or None."""
        if self.refusal is not None:
            self._closed = True
            level = logging.WARNING if halt_on else logging.INFO
            _log.log(level, "run %s: no monitor: %s", run.context.run_id, self.refusal)
            return
        if notify is not None or notify_on is not None:
            attach_notifier(run, notify or os.environ.get(settings.NOTIFY), notify_on)
        self._start()

    @property
    def alerts(self) -> tuple[AlertRecord, ...]:
        """Raised alerts, in order; an alert that becomes more severe is added again."""
        return self._alerts

    @property
    def result(self) -> AnalyzerResult | None:
        """Result of the last check, including what was not raised, or None."""
        return self._result

    @property
    def halted(self) -> bool:
        """Whether the monitor has asked for the training to be halted."""
        return bool(self._halts)

    def close(self) -> None:
        """Run a last check, for up to 5 s, and stop the monitor.

        A pending halt is canceled. Called from `on_alert`, it does not wait. A second call does
        nothing.
        """
        self._end(run_ends=False)

    def settle(self) -> None:
        """Run the last check when the run ends, as `close()` does."""
        self._end(run_ends=True)

    def bind(self) -> None:
        """Close the monitor in a forked child, because its thread belongs to the parent."""
        if self._run.forked:
            self._lock = threading.Lock()
            self._closed = True
            self._thread = None

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return (
            f"TrainingMonitor({self._run.context.describe()}, {len(self._alerts)} alerts{closed})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TrainingMonitor belongs to its process and cannot be pickled or copied")

    def _start(self) -> None:
        run = self._run
        with run.lock:
            if any(isinstance(other, TrainingMonitor) for other in list_members(run.writers)):
                raise InvalidRunStateError(
                    f"monitor: run {run.context.run_id} already has a monitor. Close it first"
                )
            run.add_writer(self)
        try:
            self._feed.open()
            if self._target.can_store:
                found = self._target.read_outputs(AlertRecord.KIND, MONITOR_NAME).to_records()
                self._earlier = found  # type: ignore[assignment]
        except SessionStoreError as error:
            self._tell("the store", "it cannot be read now", error)
        self._thread = threading.Thread(target=self._watch, name="training-monitor", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._tell("the thread", "it cannot be started, so the run is not checked", error)

    def _end(self, *, run_ends: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        thread, self._run_ends = self._thread, run_ends
        self._looks_again = thread is not threading.current_thread()
        self._ending.set()
        try:
            if thread is not None and self._looks_again:
                thread.join(min(_LAST_LOOK_S, settings.exit_timeout_s()))
                if thread.is_alive():
                    _log.warning(
                        "run %s: the last check of the monitor takes too long and is ended",
                        self._run.context.run_id,
                    )
        finally:
            self._let_go()

    def _let_go(self) -> None:
        run = self._run
        self._feed.close()
        for error in self._halts:
            run.withdraw_halt(error)
        with run.lock:
            run.writers.discard(self)
        run.remove_writer()

    def _watch(self) -> None:
        """The thread."""
        while not self._ending.wait(self._poll_s):
            if self._run.is_over:
                break
            self._turn(last=False)
        if self._looks_again:
            self._turn(last=True)
        if not self._ending.is_set():
            # Nobody told: the last writer of a context was closed, or a strict run has failed.
            with self._lock:
                was_closed, self._closed = self._closed, True
            if not was_closed:
                self._let_go()

    def _turn(self, *, last: bool) -> None:
        try:
            now, feed = time.monotonic(), self._feed
            if last and not self._run.is_over:
                self._run.stream.hand_over(_HAND_OVER_S)
            feed.poll()
            if not last and not self._is_due(now):
                return
            if now >= self._others_due and feed.has_other_writers:
                feed.read_again()
                spent_s = time.thread_time() - self._spent_s
                self._others_due = now + max(_OTHERS_S, spent_s / _SHARE)
            self._looked_at, feed.is_alarmed = (feed.step, feed.epoch), False
            self._look(last=last)
            spent_s = time.thread_time()
            self._pace.note(now, spent_s - self._spent_s)
            self._spent_s = spent_s
            if self._pace.spacing_s > _SLOW_S:
                pace = f"checks run every {self._pace.spacing_s:.0f} s to take 5 % of the time"
                self._tell("pace", pace)
        except SessionStoreError as error:
            self._tell("the store", "it cannot be read now", error)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not end the watch
            self._tell("the look", "a look failed", error, trace=True)

    def _is_due(self, now: float) -> bool:
        if not self._pace.is_due(now):
            return False
        feed, (step, epoch) = self._feed, self._looked_at
        if feed.is_alarmed or (now >= self._others_due and feed.has_other_writers):
            return True
        if feed.step is None:
            return feed.epoch != epoch
        # A counter that starts again moves too.
        return step is None or abs(feed.step - step) >= self._every

    def _look(self, *, last: bool) -> None:
        over = self._run_ends or self._run.is_over
        result = analyze_run(self._feed.load(ended=last and over), self._config)
        self._result = result
        alerts = [alert for alert in result.alerts if not is_note(alert)]
        raised = self._sightings.update(alerts, last=last)
        if raised:
            self._alerts += tuple(raised)
            counted = self._run.extensions.setdefault(RaisedAlerts, RaisedAlerts())
            if isinstance(counted, RaisedAlerts):
                counted.severities += [alert.severity for alert in raised]
            self._unwritten = True
            worst = max(raised, key=_rank)
            if not last and _rank(worst) >= self._halt_rank:
                self._halt(worst)
            for alert in raised:
                self._emit(alert)
            for alert in raised:
                self._call(alert)
        if self._unwritten and self._target.can_store:
            self._store()

    def _halt(self, alert: AlertRecord) -> None:
        error = TrainingHalted(
            f"the monitor halts the training: {alert.summary} {alert.fact} ({alert.rule_id}, "
            f"{alert.severity}; this call was not logged, the next one is)",
            alert,
        )
        # What on_alert logs is not the training.
        if self._run.halt(error, spared_thread=threading.get_ident()):
            self._halts.append(error)

    def _emit(self, alert: AlertRecord) -> None:
        run = self._run
        if run.is_over:
            return
        event = run.emit_event(
            ALERT_RAISED,
            alert.severity,
            step=self._feed.step,
            epoch=None if self._feed.step is not None else self._feed.epoch,
            payload=describe_alert(alert),
        )
        default_registry().notify("quark_finding_raised", run=run, event=event)

    def _call(self, alert: AlertRecord) -> None:
        if self._on_alert is None:
            return
        try:
            self._on_alert(alert)
        except BaseException as error:  # noqa: BLE001 - it may raise anything, SystemExit too
            self._tell("on_alert", "on_alert failed", error, trace=True)

    def _store(self) -> None:
        """Everything raised so far, as the one generation that readers see."""
        alerts: Sequence[AlertRecord] = (*self._earlier, *self._sightings.raised)
        try:
            number = self._target.write(MONITOR_NAME, True, {AlertRecord.KIND: alerts})
        except SessionStoreError as error:
            self._tell("the store", "alerts are not stored now", error)
            return
        self._unwritten = False
        if number is None:
            self._tell("outputs", f"alerts are not stored: {self._target.refusal}")

    def _tell(
        self, about: str, message: str, error: BaseException | None = None, *, trace: bool = False
    ) -> None:
        """Log something once."""
        if about in self._told:
            return
        self._told.add(about)
        _log.warning(
            "run %s: the monitor: %s%s",
            self._run.context.run_id,
            message,
            "" if error is None else f": {type(error).__name__}: {error}",
            exc_info=error if trace else None,
        )


def _rank(alert: AlertRecord) -> int:
    return SEVERITIES.index(alert.severity)


def _find_refusal(run: OpenRun) -> str | None:
    if not run.leads:
        return f"this is rank {run.origin.rank}, and the monitor runs on rank 0"
    if not run.stream.active:
        return "the run stores nothing"
    return None
