"""A run as one row of the list, with the columns that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from quark.analysis.metric_roles import find_main_metric
from quark_core.records import format_time
from quark_core.records.names import decode_name
from quark_core.records.query import Field
from quark_core.runs.reading import encode_key
from quark_core.search.resolution import RUN_FIELDS

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun
    from quark_core.backends.run_summary import RunSummary

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
        "duration_s": _measure_duration_s(stored, last_metric_at),
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


def _measure_duration_s(stored: StoredRun, last_metric_at: str | None) -> float:
    """How long a run took, or has taken; a lost one counts to its last sign of life."""
    end = stored.run.ended_at
    if end is None and stored.state == "lost":
        beats = [moment for moment in (stored.heartbeat_at, last_metric_at) if moment is not None]
        end = max(beats, key=datetime.fromisoformat, default=None)
    stop = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
    return max(0.0, (stop - datetime.fromisoformat(stored.run.created_at)).total_seconds())
