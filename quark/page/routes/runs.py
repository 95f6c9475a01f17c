"""The list of runs: pages of rows, each with its columns and how the run stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from quark.analysis.metric_roles import find_main_metric
from quark.page.routes.parameters import MAX_ROWS, MAX_RUNS, Parameters
from quark_core.backends.run_pages import MOST_NAMES
from quark_core.backends.run_summary import measure_duration_s
from quark_core.errors import RunNotFoundError, SessionStoreError
from quark_core.records import SystemTelemetryRecord, format_time
from quark_core.records.base import now_us
from quark_core.records.names import decode_name
from quark_core.records.query import Field, Query
from quark_core.runs import run_search
from quark_core.runs.reading import encode_key
from quark_core.runs.run_search import build_page_search, find_page
from quark_core.search.resolution import RUN_FIELDS

if TYPE_CHECKING:
    from quark.page.routes.analyses import AnalysisDesk
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import Analysis
    from quark_core.backends.run_pages import RunPage, RunRow
    from quark_core.backends.run_summary import RunSummary, StoredRun

ROW_FIELDS = (
    "project",
    "name",
    "state",
    "tags",
    "notes",
    "created",
    "ended",
    "duration",
    "step",
    "attempt",
)
"""What every row has of its run, as the language of searches calls it."""


def describe_column(text: str, field: Field) -> dict[str, Any]:
    """A column as it was understood.

    Args:
        text: As it was asked for.
        field: What it is of.
    """
    is_metric = field.scope == "metric"
    return {
        "text": text,
        "scope": field.scope,
        "name": decode_name(field.name) if is_metric else field.name,
        "key": encode_key(field.name, "column") if is_metric else None,
        "statistic": field.statistic if is_metric else None,
    }


def describe_found(run_id: str, values: Sequence[Any]) -> dict[str, Any]:
    """A run as a row, out of its values of `ROW_FIELDS`; what must be read for it is pending."""
    found = dict(zip(ROW_FIELDS, values, strict=True))
    return {
        "id": run_id,
        "project": found["project"],
        "name": found["name"],
        "state": found["state"],
        "lost_reason": None,
        "exit_code": None,
        "ending": None,
        "tags": list(found["tags"] or ()),
        "notes": found["notes"],
        "created_at": format_time(found["created"]),
        "ended_at": None if found["ended"] is None else format_time(found["ended"]),
        "duration_s": found["duration"],
        "newest_step": found["step"],
        "last_metric_at": None,
        "attempt": found["attempt"],
        "resume_count": None,
        "main": None,
        "pending": True,
    }


def show_cell(field: Field, value: Any) -> Any:
    """A value of a column as the page has it."""
    if value is not None and field.scope == "run" and RUN_FIELDS[field.name] == "time":
        return format_time(value)
    return value


def list_values(summary: RunSummary, fields: Sequence[Field]) -> list[Any]:
    """What a run has in each column; null where it lacks it."""
    from quark_core.search.evaluation import find_cell

    values = []
    for field in fields:
        if field.scope == "metric":
            field = replace(field, name=encode_key(field.name, "column"))
        values.append(show_cell(field, find_cell(field, summary)))
    return values


def describe_ending(stored: StoredRun) -> dict[str, Any] | None:
    """Why a run broke off: cause and message, on one line; None where nobody knows."""
    ending = stored.ending
    return None if ending is None else {"cause": ending.cause, "message": ending.describe()}


def describe_row(stored: StoredRun, summary: RunSummary | None = None) -> dict[str, Any]:
    """A run as a row.

    Args:
        stored: The run.
        summary: Its metrics summed up; None where that would cost reading its points.
    """
    run = stored.run
    last_metric_at = None if summary is None else summary.last_metric_at
    return {
        "id": run.id,
        "project": stored.project.name,
        "name": run.name,
        "state": stored.state,
        "lost_reason": stored.lost_reason,
        "exit_code": stored.exit_code,
        "ending": describe_ending(stored),
        "tags": list(run.tags),
        "notes": run.notes,
        "created_at": run.created_at,
        "ended_at": run.ended_at,
        "duration_s": measure_duration_s(stored, last_metric_at),
        "newest_step": None if summary is None else summary.newest_step,
        "last_metric_at": last_metric_at,
        "attempt": run.attempt,
        "resume_count": run.resume_count,
        "main": None if summary is None else describe_main(summary),
        "pending": summary is None,
    }


def describe_main(summary: RunSummary) -> Mapping[str, Any] | None:
    """The main metric of a run, as a row has it."""
    main = find_main_metric(summary)
    if main is None:
        return None
    last = main.last
    return {
        "key": main.key,
        "name": decode_name(main.key),
        "last": float("nan") if last is None and main.count else last,
        "count": main.count,
        "non_finite": main.non_finite,
    }


_SEVERITIES = ("critical", "error", "warning", "info")
# The last segment of a setting that says how many steps are planned.
_PLANNED = (
    "max_steps",
    "total_steps",
    "num_train_steps",
    "train_steps",
    "num_steps",
    "n_steps",
    "max_iters",
    "num_iterations",
    "total_iterations",
    "steps",
)
_RECENT_STEPS = 50
_LARGEST = 2**53


def describe_standing(
    source: PageSource, desk: AnalysisDesk, summary: RunSummary
) -> dict[str, Any]:
    """Health, worst finding, counts of alerts, phase and progress of one run."""
    analysis = desk.find(summary)
    return {**_describe_analysis(analysis), "progress": describe_progress(source, summary)}


def _describe_analysis(analysis: Analysis | None) -> dict[str, Any]:
    if analysis is None:
        return {"health": None, "worst": None, "alerts": None, "phase": None}
    overall = next((score for score in analysis.scores if score.score_key == "overall"), None)
    counted = Counter(alert.severity for alert in analysis.alerts)
    worst = min(
        analysis.alerts,
        key=lambda alert: _SEVERITIES.index(alert.severity),
        default=None,
    )
    phase = analysis.phases[-1] if analysis.phases else None
    return {
        "health": None
        if overall is None
        else {
            "known": overall.is_known,
            "score": overall.score,
            "status": overall.status,
            "word": overall.word,
            "reason": overall.unknown_reason,
        },
        "worst": None
        if worst is None
        else {
            "id": worst.id,
            "severity": worst.severity,
            "title": worst.title,
            "culprit": worst.culprit,
            "step": worst.step,
        },
        "alerts": {severity: counted[severity] for severity in _SEVERITIES},
        "phase": None if phase is None else {"name": phase.phase_name, "title": phase.display_name},
    }


def describe_progress(source: PageSource, summary: RunSummary) -> dict[str, Any]:
    """How far a run is, how fast, and when it is done, where that is known."""
    planned = _find_planned(summary)
    step = summary.newest_step
    is_live = summary.state == "running"
    step_ms, data_share = _measure_pace(source, summary) if is_live else (None, None)
    if step_ms is None and is_live:
        step_ms = _estimate_step_ms(summary)
    of = planned if planned is not None and step is not None and step <= planned else None
    eta_s = None
    if is_live and of is not None and step is not None and step_ms is not None:
        eta_s = max(0.0, (of - step) * step_ms / 1e3)
    said = summary.stored.progress if is_live else None
    if said is not None and said.remaining_s is not None:
        eta_s = said.remaining_s  # the loop knows better than the metrics do
    return {
        "step": step,
        "of": of,
        "share": None if not of or step is None else step / of,
        "told": None if said is None else said.describe(now_us()),
        "eta_s": eta_s,
        "ms_per_step": step_ms,
        "data_share": data_share,
    }


def _find_planned(summary: RunSummary) -> int | None:
    """How many steps the configuration plans, where a setting says so by its name."""
    from quark_core.search.evaluation import flatten_values

    found: dict[str, int] = {}
    for key, value in flatten_values(summary.config):
        name = key.rpartition(".")[2].lower()
        if name not in _PLANNED or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if 0 < value < _LARGEST and float(value).is_integer():
            found.setdefault(name, int(value))
    return next((found[name] for name in _PLANNED if name in found), None)


def _measure_pace(source: PageSource, summary: RunSummary) -> tuple[float | None, float | None]:
    """Median time of the newest steps, and the share of it that went into data."""
    import numpy as np

    query = Query(limit=_RECENT_STEPS)
    try:
        rows = source.reader.read(summary.run_id, SystemTelemetryRecord.KIND, query)
    except SessionStoreError:
        return None, None
    times = rows["step_time_ms"]
    known = np.isfinite(times) & (times > 0)
    if not known.any():
        return None, None
    data = rows["data_time_ms"][known]
    share = None
    if np.isfinite(data).any():
        share = float(np.nansum(data) / times[known].sum())
    return float(np.median(times[known])), share


def _estimate_step_ms(summary: RunSummary) -> float | None:
    """Time of a step over the whole run so far, resumed runs aside."""
    if summary.last_metric_at is None or not summary.newest_step or summary.stored.run.attempt:
        return None
    began = datetime.fromisoformat(summary.stored.run.created_at)
    newest = min(datetime.fromisoformat(summary.last_metric_at), datetime.now(UTC))
    elapsed_s = (newest - began).total_seconds()
    return elapsed_s * 1e3 / summary.newest_step if elapsed_s > 0 else None


_MAX_COLUMNS = 40
_MAX_ORDERS = 10
_ROWS = 100
_NAMES = 200
_PROJECT_ROWS = 1_000
_VALUES = 5
_VALUE_CHARACTERS = 60
_MOST_CURSOR = 100_000
_MOST_WHERE = 20_000
_IS_LIVE = "state == 'running'"
_FUNCTIONS = ("last", "min", "max", "first", "count")


def tell_about(source: PageSource, version: str, now: str) -> dict[str, Any]:
    """What is looked at, and what it can do."""
    projects = Counter(_list_projects(source))
    notes = []
    # Of what is not there yet nobody knows what it can do.
    lacks = {name for name, can in source.capabilities.items() if not can and not source.is_awaited}
    if "series" in lacks:
        notes.append("this backend reads every point of a curve")
    if "search" in lacks:
        notes.append("this backend reads every run to search for metrics")
    if "outputs" in lacks:
        notes.append("this backend does not store findings; they are computed here and not stored")
    return {
        "version": version,
        "place": source.place,
        "backend": source.backend,
        "capabilities": dict(source.capabilities),
        "notes": notes,
        "preparing": source.describe_preparing(),
        "projects": [{"name": name, "runs": count} for name, count in projects.items()],
        "now": now,
    }


def _list_projects(source: PageSource) -> Iterator[str]:
    """The project of each run, newest run first."""
    after = None
    while True:
        search = build_page_search(
            project=None, where=None, order_by=None, columns=("project",), limit=_PROJECT_ROWS,
            after=after, count=False,
        )  # fmt: skip
        page = find_page(source.reader, search)
        yield from (str(row.values[0]) for row in page.rows)
        after = page.next
        if after is None:
            return


def list_rows(source: PageSource, parameters: Parameters) -> dict[str, Any]:
    """One page of the list.

    Raises:
        SchemaValidationError: A bad parameter, or a mistake in an expression.
    """
    ask = _Ask.read(parameters)
    after = parameters.get_text("after", _MOST_CURSOR)
    page = ask.find(source, ask.where, after, count=True)
    rows = [_make_row(row, ask) for row in page.rows]
    if not ask.orders and (live := _list_live(source, ask)):
        # They stand on the first page, before all others.
        shown = {row["id"] for row in live}
        rows = [row for row in rows if row["id"] not in shown]
        rows = rows if after is not None else [*live, *rows]
    return {
        "count": page.count,
        "next": page.next,
        "columns": [describe_column(*pair) for pair in zip(ask.columns, ask.fields, strict=True)],
        "rows": rows,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What is asked for of the list."""

    project: str | None
    where: str | None
    orders: tuple[str, ...]
    columns: tuple[str, ...]
    fields: tuple[Field, ...]
    limit: int

    @classmethod
    def read(cls, parameters: Parameters) -> _Ask:
        columns = tuple(parameters.get_texts("column", _MAX_COLUMNS))
        from quark_core.search.parser import parse_column

        return cls(
            project=parameters.get_text("project"),
            where=parameters.get_text("where", _MOST_WHERE),
            orders=tuple(parameters.get_texts("order", _MAX_ORDERS)),
            columns=columns,
            fields=tuple(parse_column(text, "column") for text in columns),
            limit=parameters.get_bounded("limit", _ROWS, MAX_ROWS),
        )

    def find(
        self, source: PageSource, where: str | None, after: str | None, *, count: bool = False
    ) -> RunPage:
        """A page of the runs that fit."""
        search = build_page_search(
            project=self.project,
            where=where,
            order_by=self.orders or None,
            columns=(*ROW_FIELDS, *self.columns),
            limit=self.limit,
            after=after,
            count=count,
            where_argument="where",
            order_argument="order",
            columns_argument="column",
        )
        return find_page(source.reader, search)


def _list_live(source: PageSource, ask: _Ask) -> list[dict[str, Any]]:
    """The runs that go on; none where there are more than a page of them."""
    where = _IS_LIVE if ask.where is None else f"({ask.where}\n) and {_IS_LIVE}"
    page = ask.find(source, where, None)
    if page.next is not None:
        return []
    rows = []
    for found in page.rows:
        row = _make_row(found, ask)
        if source.capabilities["search"]:
            try:
                summary = source.summarize(found.run_id)
            except RunNotFoundError:
                continue  # removed meanwhile
            row["main"] = describe_main(summary)
            row["last_metric_at"] = summary.last_metric_at
            row["pending"] = False
        rows.append(row)
    return rows


def _make_row(row: RunRow, ask: _Ask) -> dict[str, Any]:
    own, others = row.values[: len(ROW_FIELDS)], row.values[len(ROW_FIELDS) :]
    cells = [show_cell(*pair) for pair in zip(ask.fields, others, strict=True)]
    return {**describe_found(row.run_id, own), "values": cells}


def list_standings(
    source: PageSource, desk: AnalysisDesk, parameters: Parameters
) -> dict[str, Any]:
    """What the visible rows say besides: health, the worst finding, progress.

    Raises:
        SchemaValidationError: A bad parameter.
    """
    from quark_core.search.parser import parse_column

    columns = [
        parse_column(text, "column") for text in parameters.get_texts("column", _MAX_COLUMNS)
    ]
    standings = {}
    for run_id in parameters.get_texts("run", MAX_RUNS):
        try:
            summary = source.summarize(run_id)
            standing = describe_standing(source, desk, summary)
        except RunNotFoundError:
            continue
        standing["newest_step"] = summary.newest_step
        standing["last_metric_at"] = summary.last_metric_at
        standing["state"] = summary.state
        standing["lost_reason"] = summary.stored.lost_reason
        standing["exit_code"] = summary.stored.exit_code
        standing["ending"] = describe_ending(summary.stored)
        standing["main"] = describe_main(summary)
        standing["values"] = list_values(summary, columns)
        standings[run_id] = standing
    return {"standings": standings}


def list_names(source: PageSource, parameters: Parameters) -> dict[str, Any]:
    """Names for completion.

    Raises:
        SchemaValidationError: A bad parameter.
    """
    prefix = parameters.get_text("prefix") or ""
    # What stands before the dot says where the name is looked for, and is no part of it.
    text = prefix.removeprefix("config.").removeprefix("metric.").removeprefix("run.")
    names = run_search.list_names(
        source.reader,
        project=parameters.get_text("project"),
        text=text,
        limit=parameters.get_bounded("limit", _NAMES, MOST_NAMES),
    )
    is_setting = prefix.startswith("config.")
    return {
        "metrics": []
        if is_setting
        else [{"key": written, "name": written} for written in names.metrics],
        "config": [
            {
                "key": entry.key,
                "written": entry.written,
                "types": entry.types,
                "values": [_shorten(value) for value in entry.values[:_VALUES]],
            }
            for entry in names.config
        ],
        "tags": [{"tag": entry.tag, "runs": entry.runs} for entry in names.tags],
        "fields": [name for name in RUN_FIELDS if text.lower() in name],
        "functions": list(_FUNCTIONS),
        "complete": names.complete,
    }


def _shorten(value: Any) -> Any:
    return value[:_VALUE_CHARACTERS] if isinstance(value, str) else value
