"""`quark show`: one run, readable."""

from __future__ import annotations

import json
import shlex
from bisect import bisect_right
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.completion import RUN, complete_metrics
from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    print_json,
)
from quark.cli.texts import (
    FOLD,
    PLAIN,
    RIGHT,
    Console,
    Text,
    describe_fork,
    describe_run_state,
    make_grid,
    make_table,
)
from quark_core.backends.run_summary import measure_duration_s
from quark_core.config.arguments import REVISION_FIELD, UID_FIELD, VERSION_FIELD
from quark_core.formatting import format_count, format_duration, format_value
from quark_core.records import EventRecord
from quark_core.records.base import now_us
from quark_core.records.json_object import flatten_json
from quark_core.records.query import Query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from quark.cli.run_view import MetricSummary
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import RunSummary, StoredRun
    from quark_core.records.columns import Columns
    from quark_core.records.runs import StopRequest
    from quark_core.sessions.session import TrainingSession

_LOG_LINES = 8
_METRICS = 100
_CONFIG_LINES = 40
_PLOTS = 8
_PAYLOAD_CHARACTERS = 160
# Fields that have a line of their own, or say nothing to people.
_FACTS = frozenset({REVISION_FIELD, UID_FIELD, VERSION_FIELD})
_LOG_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}


@click.command()
@takes_options
def show(
    *,
    run: str = RUN,
    source: RunSource = SOURCE,
    logs: int = option("Number of newest events to show.", least=0, default=_LOG_LINES),
    metrics: int = option("Number of metrics to show, sorted by name.", least=0, default=_METRICS),
    after: str | None = option(
        "Only metrics whose names sort after this one.",
        metavar="NAME",
        shell_complete=complete_metrics,
    ),
    why: str | None = option(
        "Print only the origin of the config value KEY, or of all values.",
        metavar="KEY",
        flag_value="",
        is_flag=False,
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Show a run's config, metrics and latest events.

    RUN is a run ID, unique prefix or name.
    """
    stored = source.find(run)
    if why is not None:
        from quark.cli.run_view import print_origins

        print_origins(stored, why, as_json=as_json)
        return
    if as_json:
        from quark.cli.run_view import RunView

        print_json(RunView.read(source.reader, stored, events=logs).to_dict())
        return
    print_run(source.reader, stored, logs=logs, metrics=metrics, after=after)
    for line in source.describe_state(str(stored.run.id)):
        click.echo(line)


def print_run(
    reader: SupportsRead,
    stored: StoredRun,
    *,
    logs: int = _LOG_LINES,
    metrics: int = _METRICS,
    after: str | None = None,
    console: Console | None = None,
) -> None:
    """Print a run to the terminal: summary, config, metrics with small plots, last logs.

    Args:
        reader: What the run is read from.
        stored: The run.
        logs: How many events, the newest of them.
        metrics: How many metrics, sorted by key.
        after: Only metrics whose keys come after this.
        console: Where to; stdout by default.
    """
    from quark.cli.run_view import RunView, print_aggregates, print_contents, print_ranks

    console = console or Console()
    view = RunView.read(reader, stored, events=logs, after=after, limit=metrics)
    summary, inherited = view.summary, view.inherited
    traceback = _find_traceback(reader, stored)
    console.print(_summary_panel(stored, summary.last_metric_at, inherited.tags, traceback))
    if stored.config is not None and stored.config.values:
        labels = {key: each[0].label for key, each in stored.config.group_origins().items()}
        console.print(_values_table("config", dict(stored.config.values), labels))
    if noted := {k: v for k, v in inherited.fields.items() if k not in _FACTS}:
        console.print(_values_table("field", noted))
    if view.metrics:
        console.print(_metrics_table(view.metrics))
        if not console.options.ascii_only:
            _print_plots(console, view.metrics)
        _print_rest(console, summary, view.metrics[-1].key)
    elif summary.metrics:
        counted = format_count(len(summary.metrics), "metric")
        console.print(f"{counted}; --metrics shows them.", style="dim")
    else:
        console.print("No metrics yet.")
    print_contents(console, view)
    print_aggregates(console, view.aggregates)
    if view.paces is not None:
        print_ranks(console, view.paces)
    _print_logs(console, view.events)


def print_session(session: TrainingSession) -> None:
    """Print a session's run, as `quark show` does; nothing where nothing is kept."""
    reader, run_id = session.open_run.reader, session.run_id
    if reader is not None and run_id is not None:
        print_run(reader, reader.load_run(run_id))


def _summary_panel(
    stored: StoredRun, last_metric_at: str | None, tags: Sequence[str], traceback: str | None
) -> RenderableType:
    from rich.panel import Panel

    run = stored.run
    environment: dict[str, Any] = dict(stored.environment.values) if stored.environment else {}
    git: dict[str, Any] = environment.get("git") or {}
    commit = (run.git_commit or "")[:10]
    if commit:
        commit += f" ({git['branch']})" if git.get("branch") else ""
        commit += ", with uncommitted changes" if git.get("dirty") else ""
    state = describe_run_state(stored)
    if stored.progress is not None and stored.state == "running":
        state.append(f" ({stored.progress.describe(now_us())})", style="dim")
    state.append(_describe_last_sign(stored, last_metric_at), style="dim")
    grid = make_grid({"style": "dim"}, FOLD)
    duration = format_duration(measure_duration_s(stored, last_metric_at))
    verb = "running for" if stored.state == "running" else "took"
    host = environment.get("host", {}).get("name")
    python = environment.get("python", {}).get("version")
    gpus = environment.get("gpus") or []
    rows: list[tuple[str, str | Text | None]] = [
        ("status", state),
        ("traceback", traceback),
        ("started", f"{_shorten_time(run.created_at)}, {verb} {duration}"),
        ("name", run.name),
        ("tags", ", ".join(tags)),
        ("groups", ", ".join(run.groups)),
        ("version", _tell(stored.fields.get(VERSION_FIELD))),
        ("revision", _tell(stored.fields.get(REVISION_FIELD))),
        ("notes", run.notes),
        ("archived", None if run.archived_at is None else _shorten_time(run.archived_at)),
        ("stop", None if stored.stop is None else _describe_stop(stored.stop)),
        ("exit code", None if stored.exit_code is None else str(stored.exit_code)),
        ("resumed", _count_times(run.resume_count)),
        ("parent", run.parent_run_id if run.fork_step is None else None),
        ("forked from", describe_fork(run)),
        ("git", commit),
        ("host", f"{host}, Python {python}" if host else None),
        ("gpus", ", ".join(str(gpu.get("name")) for gpu in gpus)),
        ("path", _find_place(run.run_path)),
    ]
    for label, value in rows:
        if value:
            told = value if isinstance(value, Text) else Text(value, lines=label == "notes")
            grid.add_row(label, told)
    title = Text.assemble((f"{stored.project.name} ", "bold"), (str(run.id), "bold cyan"))
    return Panel(grid, title=title, title_align="left", expand=False)


def _find_place(run_path: str | None) -> str | None:
    """The folder of a run, or the store that has taken it in, after which there is no folder."""
    if not run_path or Path(run_path).exists():
        return run_path
    store = Path(run_path).parent.parent
    return f"{store} (merged into the store's files)" if store.is_dir() else run_path


def _describe_last_sign(stored: StoredRun, last_metric_at: str | None) -> str:
    """The last sign of life of a lost run, where it is younger than its last beat."""
    if stored.state != "lost" or last_metric_at is None:
        return ""
    at = datetime.fromisoformat(last_metric_at)
    beat = stored.heartbeat_at
    if beat is not None and (at - datetime.fromisoformat(beat)).total_seconds() < 1:
        return ""
    age_s = (datetime.now(UTC) - at).total_seconds()
    return f", last metric {max(0.0, age_s):.0f} s ago"


def _find_traceback(reader: SupportsRead, stored: StoredRun) -> str | None:
    """What prints the traceback of what ended a run; None where it has kept none."""
    if not stored.is_broken_off:
        return None
    query = Query(any_of={"event_type": ("runtime_error", "runtime_interruption")}, limit=1)
    for record in reader.read(str(stored.run.id), EventRecord.KIND, query).to_records():
        if (getattr(record, "payload", None) or {}).get("traceback"):
            return f"quark logs {stored.run.id} --events"
    return None


def _shorten_time(text: str) -> str:
    return f"{text[:19].replace('T', ' ')} UTC"


def _describe_stop(request: StopRequest) -> str:
    seen = request.seen_at
    known = "not yet received" if seen is None else f"received {_shorten_time(seen)}"
    return f"{request.describe()} ({known})"


def _count_times(count: int) -> str | None:
    return {0: None, 1: "once"}.get(count, f"{count} times")


def _tell(value: object) -> str | None:
    return None if value is None else str(value)


def _values_table(
    label: str, values: dict[str, Any], origins: Mapping[str, str] | None = None
) -> RenderableType:

    table = make_table({label: PLAIN, "value": FOLD}, title_justify="left")
    if origins:
        table.add_column("from", overflow="fold", style="dim")
    lines = list(flatten_json(values))
    for key, value in lines[:_CONFIG_LINES]:
        shown = Text(value if isinstance(value, str) else _compact(value))
        table.add_row(Text(key), shown, *([Text(origins.get(key, ""))] if origins else []))
    if len(lines) > _CONFIG_LINES:
        table.add_row("…", f"{len(lines) - _CONFIG_LINES} more; --json prints all")
    return table


def _compact(value: Any) -> str:
    return json.dumps(_round(value), ensure_ascii=False)


def _round(value: Any) -> Any:
    """Numbers as short as the eye wants them; --json has them whole."""
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _metrics_table(summaries: Sequence[MetricSummary]) -> RenderableType:

    table = make_table({"metric": FOLD, ("points", "first", "last", "best", "at"): RIGHT})
    for item in summaries:
        key = Text(item.name)
        if item.non_finite:
            key.append(f"  {item.non_finite} not finite", style="red")
        arrow = {"min": "↓ ", "max": "↑ "}.get(item.direction or "", "")
        table.add_row(
            key,
            str(item.count),
            format_value(item.first),
            format_value(item.last),
            "-" if item.best is None else arrow + format_value(item.best),
            "-" if item.best_at is None else str(item.best_at),
        )
    return table


def _print_plots(console: Console, summaries: Sequence[MetricSummary]) -> None:
    from rich.columns import Columns as SideBySide

    from quark.cli.plots import draw_curve

    # Those with a direction first: losses and scores are what one wants to see.
    chosen = [s for s in summaries if s.count > 1 and s.low is not None and len(s.x)]
    if not chosen:
        return
    chosen.sort(key=lambda summary: summary.direction is None)
    blocks = []
    for item in chosen[:_PLOTS]:
        text = Text(item.name, style="bold", no_wrap=True)
        curve = draw_curve(item.x, item.y)
        text.append(f"\n{curve}", style="not bold cyan", lines=True)
        text.append(
            f"\n{format_value(item.low)} … {format_value(item.high)}"
            f"   steps {int(item.x.min())} … {int(item.x.max())}\n",
            style="not bold dim",
            lines=True,
        )
        blocks.append(text)
    console.print(SideBySide(blocks, padding=(0, 4)))
    if len(chosen) > _PLOTS:
        console.print(f"{len(chosen) - _PLOTS} more curves not drawn.", style="dim")


def _print_rest(console: Console, run: RunSummary, shown: str) -> None:
    """Say how many metrics come after the last one that is shown, and how to see them."""
    keys = list(run.metrics)
    left = len(keys) - bisect_right(keys, shown)
    if left:
        console.print(
            f"{left} more metrics: --after {shlex.quote(shown)} shows the next, --json prints all.",
            style="dim",
            soft_wrap=True,
        )


def _print_logs(console: Console, events: Columns) -> None:

    if events.count == 0:
        return
    console.print(Text("last events", style="bold"))
    for record in events.to_records():
        payload = dict(getattr(record, "payload", None) or {})
        message = payload.pop("message", None)
        payload.pop("identifier", None)
        payload.pop("traceback", None)
        severity = getattr(record, "severity", "")
        line = Text.assemble(
            (record.timestamp[11:19], "dim"),
            f" {severity:<8} ",
            (getattr(record, "event_type", ""), "bold"),
            style=_LOG_STYLES.get(severity, ""),
        )
        step = getattr(record, "step", None)
        if step is not None:
            line.append(f" step {step}", style="dim")
        if message:
            # A log line must not command the terminal that shows it.
            line.append(f"  {message}".replace("\x1b", "?"))
        if getattr(record, "event_type", "") == "log_record":
            # The rest says where in the code it was logged; --json has it.
            payload = {"logger": payload.get("logger")}
        if payload:
            text = _compact(payload)
            if len(text) > _PAYLOAD_CHARACTERS:
                text = text[: _PAYLOAD_CHARACTERS - 1] + "…"
            line.append(f"  {text}", style="dim")
        console.print(line, soft_wrap=True)
