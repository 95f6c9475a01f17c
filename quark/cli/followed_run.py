"""A run as `quark follow` reads it: at each look what came since the one before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quark.analysis.health import BROKEN_OFF, place_alert
from quark.analysis.metric_roles import find_main_metric
from quark.page.api.analyses import AnalysisDesk
from quark.page.api.run_analysis import LocalAnalyzer
from quark.page.api.standings import describe_progress
from quark_core.backends.contract import SupportsGenerations
from quark_core.backends.curves import CurveQuery
from quark_core.records import AlertRecord, EventRecord, MetricRecord
from quark_core.records.kinds.findings import ALERT_RAISED, is_user_alert
from quark_core.records.query import Query
from quark_core.runs.console_lines import sort_by_time
from quark_core.runs.following import read_changes, read_heads, read_mark, read_series_many
from quark_core.runs.reading import encode_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.api.run_analysis import Analysis
    from quark.page.api.source import PageSource
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.curves import CurveSet
    from quark_core.backends.run_summary import MetricSummary, RunSummary
    from quark_core.records.columns import Columns

_ENTRIES = 500  # of a curve: more than a terminal has columns of dots
_MOST_POINTS = 8 * _ENTRIES  # that were added one by one before the curve is read anew
_MOST_NEW = 20_000
_KEPT_EVENTS = 50
_FIRST_EVENTS = 5
# Of a backend that only knows by reading every point.
_RESTS_S = 5.0
_OWN = ("system/", "quark/")


@dataclass(slots=True)
class Points:
    """The points of a curve that are drawn.

    Attributes:
        x: Steps, or epochs where there are no steps.
        y: Values, finite or not.
    """

    x: NDArray[Any]
    y: NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known of a run at a moment.

    Attributes:
        summary: The run with its metrics summed up.
        progress: Step, planned steps, pace and estimated end, as `describe_progress` says.
        analysis: What analyzers say, or None where that is not known.
        computing: Whether an analysis is on its way.
        alerts: Those of the analysis and those that a monitor has raised, the worst first;
            the same rule with the same culprit is one alert.
        curves: Points by stored key, in the order in which they are shown; none of a metric
            that was not logged yet.
        events: The newest events and log lines, oldest first.
        new_events: Those of them that no look before had.
        new_alerts: Likewise alerts.
    """

    summary: RunSummary
    progress: Mapping[str, Any]
    analysis: Analysis | None
    computing: bool
    alerts: Sequence[AlertRecord] = ()
    curves: Mapping[str, Points] = field(default_factory=dict)
    events: Sequence[EventRecord] = ()
    new_events: Sequence[EventRecord] = ()
    new_alerts: Sequence[AlertRecord] = ()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to come of the run."""
        return self.summary.state != "running"


@dataclass(slots=True)
class _Known:
    """What looks before have read."""

    mark: str | None = None
    summary: RunSummary | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    read_at_s: float = 0.0
    metric_count: int = 0
    raised: tuple[AlertRecord, ...] = ()
    alerts: set[tuple[str, str | None]] = field(default_factory=set)


class FollowedRun:
    """Reads a run by its cursor, so that a look where nothing came costs one short question.

    Used by one thread.

    Args:
        source: What the run is read from.
        run_id: The run.
        names: Metrics as logged or as stored; none for the main ones.
        most: How many curves are shown where no metrics are named.
        analyze: Whether a run that nobody has analyzed is analyzed here, which is not stored.

    Raises:
        SchemaValidationError: A name that no metric can have.
    """

    def __init__(
        self,
        source: PageSource,
        run_id: str,
        *,
        names: Sequence[str] = (),
        most: int = 6,
        analyze: bool = True,
    ) -> None:
        self._source = source
        self._run_id = run_id
        self._named = tuple(dict.fromkeys(encode_key(name, "--metric") for name in names))
        self._most = most
        self._analyze = analyze
        self._desk = AnalysisDesk(source, LocalAnalyzer(source.open_run))
        self._known = _Known()
        self._keys: tuple[str, ...] = ()
        self._curves: dict[str, list[Points]] = {}
        self._cursor: Mapping[str, int] | None = None
        self._event_cursor: Mapping[str, int] | None = None
        self._events: dict[str, EventRecord] = {}
        # Read, and not told: a look that fails later on tells nothing.
        self._untold: list[EventRecord] = []

    @property
    def keys(self) -> tuple[str, ...]:
        """Stored keys of the metrics that are shown, or asked for."""
        return self._keys

    def look(self) -> Look:
        """What is known of the run now.

        After one that has raised the next one tells what came meanwhile, too.

        Raises:
            RunNotFoundError: There is no such run any more.
            SessionStoreError: The store cannot be read now.
        """
        known, reader = self._known, self._source.reader
        # Asked for before anything is read: what comes meanwhile is read once more.
        mark = read_mark(reader, self._run_id)
        if known.summary is None or self._has_changed(mark):
            known.summary = self._source.summarize(self._run_id)
            self._read_curves(known.summary)
            self._read_events()
            known.raised = self._read_raised()
            known.progress = describe_progress(self._source, known.summary)
            known.mark, known.read_at_s = mark, time.monotonic()
        analysis = (self._desk.request if self._analyze else self._desk.find)(known.summary)
        alerts = _merge_alerts(() if analysis is None else analysis.alerts, known.raised)
        computing = self._desk.is_computing(self._run_id)
        curves = {key: self._join(key) for key in self._keys if self._curves[key]}
        # What is told once is taken last, when nothing is left that could fail.
        new_events, self._untold = self._untold, []
        return Look(
            summary=known.summary,
            progress=known.progress,
            analysis=analysis,
            computing=computing,
            alerts=alerts,
            curves=curves,
            events=list(self._events.values()),
            new_events=new_events,
            new_alerts=self._take_new_alerts(alerts),
        )

    def wait_for_analysis(self, timeout_s: float) -> None:
        """Wait until an analysis that is under way is done, or for so long."""
        deadline_s = time.monotonic() + timeout_s
        while self._desk.is_computing(self._run_id) and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Begin no further analysis; one that is under way is waited for so long.

        Returns:
            Whether none is: before that the source must not be closed.
        """
        return self._desk.close(timeout_s)

    def _has_changed(self, mark: str | None) -> bool:
        """Whether the run is to be read again."""
        known, reader = self._known, self._source.reader
        if mark is None:
            return time.monotonic() - known.read_at_s >= _RESTS_S
        assert known.summary is not None
        # A run that is killed is lost without a word.
        return mark != known.mark or reader.load_run(self._run_id).state != known.summary.state

    def _read_curves(self, summary: RunSummary) -> None:
        known = self._known
        if not self._named and len(summary.metrics) != known.metric_count:
            keys = choose_metrics(summary, self._most)
        else:
            keys = self._named or self._keys
        if keys != self._keys or self._cursor is None:
            self._begin(keys)
        else:
            self._go_on()
        known.metric_count = len(summary.metrics)

    def _begin(self, keys: tuple[str, ...]) -> None:
        """Read these curves whole, out of roll-ups where the store has them.

        Where that fails, what is known of curves stays as it was.
        """
        from quark.cli.run_view import list_points

        found = _read_whole(self._source.reader, self._run_id, keys)
        curves: dict[str, list[Points]] = {key: [] for key in keys}
        for curve in found.curves:
            curves[curve.key].append(Points(*list_points(curve)))
        self._keys, self._curves, self._cursor = keys, curves, found.cursor

    def _go_on(self) -> None:
        """Add to the curves what came since."""
        assert self._cursor is not None
        changes = read_changes(
            self._source.reader, self._run_id, self._cursor, keys=self._keys, max_rows=_MOST_NEW
        )
        rows = changes.records.get(MetricRecord.KIND)
        if changes.stale or changes.more:
            self._begin(self._keys)
            return
        self._cursor = changes.cursor
        if rows is not None:
            self._add(rows)
        if any(
            sum(len(part.x) for part in parts) > _MOST_POINTS for parts in self._curves.values()
        ):
            self._begin(self._keys)

    def _add(self, rows: Columns) -> None:
        import numpy as np

        names = rows["metric_key"]
        x = np.where(rows["step"] >= 0, rows["step"], rows["epoch"])
        for key in self._keys:
            its = names == key
            if its.any():
                self._curves[key].append(Points(x[its], rows["value"][its]))

    def _join(self, key: str) -> Points:
        """The points of a curve as one."""
        import numpy as np

        parts = self._curves[key]
        if len(parts) > 1:
            x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in "xy")
            self._curves[key] = parts = [Points(x, y)]
        return parts[0]

    def _read_events(self) -> None:
        """Keep events that came since the look before; at the first one the newest there are."""
        reader, kinds = self._source.reader, (EventRecord.KIND,)
        if self._event_cursor is not None:
            changes = read_changes(reader, self._run_id, self._event_cursor, kinds=kinds)
            if not (changes.stale or changes.more):
                self._keep(changes.records.get(EventRecord.KIND))
                self._event_cursor = changes.cursor
                return
        cursor = read_heads(reader, self._run_id, kinds=kinds).cursor
        query = Query(limit=_FIRST_EVENTS)
        self._keep(reader.read(self._run_id, EventRecord.KIND, query))
        self._event_cursor = cursor

    def _keep(self, rows: Columns | None) -> None:
        if rows is None:
            return
        # Told by the alerts themselves, where they are kept.
        has_outputs = isinstance(self._source.reader, SupportsGenerations)
        rows = sort_by_time(rows)
        newest: Any = rows.take(slice(max(0, rows.count - _KEPT_EVENTS), rows.count)).to_records()
        new = [
            event
            for event in newest
            if event.id not in self._events and not (has_outputs and _is_found(event))
        ]
        self._events.update((event.id, event) for event in new)
        for event_id in list(self._events)[:-_KEPT_EVENTS]:
            del self._events[event_id]
        self._untold += new

    def _read_raised(self) -> tuple[AlertRecord, ...]:
        """The alerts that are stored of a run, such as those of a monitor in it."""
        reader: object = self._source.reader
        if not isinstance(reader, SupportsGenerations):
            return ()
        found: Any = reader.read_outputs(self._run_id, AlertRecord.KIND).to_records()
        # How the run ended the analysis says, which knows of the newest attempt.
        return tuple(alert for alert in found if alert.rule_id != BROKEN_OFF)

    def _take_new_alerts(self, alerts: Sequence[AlertRecord]) -> list[AlertRecord]:
        known = self._known.alerts
        new = [alert for alert in alerts if _identify(alert) not in known]
        known.update(map(_identify, new))
        return new


def _identify(alert: AlertRecord) -> tuple[str, str | None]:
    """What makes two alerts the same: an id changes with each analysis."""
    return alert.rule_id, alert.culprit


def _is_found(event: EventRecord) -> bool:
    """Whether it tells of an alert that an analysis has found."""
    payload: Mapping[str, Any] = event.payload or {}
    rule_id = payload.get("rule_id", "")
    return event.event_type == ALERT_RAISED and not is_user_alert(str(rule_id))


def _merge_alerts(*found: Sequence[AlertRecord]) -> list[AlertRecord]:
    """Alerts of several analyses, of the same ones those of the first, the worst first."""
    merged: dict[tuple[str, str | None], AlertRecord] = {}
    for alerts in found:
        for alert in alerts:
            merged.setdefault(_identify(alert), alert)
    return sorted(merged.values(), key=place_alert)


def choose_metrics(summary: RunSummary, most: int) -> tuple[str, ...]:
    """Stored keys of the metrics that say most of a run: its objective or loss before all others.

    Args:
        summary: The run.
        most: How many.
    """
    from quark.analysis.metric_roles import is_held_out, is_loss, is_score

    main = find_main_metric(summary)

    def place(metric: MetricSummary) -> tuple[bool, bool, int, bool, str]:
        role = 0 if is_loss(metric.key) else 1 if is_score(metric.key) else 2
        is_own = metric.key.startswith(_OWN)
        return metric is not main, is_own, role, is_held_out(metric.key), metric.key

    ordered = sorted(summary.metrics.values(), key=place)
    return tuple(metric.key for metric in ordered[:most])


def _read_whole(reader: SupportsRead, run_id: str, keys: Sequence[str]) -> CurveSet:
    return read_series_many(reader, run_id, CurveQuery.build(keys, entries=_ENTRIES))
