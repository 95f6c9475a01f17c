"""A run in short: what it is, what it was given, what came of it and where its time went."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.aggregates import AggregateTable, read_summaries
from quark_core.runs.reading import read_rows
from quark_core.runs.searching import summarize_run
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun, SupportsRead

_MOST_EVENTS = 1_000
_MOST_ERRORS = 20
_ERRORS = frozenset({"error", "critical"})
_VERSION = "version"


class ShortReport:
    """A run in short; `str()` is text for people, `to_dict()` and `to_json()` are for programs.

    Made by `session.report(short=True)` and `quark report RUN --short`.

    Args:
        contents: What `to_dict()` gives.
        aggregates: What was timed and aggregated.
    """

    def __init__(self, contents: dict[str, Any], aggregates: AggregateTable) -> None:
        self._contents = contents
        self._aggregates = aggregates

    def to_dict(self) -> dict[str, Any]:
        """A new dict: `id`, `name`, `description`, `project`, `status`, `version`, `commit`,
        `revision`, `tags`, `groups`, `parameters`, `metadata`, `metrics`, `chronos`,
        `aggregates`, `errors`, `started`, `ended`, `attempts`.
        """  # noqa: D205 - the keys are the summary
        return dict(self._contents)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The same as JSON text; numbers that are not finite are null."""
        return json.dumps(_make_finite(self._contents), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        has = self._contents
        title = has["name"] or has["id"]
        lines = [f"{title} ({has['id']}): {has['status']}, {has['project']}"]
        facts = {
            "version": has["version"],
            "commit": (has["commit"] or "")[:10],
            "tags": ", ".join(has["tags"]),
            "groups": ", ".join(has["groups"]),
            "notes": has["description"],
        }
        lines += [f"  {name}: {value}" for name, value in facts.items() if value]
        for name in ("parameters", "metadata"):
            if has[name]:
                lines.append(f"{name}:")
                lines += [f"  {key}: {_show(value)}" for key, value in has[name].items()]
        if has["metrics"]:
            lines.append("metrics:")
            lines += [f"  {key}: {_tell(metric)}" for key, metric in has["metrics"].items()]
        lines += [f"error: {each['message']}" for each in has["errors"]]
        told = [clean_line(line) for line in lines]
        if len(self._aggregates):
            told += ["", *map(clean_line, str(self._aggregates).splitlines())]
        return "\n".join(told)

    def __repr__(self) -> str:
        return f"ShortReport({self._contents['id']})"


def read_short_report(reader: SupportsRead, stored: StoredRun) -> ShortReport:
    """A stored run in short.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    run = stored.run
    run_id = str(run.id)
    table = read_summaries(reader, run_id)
    rows = {each.key: each.to_dict() for each in table}
    timers = {each.key for each in table.timers}
    return ShortReport(
        {
            "id": run_id,
            "name": run.name,
            "description": run.notes,
            "project": stored.project.name,
            "status": stored.state,
            "version": stored.fields.get(_VERSION),
            "commit": run.git_commit,
            "revision": stored.fields.get("revision", 0),
            "tags": list(run.tags),
            "groups": list(run.groups),
            "parameters": {} if stored.config is None else _thaw(stored.config.values),
            "metadata": {key: value for key, value in stored.fields.items() if key != _VERSION},
            "metrics": {
                decode_name(key): {
                    "first": metric.first,
                    "last": metric.last,
                    "low": metric.low,
                    "high": metric.high,
                    "count": metric.count,
                    "last_step": metric.last_step,
                }
                for key, metric in summarize_run(reader, run_id).metrics.items()
            },
            "chronos": {key: row for key, row in rows.items() if key in timers},
            "aggregates": {key: row for key, row in rows.items() if key not in timers},
            "errors": _read_errors(reader, run_id),
            "started": run.created_at,
            "ended": run.ended_at,
            "attempts": run.attempt + 1,
        },
        table,
    )


def _read_errors(reader: SupportsRead, run_id: str) -> list[dict[str, Any]]:
    """The newest things that went wrong, of the newest events."""
    found: Any = read_rows(reader, run_id, EventRecord.KIND, Query(limit=_MOST_EVENTS))
    errors = []
    for record in found.to_records():
        if record.severity not in _ERRORS:
            continue
        payload = dict(record.payload or {})
        message = str(payload.get("message") or record.event_type)
        errors.append({"at": record.timestamp, "type": record.event_type, "message": message,
                       "step": record.step})  # fmt: skip
    return errors[-_MOST_ERRORS:]


def _thaw(values: JsonObject) -> dict[str, Any]:
    return {key: _thaw(value) if isinstance(value, JsonObject) else value
            for key, value in values.items()}  # fmt: skip


def _make_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _make_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_make_finite(value), ensure_ascii=False)


def _tell(metric: dict[str, Any]) -> str:
    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.6g}"

    return (
        f"{show(metric['last'])} (first {show(metric['first'])}, {show(metric['low'])} to "
        f"{show(metric['high'])}, {metric['count']:,} points)"
    )
