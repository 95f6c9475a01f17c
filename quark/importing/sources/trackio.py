"""Runs in Trackio's databases: `PROJECT.db` files, with the folder `media` beside them.

    project, run name, config     the same; the group as the tag `group=…`
    numbers of a log              metrics, nested ones as `a.b`
    images, audio, video, files   artifacts of these types
    tables, histograms, Markdown  likewise
    system metrics                telemetry, in its metadata
    alerts                        events

Trackio does not say how a run ended: it counts as completed. Traces are not taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quark.importing.neutral_run import (
    ForeignRun,
    ImportFailure,
    Losses,
    Portion,
    RunFacts,
    find_place,
    start_at,
)
from quark.importing.safe_files import Database
from quark.importing.sources.wandb_values import WandbValues
from quark_core.records import EventRecord, SystemTelemetryRecord, parse_time
from quark_core.records.json_object import JsonObject

_TABLES = ("metrics", "configs", "system_metrics", "alerts", "traces")
_PREFIX = "trackio."
_MEDIA = {"image": "image", "audio": "audio", "video": "video", "file": "file"}
_LEVELS = {"info": "info", "warn": "warning", "error": "error"}


def find_runs(place: str | Path, *, project: str | None = None) -> Iterator[ForeignRun]:
    """The runs of the databases in a folder, or of one.

    Args:
        place: The folder (`~/.cache/huggingface/trackio`, or TRACKIO_DIR), or a database.
        project: Their project; by default the database's name.

    Raises:
        ImportFailure: There is no such place, or no database.
    """
    root = find_place(place)
    paths = [root] if root.is_file() else sorted(one for one in root.glob("*.db") if one.is_file())
    if not paths:
        raise ImportFailure(f"{root} does not contain a Trackio database (PROJECT.db)")
    for path in paths:
        database = _Database(path)
        for run_id, name in database.list_runs():
            yield TrackioRun(database, run_id, name, project or path.stem)


class _Database(Database):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "Trackio", _TABLES)
        columns = self.ask("SELECT name FROM pragma_table_info('metrics')")
        if ("metrics",) not in columns:
            raise ImportFailure(f"{path} is not a Trackio database")
        # Older versions know runs by their names alone.
        self.key = "run_id" if ("run_id",) in columns else "run_name"

    def list_runs(self) -> list[tuple[str, str]]:
        """Key and name of each run, the oldest first."""
        return [
            (str(key), str(name))
            for key, name in self.ask(
                f"SELECT {self.key}, max(run_name) FROM metrics GROUP BY 1 ORDER BY min(id)"
            )
        ]


class TrackioRun(ForeignRun):
    """One run; its position is the last row of each table that was taken."""

    def __init__(self, database: _Database, run_id: str, name: str, project: str) -> None:
        self.key = f"{database.path}\0{run_id}"
        self._database = database
        self._run_id = run_id
        self._name = name
        self._project = project

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        database = self._database
        config: dict[str, Any] = {}
        if database.has("configs"):
            for (text,) in database.ask(
                f"SELECT config FROM configs WHERE {database.key} = ?", self._run_id
            ):
                config.update(_read_json(text))
        span = database.ask(
            f"SELECT min(timestamp), max(timestamp) FROM metrics WHERE {database.key} = ?",
            self._run_id,
        )
        group = config.get("_Group")
        return RunFacts(
            identity=f"{database.path.stem}/{self._run_id}",
            project=self._project,
            name=self._name,
            tags=[f"group={group}"] if group else [],
            config={name: value for name, value in config.items() if not name.startswith("_")},
            environment={"trackio": {"database": str(database.path)}},
            is_told=False,
            started_us=_read_time(config.get("_Created")) or _read_time(span[0][0]),
            ended_us=_read_time(span[0][1]),
        )

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        (row,) = self._database.ask(
            f"SELECT max(id) FROM metrics WHERE {self._database.key} = ?", self._run_id
        )
        return str(row[0])

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        at = {name: int(position.get(name, 0)) for name in ("metrics", "system_metrics", "alerts")}
        values = _Values(self._database.path.parent / "media", losses)
        is_new = False
        for number, timestamp, step, text in self._ask("metrics", "step, metrics", at):
            time_s = (_read_time(timestamp) or 0) / 1e6
            for key, value in _read_json(text).items():
                values.take(key, value, int(step), time_s)
            at["metrics"], is_new = number, True
            if values.is_full:
                yield values.make_portion(dict(at))
                is_new = False
        for number, timestamp, text in self._ask("system_metrics", "metrics", at):
            fields = start_at(_read_time(timestamp) or 0)
            metadata = JsonObject({"trackio": _read_json(text)})
            values.records.append(SystemTelemetryRecord(*fields, "time", metadata=metadata))
            at["system_metrics"], is_new = number, True
        for number, timestamp, step, title, text, level in self._ask(
            "alerts", "step, title, text, level", at
        ):
            fields = start_at(_read_time(timestamp) or 0)
            payload = JsonObject({"message": f"{title}: {text}" if text else title})
            severity = _LEVELS.get(level, "warning")
            values.records.append(
                EventRecord(*fields, "trackio_alert", severity, step, None, None, payload)
            )
            at["alerts"], is_new = number, True
        if self._database.has("traces"):
            key = self._database.key
            ((count,),) = self._database.ask(
                f"SELECT count(*) FROM traces WHERE {key} = ?", self._run_id
            )
            if count:
                losses.add("trace", "traces", "traces cannot be imported", count)
        if is_new:
            yield values.make_portion(dict(at))

    def _ask(self, table: str, fields: str, at: Mapping[str, int]) -> list[tuple[Any, ...]]:
        if not self._database.has(table):
            return []
        return self._database.ask(
            f"SELECT id, timestamp, {fields} FROM {table} WHERE {self._database.key} = ?"
            " AND id > ? ORDER BY id",
            self._run_id,
            at[table],
        )


class _Values(WandbValues):
    """Values as Trackio types them: W&B's ways under other names."""

    def _take_typed(self, key: str, value: Mapping[str, Any], step: int, time_s: float) -> None:
        form = str(value["_type"]).removeprefix(_PREFIX)
        time_us = round(time_s * 1e6)
        if form == "histogram":
            self._take_histogram(key, value, step, time_us)
        elif form in _MEDIA:
            path = value.get("file_path")
            self._take_file(key, _MEDIA[form], path, value, step, time_us)
        elif form == "markdown":
            data = str(value.get("_value", "")).encode()
            self._add_file(key, "markdown", data, {}, step, time_us, "text")
        elif form == "table" and isinstance(value.get("_value"), list):
            rows = [row for row in value["_value"] if isinstance(row, dict)]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            table = {"columns": columns, "rows": [[row.get(c) for c in columns] for row in rows]}
            self._add_file(key, "table", msgspec.json.encode(table), {}, step, time_us, "json")
        else:
            self._losses.add(form, key, f"the Trackio type {form} cannot be imported")


def _read_json(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_time(text: Any) -> int | None:
    try:
        return parse_time(text)
    except (TypeError, ValueError, OverflowError):
        return None
