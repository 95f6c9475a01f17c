"""`quark follow`: reads a run at each poll and shows it on a screen or as lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group

from quark.analysis.health import BROKEN_OFF, count_severities, place_alert
from quark.analysis.metric_roles import find_main_metric, is_held_out, is_loss, is_score
from quark.analysis.rank_performance import RATES
from quark.cli.analysis_view import PHASE_STYLES, SEVERITY_STYLES
from quark.cli.plots import draw_curve
from quark.cli.texts import Text, describe_run_state
from quark.page.routes.analyses import AnalysisDesk
from quark.page.routes.run_analysis import LocalAnalyzer
from quark.page.routes.runs import describe_progress
from quark_core.backends.contract import SupportsGenerations
from quark_core.backends.curves import CurveQuery
from quark_core.backends.run_summary import measure_duration_s
from quark_core.formatting import format_duration, format_value
from quark_core.records import AlertRecord, EventRecord, MetricRecord
from quark_core.records.kinds.findings import ALERT_RAISED, is_user_alert
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.console_lines import sort_by_time
from quark_core.runs.following import read_changes, read_heads, read_mark, read_series_many
from quark_core.runs.reading import encode_key
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import Analysis
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.curves import CurveSet
    from quark_core.backends.run_summary import MetricSummary, RunSummary
    from quark_core.records import HealthScoreRecord
    from quark_core.records.columns import Columns

_PLOT_WIDTH = 38
_GAP = 3
_LEAST_ROWS = 3  # of a plot: its title, and two of the curve
_MOST_ROWS = 14
_MOST_ALERTS = 5
_MOST_EVENTS = 6
_BAR = 24
_EVENT_CHARACTERS = 400
_EVENT_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How a screen is to be.

    Attributes:
        width, height: Columns and lines; a height of None is as many as there is to say.
        ascii_only: Whether nothing but ASCII is drawn.
        note: A last line, such as how to end it.
    """

    width: int
    height: int | None
    ascii_only: bool = False
    note: str = ""

    @property
    def dots(self) -> str:
        """Stands between the ends of a range."""
        return ".." if self.ascii_only else "…"


def build_frame(look: Look, keys: Sequence[str], frame: Frame) -> Group:
    """A run as lines of a screen, none of them longer than it is wide.

    Args:
        look: The run.
        keys: Metrics that are to be shown, also those that were not logged yet.
        frame: The screen.
    """
    head = [_title(look), *_facts(look, frame), *_judgements(look)]
    alerts = _alert_lines(look)
    events = [_event_line(event) for event in look.events[-_MOST_EVENTS:]]
    foot = [Text(frame.note, style="dim")] if frame.note else []
    if frame.height is None:
        plots = _plots(look, keys, frame, None)
        lines = [*head, *alerts, *plots, *events, *foot]
    else:
        rest = frame.height - len(head) - len(foot)
        alerts = alerts[: max(0, rest // 4)]
        rest -= len(alerts)
        # Curves first: what is left over is for what was said.
        events = events[-(rest // 5) :] if rest >= 2 * _LEAST_ROWS and rest // 5 else []
        plots = _plots(look, keys, frame, max(0, rest - len(events)))
        space = [Text()] * max(0, rest - len(events) - len(plots))
        lines = [*head, *alerts, *plots, *space, *events, *foot]
        # Of what has no room the last line goes last.
        lines = [*lines[: max(0, frame.height - len(foot))], *foot][: frame.height]
    for line in lines:
        line.no_wrap = True
        if frame.height is None:
            line.rstrip()
        line.truncate(frame.width, overflow="crop" if frame.ascii_only else "ellipsis")
    return Group(*lines)


def _title(look: Look) -> Text:
    stored = look.summary.stored
    line = Text.assemble(
        (f"{stored.project.name} ", "bold"), (shorten_run_id(look.summary.run_id), "bold cyan")
    )
    if stored.run.name:
        line.append(f"  {stored.run.name}")
    line.append("  ")
    line.append(describe_run_state(stored))
    duration = format_duration(measure_duration_s(stored, look.summary.last_metric_at))
    return line.append(f" {'for' if stored.state == 'running' else 'after'} {duration}")


def _facts(look: Look, frame: Frame) -> list[Text]:
    """A line on how far the run is and when it is done."""
    parts = describe_progress_parts(look)
    if not parts:
        return [Text("no steps yet", style="dim")]
    line = Text("   ".join(parts))
    share = look.progress.get("share")
    if share is not None and frame.width >= 2 * _BAR:
        full = round(_BAR * min(1.0, share))
        marks = ("#", "-") if frame.ascii_only else ("━", "─")
        line = Text.assemble(
            (marks[0] * full, "green"), (marks[1] * (_BAR - full), "dim"), "  ", line
        )
    return [line]


def describe_progress_parts(look: Look) -> list[str]:
    """Step, share, pace and time to go of a run, each as a text; nothing that is not known."""
    progress = look.progress
    step, of, step_ms = (progress.get(name) for name in ("step", "of", "ms_per_step"))
    parts = []
    if step is not None:
        parts.append(f"step {step:,}" + (f" of {of:,} ({100 * step / of:.0f} %)" if of else ""))
    if step_ms is not None:
        pace = f"{step_ms:.4g} ms/step" if step_ms < 1e4 else f"{step_ms / 1e3:.4g} s/step"
        data = progress.get("data_share")
        parts.append(pace + (f" (data {100 * data:.0f} %)" if data is not None else ""))
    if progress.get("told") is not None:
        parts.append(progress["told"])
    elif progress.get("eta_s") is not None:
        parts.append(f"{format_duration(progress['eta_s'])} to go")
    parts += _describe_rates(look)
    return parts


def _describe_rates(look: Look) -> list[str]:
    """The newest rates of a process, where telemetry has them."""
    parts = []
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        metric = look.summary.metrics.get(RATES[name])
        if metric is not None and metric.last is not None:
            parts.append(f"{format_value(metric.last)} {unit} by a process")
    mfu = look.summary.metrics.get(RATES["mfu_percent"])
    if mfu is not None and mfu.last is not None:
        parts.append(f"MFU {format_value(mfu.last)} %")
    return parts


def _judgements(look: Look) -> list[Text]:
    """A line on health and phase."""
    line = Text()
    health = _find_health(look)
    if health is not None:
        line.append("health ", style="dim")
        line.append(describe_health(health))
    elif look.computing:
        line.append("health is being computed", style="dim")
    else:
        line.append("health not known", style="dim")
    phase = look.analysis.phases[-1] if look.analysis and look.analysis.phases else None
    if phase is not None:
        line.append("   phase ", style="dim")
        line.append(phase.display_name, style=PHASE_STYLES.get(phase.phase_name, ""))
    counts = count_severities(look.alerts)
    if counts or look.analysis is not None:
        line.append("   alerts ", style="dim")
        line.append(", ".join(counts) if counts else "none")
    return [line]


def _find_health(look: Look) -> HealthScoreRecord | None:
    scores = () if look.analysis is None else look.analysis.scores
    return next((score for score in scores if score.score_key == "overall"), None)


def describe_health(health: HealthScoreRecord) -> str:
    """Such as `82 of 100 (watch)`."""
    if not health.is_known:
        return f"{health.word}: {health.unknown_reason}" if health.unknown_reason else health.word
    return f"{health.score:.0f} of 100 ({health.word})"


def _alert_lines(look: Look) -> list[Text]:
    alerts = look.alerts
    new = {id(alert) for alert in look.new_alerts}
    lines = []
    for alert in alerts[:_MOST_ALERTS]:
        line = Text(f"{alert.severity}: ", style=SEVERITY_STYLES.get(alert.severity, ""))
        line.append(describe_alert(alert), style="bold" if id(alert) in new else "not bold")
        lines.append(line)
    if len(alerts) > _MOST_ALERTS:
        lines.append(Text(f"{len(alerts) - _MOST_ALERTS} more alerts: quark analyze", style="dim"))
    return lines


def describe_alert(alert: AlertRecord) -> str:
    """Such as `The loss spikes (train/loss) since step 900`."""
    text = alert.title
    if alert.culprit:
        text += f" ({decode_name(alert.culprit)})"
    if alert.step is not None:
        text += f" since step {alert.step}"
    elif alert.epoch is not None:
        text += f" since epoch {alert.epoch}"
    return text


def describe_event(event: EventRecord) -> str:
    """An event or log line as one line."""
    payload: dict[str, Any] = dict(event.payload or {})
    message = payload.get("message")
    text = message if isinstance(message, str) else event.event_type
    if event.step is not None:
        text = f"step {event.step}: {text}"
    return text if len(text) <= _EVENT_CHARACTERS else f"{text[:_EVENT_CHARACTERS]} ..."


def _event_line(event: EventRecord) -> Text:
    line = Text(f"{event.timestamp[11:19]} ", style="dim")
    line.append(f"{event.severity} ", style=_EVENT_STYLES.get(event.severity, "not dim"))
    return line.append(describe_event(event), style="not dim")


def _plots(look: Look, keys: Sequence[str], frame: Frame, room: int | None) -> list[Text]:
    """Curves side by side in so many lines; where that is too few, values alone."""
    if not keys:
        return [Text("no metrics yet", style="dim")] if room != 0 else []
    across = max(1, min(len(keys), (frame.width + _GAP) // (_PLOT_WIDTH + _GAP)))
    down = -(-len(keys) // across)
    if room is None:
        height = _MOST_ROWS // 2
    else:
        while down > 1 and room // down < _LEAST_ROWS:
            down -= 1
        height = min(_MOST_ROWS, room // down)
    shown, rest = keys[: across * down], keys[across * down :]
    width = (frame.width - _GAP * (across - 1)) // across
    if height < _LEAST_ROWS:
        return [_value_title(look, key, width) for key in keys[: room or 0]]
    lines = []
    for start in range(0, len(shown), across):
        row = [_plot(look, key, width, height, frame) for key in shown[start : start + across]]
        lines += [_join_cells(cells, width) for cells in zip(*row, strict=True)]
    if rest and lines and (room is None or len(lines) < room):
        lines.append(Text(f"{len(rest)} more do not fit", style="dim"))
    return lines


def _join_cells(cells: Sequence[Text], width: int) -> Text:
    line = Text()
    for index, cell in enumerate(cells):
        if index:
            line.append(" " * _GAP)
        cell.truncate(width, pad=True)
        line.append(cell)
    return line


def _plot(look: Look, key: str, width: int, height: int, frame: Frame) -> list[Text]:
    """The title of a curve, the curve, and its range, in so many lines."""
    title = _value_title(look, key, width)
    points = look.curves.get(key)
    metric = look.summary.metrics.get(key)
    has_range = height > _LEAST_ROWS
    rows = height - 1 - has_range
    if points is None or metric is None or not len(points.x):
        return [title, *(Text() for _ in range(height - 1))]
    curve = draw_curve(points.x, points.y, width=width, height=rows, ascii_only=frame.ascii_only)
    lines = [title, *(Text(line, style="cyan") for line in curve.split("\n"))]
    if has_range:
        lines.append(Text(_describe_range(metric, points, frame), style="dim"))
    return lines


def _value_title(look: Look, key: str, width: int) -> Text:
    """A metric and its newest value, of which the value is never cut off."""
    metric = look.summary.metrics.get(key)
    missing = "not logged" if look.has_ended else "not logged yet"
    value = missing if metric is None else _describe_last(metric)
    name = Text(decode_name(key), style="bold")
    name.truncate(max(1, width - len(value) - 2))
    return name.append(f"  {value}", style="not bold")


def _describe_last(metric: MetricSummary) -> str:
    if metric.last is None and metric.count:
        return "not finite"
    return format_value(metric.last)


def _describe_range(metric: MetricSummary, points: Points, frame: Frame) -> str:
    low, high = format_value(metric.low), format_value(metric.high)
    steps = f"{int(points.x.min())} {frame.dots} {int(points.x.max())}"
    text = f"{low} {frame.dots} {high}   steps {steps}"
    return text + (f"   {metric.non_finite} not finite" if metric.non_finite else "")


class LineTeller:
    """Tells a run in lines, for what is no terminal or a dumb one."""

    def __init__(self) -> None:
        self._progress: tuple[Any, ...] | None = None
        self._judged: tuple[str, ...] | None = None

    def tell(self, look: Look, keys: Sequence[str], now: str) -> list[str]:
        """What is new, each as a line that begins with the time; nothing where nothing is.

        Args:
            look: The run.
            keys: The metrics that are told.
            now: The time.
        """
        lines = [
            f"{event.timestamp[11:19]} {event.severity}: {describe_event(event)}"
            for event in look.new_events
        ]
        values = [
            f"{decode_name(key)} {_describe_last(look.summary.metrics[key])}"
            for key in keys
            if key in look.summary.metrics
        ]
        progress = look.progress.get("step"), *values
        if progress != self._progress and (values or look.progress.get("step") is not None):
            self._progress = progress
            lines.append(f"{now} {'  '.join([*describe_progress_parts(look), *values])}")
        lines += [
            f"{now} alert, {alert.severity}: {describe_alert(alert)}" for alert in look.new_alerts
        ]
        judged = tuple(describe_judgement(look))
        if judged and judged != self._judged:
            self._judged = judged
            lines.append(f"{now} {', '.join(judged)}")
        return lines


def describe_judgement(look: Look) -> list[str]:
    """Health and phase of a run, as far as they are known."""
    parts = []
    health = _find_health(look)
    if health is not None:
        parts.append(f"health {describe_health(health)}")
    if look.analysis is not None and look.analysis.phases:
        parts.append(f"phase {look.analysis.phases[-1].display_name}")
    return parts


def describe_end(look: Look) -> str:
    """How a run stands, in a line."""
    stored, run_id = look.summary.stored, shorten_run_id(look.summary.run_id)
    duration = format_duration(measure_duration_s(stored, look.summary.last_metric_at))
    if stored.state == "running":
        return f"run {run_id} is running, at step {look.progress.get('step')}"
    reason = "" if stored.ending is None else f" ({stored.ending.describe()})"
    code = "" if stored.exit_code is None else f", exit code {stored.exit_code}"
    return f"run {run_id} is {stored.state}{reason} after {duration}{code}"


def describe_look(look: Look, keys: Sequence[str]) -> dict[str, Any]:
    """A look as JSON values."""
    stored, analysis, health = look.summary.stored, look.analysis, _find_health(look)
    metrics = {key: look.summary.metrics[key] for key in keys if key in look.summary.metrics}
    return {
        "run_id": look.summary.run_id,
        "project": stored.project.name,
        "name": stored.run.name,
        "state": stored.state,
        "lost_reason": stored.lost_reason,
        "exit_code": stored.exit_code,
        "ending": None if stored.ending is None else stored.ending.to_dict(),
        "duration_s": measure_duration_s(stored, look.summary.last_metric_at),
        "last_metric_at": look.summary.last_metric_at,
        "progress": dict(look.progress),
        "metrics": {
            decode_name(key): {
                "last": metric.last,
                "low": metric.low,
                "high": metric.high,
                "count": metric.count,
                "non_finite": metric.non_finite,
                "last_step": metric.last_step,
            }
            for key, metric in metrics.items()
        },
        "health": None
        if health is None
        else {
            "known": health.is_known,
            "score": health.score,
            "status": health.status,
            "word": health.word,
        },
        "phase": analysis.phases[-1].phase_name if analysis and analysis.phases else None,
        "alerts": [
            {
                "rule": alert.rule_id,
                "severity": alert.severity,
                "title": alert.title,
                "culprit": alert.culprit,
                "step": alert.step,
            }
            for alert in look.alerts
        ],
        "new_events": [event.to_dict() for event in look.new_events],
    }


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
        names = rows["metric_key"]
        x = np.where(rows["step"] >= 0, rows["step"], rows["epoch"])
        for key in self._keys:
            its = names == key
            if its.any():
                self._curves[key].append(Points(x[its], rows["value"][its]))

    def _join(self, key: str) -> Points:
        """The points of a curve as one."""
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
    main = find_main_metric(summary)

    def place(metric: MetricSummary) -> tuple[bool, bool, int, bool, str]:
        role = 0 if is_loss(metric.key) else 1 if is_score(metric.key) else 2
        is_own = metric.key.startswith(_OWN)
        return metric is not main, is_own, role, is_held_out(metric.key), metric.key

    ordered = sorted(summary.metrics.values(), key=place)
    return tuple(metric.key for metric in ordered[:most])


def _read_whole(reader: SupportsRead, run_id: str, keys: Sequence[str]) -> CurveSet:
    return read_series_many(reader, run_id, CurveQuery.build(keys, entries=_ENTRIES))
