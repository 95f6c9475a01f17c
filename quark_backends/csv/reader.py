"""Reads the CSV mirror back."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_backends.csv.files import MirrorState
from quark_backends.csv.run_file import RunFile
from quark_core.backend import StoredRun
from quark_core.errors import RunNotFoundError, SessionStoreError
from quark_core.json_object import JsonObject
from quark_core.names import split_name
from quark_core.records import EventRecord, MetricRecord, StreamRecord, parse_time

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.query import Query

__all__ = ["CsvReader", "read_in_order", "read_rows"]

_FILES = {MetricRecord.KIND: "metrics_long", EventRecord.KIND: "events"}
_RUN_FOLDER = "csv"


class CsvReader:
    """Reads runs out of a folder that holds one folder per run.

    Args:
        root: That folder.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root or Path()

    def folder_of(self, run_id: str) -> Path:
        """The mirror's folder of a run."""
        nested = self._root.name == "runs" and self._root.parent.name == ".quark"
        return self._root / run_id / _RUN_FOLDER if nested else self._root / run_id

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order.

        Raises:
            RunNotFoundError: No such run here.
            SessionStoreError: A file cannot be read.
        """
        from quark_core.attempts import hide_superseded
        from quark_core.columns import Columns

        folder = self.folder_of(run_id)
        if not folder.is_dir():
            raise RunNotFoundError(f"the CSV mirror {self._root} has no run {run_id}")
        if kind not in _FILES:
            return Columns.empty(kind)
        parse: Callable[[str, dict[str, str]], StreamRecord] = (
            _to_metric if kind == MetricRecord.KIND else _to_event
        )
        try:
            records = [parse(run_id, row) for row in read_in_order(folder, _FILES[kind])]
        except (OSError, ValueError, KeyError, csv.Error) as error:
            raise SessionStoreError(f"the CSV mirror {folder} cannot be read: {error}") from error
        columns = Columns.from_records(kind, records)
        if not query.all_attempts:
            columns = hide_superseded(columns, RunFile(folder).load_from_steps())
        return columns.select(query)

    def load_run(self, run_id: str) -> StoredRun:
        """One run.

        Raises:
            RunNotFoundError: No such run here.
        """
        found = RunFile(self.folder_of(run_id)).load()
        if found is None:
            raise RunNotFoundError(f"the CSV mirror {self._root} has no run {run_id}")
        return found

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """Runs, newest first."""
        if not self._root.is_dir():
            return []
        loaded = [
            RunFile(self.folder_of(entry.name)).load()
            for entry in self._root.iterdir()
            if entry.is_dir()
        ]
        runs = [run for run in loaded if run is not None and project in (None, run.project.name)]
        runs.sort(key=lambda stored: stored.run.created_at, reverse=True)
        return runs[:limit]


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of one of the mirror's files; an unfinished last line is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(_finished_lines(file)):
            if None not in row.values():
                yield row


def _finished_lines(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith("\n"))


def read_in_order(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of all processes' files of one name, in persistence order."""
    started = _find_starts(folder)
    rows = [row for path in sorted(folder.glob(f"{name}*.csv")) for row in read_rows(path)]
    rows.sort(
        key=lambda row: (
            int(row["attempt"]),
            int(row["rank"]),
            started.get(row["writer"], 0),
            row["writer"],
            int(row["sequence"]),
        )
    )
    return rows


def _find_starts(folder: Path) -> dict[str, int]:
    starts: dict[str, int] = {}
    for path in folder.glob("state*.json"):
        for writer_id, writer in MirrorState.load(path).writers.items():
            starts[writer_id] = writer.started_us
    return starts


def _to_metric(run_id: str, row: dict[str, str]) -> MetricRecord:
    namespace, name = split_name(row["key"])
    return MetricRecord(
        run_id,
        row["writer"],
        int(row["attempt"]),
        int(row["rank"]),
        int(row["sequence"]),
        parse_time(row["timestamp"]),
        row["key"],
        namespace,
        name,
        float(row["value"]),
        _to_index(row["step"]),
        _to_index(row["epoch"]),
        row["description"] or None,
        _to_object(row["metadata"]),
    )


def _to_event(run_id: str, row: dict[str, str]) -> EventRecord:
    return EventRecord(
        run_id,
        row["writer"],
        int(row["attempt"]),
        int(row["rank"]),
        int(row["sequence"]),
        parse_time(row["timestamp"]),
        row["event_type"],
        row["severity"],
        _to_index(row["step"]),
        _to_index(row["epoch"]),
        row["status"] or None,
        _to_object(row["payload"]),
    )


def _to_index(text: str) -> int | None:
    return int(text) if text else None


def _to_object(text: str) -> JsonObject | None:
    loaded: Any = json.loads(text) if text else None
    return None if loaded is None else JsonObject(loaded)
