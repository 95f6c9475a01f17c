"""Tabs that plugins add to the page of a run: each is a table that a function of theirs makes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark.page.routes.edits import describe_edited
from quark.page.routes.findings import describe_analysis
from quark.page.routes.parameters import Parameters
from quark.page.routes.records import list_events
from quark.page.routes.runs import describe_progress, describe_row
from quark.page.routes.sweeps import describe_run_trial
from quark_core.backends.contract import SupportsSeries
from quark_core.backends.registry import default_registry
from quark_core.config.redaction import redact_text
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import (
    ArtifactRecord,
    BatchDiagnosticRecord,
    EventRecord,
    LayerSummaryRecord,
    LifecycleRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
)
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.records.kinds.samples import SampleRecord
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.artifact_versions import HIDDEN_TYPES
from quark_core.runs.following import read_series
from quark_core.runs.reading import read_rows
from quark_core.runs.run_report import read_summaries
from quark_core.system.terminal_text import clean_text

if TYPE_CHECKING:
    from quark.mirrors import MirrorState
    from quark.page.routes.analyses import AnalysisDesk
    from quark.page.routes.curves import ChangeDesk
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import Analysis
    from quark_core.backends.run_summary import RunSummary, StoredRun

_log = logging.getLogger("quark")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PLACE = re.compile(r"[\w.]+:\w+")
_MOST_ROWS = 1000


def list_views() -> list[dict[str, str]]:
    """Name and title of each view, sorted by name."""
    return [
        {"name": name, "title": name.replace("_", " ").capitalize()}
        for name in sorted(_find_places())
    ]


def read_view(source: PageSource, run_id: str, name: str) -> dict[str, Any]:
    """The table of a view, its first rows.

    Raises:
        RunNotFoundError: There is no such run.
        SchemaValidationError: There is no such view, or its plugin fails.
    """
    place = _find_places().get(name)
    if place is None:
        raise SchemaValidationError(f"no plugin provides a view {name!r:.60}")
    source.load_run(run_id)
    module, _, attribute = place.partition(":")
    try:
        made = getattr(import_module(module), attribute)(source.reader, run_id)
        columns, rows = [str(each) for each in made["columns"]], [list(row) for row in made["rows"]]
    except (Exception, SystemExit) as error:
        _log.exception("view %s at %s", name, place)
        reason = clean_text(f"{type(error).__name__}: {error}")
        raise SchemaValidationError(f"view {name!r} at {place} failed: {reason}") from error
    if any(len(row) != len(columns) for row in rows):
        raise SchemaValidationError(f"view {name!r} at {place} has rows unlike its columns")
    return {"columns": columns, "rows": rows[:_MOST_ROWS], "count": len(rows)}


def _find_places() -> dict[str, str]:
    """View -> where its function is; one that is declared wrongly is left out, and logged."""
    found: dict[str, str] = {}
    for plugin, declared in default_registry().collect("quark_register_views"):
        views = declared.items() if isinstance(declared, Mapping) else [(declared, None)]
        for name, place in views:
            is_named = isinstance(name, str) and _NAME.fullmatch(name) and name not in found
            if is_named and isinstance(place, str) and _PLACE.fullmatch(place):
                found[name] = place
            else:
                _log.warning("a view of plugin %s is omitted: %r at %r", plugin, name, place)
    return found


_METRIC_FIELDS = (
    "key",
    "name",
    "group",
    "count",
    "non_finite",
    "first",
    "last",
    "low",
    "high",
    "last_step",
    "epochs",
)
_TIMER_WINDOWS, _MOST_TIMERS = 5_000, 40
_CONTENTS = (
    LayerSummaryRecord.KIND,
    ParameterSummaryRecord.KIND,
    ParameterDistributionRecord.KIND,
    EventRecord.KIND,
    ArtifactRecord.KIND,
    BatchDiagnosticRecord.KIND,
    SystemTelemetryRecord.KIND,
    SampleRecord.KIND,
    ConsoleRecord.KIND,
)
# Among so many is one that people have logged, or there is none: a run keeps few of its own.
_SOME_ARTIFACTS = 1000
_DIGITS = re.compile(r"(\d+)")
_FIRST = {"train": 0, "val": 1, "system": 3, "quark": 3}
_ELSEWHERE = 2


def tell_run(
    source: PageSource, desk: AnalysisDesk, changes: ChangeDesk, run_id: str
) -> dict[str, Any]:
    """All that the page of a run begins with.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    from quark.projects import find_inherited

    summary = source.summarize(run_id)
    stored = summary.stored
    environment: Mapping[str, Any] = (
        {} if stored.environment is None else dict(stored.environment.values)
    )
    analysis = desk.request(summary)
    contents = {kind: _count_some(source, run_id, kind) for kind in _CONTENTS}
    return {
        "cursor": changes.begin(summary),
        "run": _describe_run(source, stored, summary, environment),
        "attempts": _list_attempts(source, stored),
        "ranks": _list_ranks(source, summary),
        "config": {} if stored.config is None else dict(stored.config.values),
        "config_notes": [] if stored.config is None else list(stored.config.notes),
        "config_origins": list_origins(stored),
        "fields": dict(find_inherited(source.reader, stored).fields),
        "environment": environment,
        "metrics": {"fields": _METRIC_FIELDS, "rows": _list_metrics(summary)},
        "contents": contents,
        "absent": describe_absent(source, contents),
        "analysis": _tell_analysis(source, desk, run_id, analysis),
        "delivery": _describe_delivery(source, run_id),
        "progress": describe_progress(source, summary),
        "timers": _list_timers(source, run_id),
        "views": list_views(),
    }


def list_origins(stored: StoredRun) -> dict[str, list[dict[str, Any]]]:
    """Setting -> what gave it its values, the newest first: source, place and value."""
    if stored.config is None:
        return {}
    return {
        key: [{"source": each.source, "place": each.place, "value": each.value} for each in chain]
        for key, chain in stored.config.group_origins().items()
    }


def _list_timers(source: PageSource, run_id: str) -> list[dict[str, Any]]:
    """Where the time of the newest windows went, what took the most first."""
    rows = read_summaries(source.reader, run_id, windows=_TIMER_WINDOWS).timers
    return [each.to_dict() for each in rows[:_MOST_TIMERS]]


def tell_analysis(
    source: PageSource, desk: AnalysisDesk, run_id: str, parameters: Parameters
) -> dict[str, Any] | None:
    """What is known of a run by analysis; None where the page has that already, of that mark."""
    mark = parameters.get_text("mark")
    analysis = desk.request(source.summarize(run_id))
    if analysis is not None and mark == analysis.mark:
        return None
    return {"analysis": _tell_analysis(source, desk, run_id, analysis)}


def _tell_analysis(
    source: PageSource, desk: AnalysisDesk, run_id: str, analysis: Analysis | None
) -> dict[str, Any]:
    found = describe_analysis(analysis, computing=desk.is_computing(run_id))
    if found["state"] == "computed" and not source.capabilities["outputs"]:
        found["note"] = f"analyzed for this page, because {source.backend} does not store analyses"
    return found


def describe_absent(source: PageSource, contents: Mapping[str, int | None]) -> dict[str, str]:
    """What there is nothing of, and why that says little of the run: kind -> a sentence.

    Of a store of Quark's own nothing: what it does not have was not logged.
    """
    if source.specification is None:
        return {}
    name = source.backend
    absent = {
        kind: f"{name} has no data of this run. It contains the runs that Quark has mirrored to "
        "it. From runs of other tools, only metrics, parameters, tags and notes are read."
        if count == 0
        else f"The records of this run in {name} cannot be read."
        for kind, count in contents.items()
        if not count
    }
    absent["delivery"] = (
        f"This run is read from {source.place}. Its other backends and waiting records are "
        "known in the folder where it was logged. `quark ui` in that folder shows them."
    )
    if not source.capabilities["artifacts"]:
        absent["payload"] = (
            f"{name} does not store payloads, so artifacts are listed without their content."
        )
    return absent


def _describe_run(
    source: PageSource, stored: StoredRun, summary: RunSummary, environment: Mapping[str, Any]
) -> dict[str, Any]:
    run = stored.run
    git = _get_object(environment, "git")
    process = _get_object(environment, "process")
    return {
        **describe_row(stored, summary),
        **describe_edited(stored),
        "path": run.run_path,
        "git_commit": run.git_commit,
        "branch": git.get("branch"),
        "dirty": git.get("dirty"),
        "groups": list(run.groups),
        "parent": run.parent_run_id,
        "fork_step": run.fork_step,
        "lineage": run.lineage_root_run_id,
        "host": _get_object(environment, "host").get("name"),
        "user_command": process.get("argv"),
        # What is read from elsewhere cannot be gone on with from there.
        "resume": None if source.specification else f"quark.resume_run(run_id={str(run.id)!r})",
        "heartbeat_at": stored.heartbeat_at,
        "trial": describe_run_trial(source, stored),
        "traceback": _find_traceback(source, stored),
    }


def _find_traceback(source: PageSource, stored: StoredRun) -> str | None:
    """Of the exception that the newest attempt ended with."""
    if stored.ending is None or stored.ending.cause != "exception":
        return None
    try:
        asked = Parameters([("type", "runtime_error"), ("limit", "1")])
        events = list_events(source, str(stored.run.id), asked)["events"]
    except QuarkError:
        return None
    of_end = [each["traceback"] for each in events if each["attempt"] == stored.run.attempt]
    return of_end[0] if of_end else None


def _get_object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _list_metrics(summary: RunSummary) -> list[list[Any]]:
    """A row for each metric, sorted as people count."""
    rows: list[list[Any]] = []
    for key, metric in summary.metrics.items():
        name = decode_name(key)
        group = name.rpartition("/")[0]
        is_broken = metric.count > 0 and metric.last is None
        rows.append(
            [
                key,
                name,
                group,
                metric.count,
                metric.non_finite,
                metric.first,
                float("nan") if is_broken else metric.last,
                metric.low,
                metric.high,
                metric.last_step,
                metric.last_step is None,
            ]
        )
    rows.sort(key=lambda row: place_metric(row[1], row[2]))
    return rows


def place_metric(name: str, group: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Train and validation first, the machine last; m2 before m10."""
    place = _FIRST.get(group.partition("/")[0], _ELSEWHERE)
    parts = [
        (0, int(part[:18]), "") if part.isdecimal() and part.isascii() else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
    ]
    return place, parts


def _list_attempts(source: PageSource, stored: StoredRun) -> list[dict[str, Any]]:
    """When each attempt began and ended, as far as the backend keeps it."""
    query = Query(any_of={"action": ("start", "status")})
    try:
        records: Any = source.reader.read(
            str(stored.run.id), LifecycleRecord.KIND, query
        ).to_records()
    except QuarkError:
        records = ()
    attempts: dict[int, dict[str, Any]] = {}
    for record in records:
        data: dict[str, Any] = dict(record.data or {})
        attempt = attempts.setdefault(
            record.attempt,
            {
                "attempt": record.attempt,
                "started_at": None,
                "from_step": None,
                "ended_at": None,
                "state": None,
            },
        )
        if record.action == "start" and attempt["started_at"] is None:
            attempt["started_at"] = record.timestamp
            attempt["from_step"] = data.get("from_step")
        elif record.action == "status":
            attempt["ended_at"] = record.timestamp
            attempt["state"] = data.get("status")
    found = [attempts[number] for number in sorted(attempts)]
    if found and found[-1]["attempt"] == stored.run.attempt:
        found[-1]["state"] = stored.state
    return found


def _list_ranks(source: PageSource, summary: RunSummary) -> list[int]:
    """The ranks that have logged the metric with the most points, or none."""
    most = max(summary.metrics.values(), key=lambda metric: metric.count, default=None)
    if most is None or not isinstance(source.reader, SupportsSeries):
        return []
    return list(read_series(source.reader, summary.run_id, most.key, 1).ranks)


def _count_some(source: PageSource, run_id: str, kind: str) -> int | None:
    """0 where there are no records of a kind, 1 where there are some, None where nobody knows."""
    try:
        if kind != ArtifactRecord.KIND:
            return read_rows(source.reader, run_id, kind, Query(limit=1)).count
        types = read_rows(source.reader, run_id, kind, Query(limit=_SOME_ARTIFACTS))
        return int(any(name not in HIDDEN_TYPES for name in types["artifact_type"].tolist()))
    except QuarkError:
        return None


def _describe_delivery(source: PageSource, run_id: str) -> dict[str, Any]:
    """Where the run goes to, as far as this machine knows, and what is not there yet."""
    from quark_core.runs.recovery import count_unstored

    if source.is_foreign:
        return {"lanes": [], "unstored": None}
    keeps_journal = bool(getattr(source.reader, "keeps_journal", False))
    try:
        waiting = count_unstored(source.storage_dir, run_id, keeps_journal=keeps_journal)
    except (OSError, QuarkError):
        waiting = 0
    lanes = [
        {
            "backend": source.backend,
            "primary": True,
            "place": source.place,
            "note": None if not waiting else f"{waiting} records wait on this machine",
        }
    ]
    return {
        "lanes": [*lanes, *_list_mirrors(source, run_id)],
        "unstored": "some records of this run are not in the store yet: `quark sync` delivers them"
        if waiting
        else None,
    }


def _list_mirrors(source: PageSource, run_id: str) -> list[dict[str, Any]]:
    from quark.mirrors import survey_mirrors

    run_path = source.storage_dir / ".quark" / "runs" / run_id
    try:
        states = survey_mirrors(source.storage_dir, run_path, run_id)
    except (OSError, QuarkError):
        return []
    return [
        {
            "backend": state.backend,
            "primary": False,
            "place": redact_text(state.specification),
            "note": _describe_mirror(state),
        }
        for state in states
        if not state.primary
    ]


def _describe_mirror(state: MirrorState) -> str:
    parts = [state.state]
    if state.waiting:
        parts.append(f"{state.waiting} records wait")
    if state.unknown:
        parts.append(f"{state.unknown} unknown")
    parts += [f"{count} refused ({reason})" for reason, count in state.quarantined.items()]
    return ", ".join([*parts, *state.reasons])
