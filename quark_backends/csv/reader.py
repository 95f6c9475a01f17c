"""Reads the CSV mirror back."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quark_backends.csv.files import load_csv_state
from quark_backends.csv.rows import find_form
from quark_backends.csv.run_file import RunFile
from quark_core.api import RECORD_TYPES, RunNotFoundError, SessionStoreError, StoredRun

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

_RUN_FOLDER = "csv"
# As long as a 32-bit C long can say.
_LONGEST_CELL = 2**31 - 1


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
        from quark_core.api import Columns, hide_superseded

        folder = self.folder_of(run_id)
        if not folder.is_dir():
            raise RunNotFoundError(f"the CSV mirror {self._root} has no run {run_id}")
        form = find_form(kind)
        try:
            rows = read_in_order(folder, RECORD_TYPES[kind].TABLE)
            records = [form.decode(run_id, row) for row in rows]
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
    """Rows of one of the mirror's files; an unfinished last line is left out.

    Raises:
        OSError, csv.Error: It cannot be read.
    """
    # A cell of JSON may be longer than what the module lets through by itself.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    with path.open(newline="\n", encoding="utf-8") as file:
        for row in csv.DictReader(_finished_lines(file)):
            if None not in row.values() and None not in row:
                yield row


def _finished_lines(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith("\n"))


def read_in_order(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of all processes' files of one name, in persistence order."""
    started = _find_starts(folder)
    paths = [path for path in (folder / f"{name}.csv",) if path.exists()]
    paths += sorted(folder.glob(f"{name}-*.csv"))
    rows = [row for path in paths for row in read_rows(path)]
    rows.sort(
        key=lambda row: (
            int(row["attempt"]),
            int(row["rank"]),
            started.get(row["writer"], 0),
            row["writer"],
            int(row["sequence"]),
        )
    )
    # What a killed process has written and not acknowledged came again by another one.
    pairs = zip([None, *rows], rows, strict=False)
    return [row for before, row in pairs if before is None or _identify(before) != _identify(row)]


def _identify(row: dict[str, str]) -> tuple[str, str]:
    return row["writer"], row["sequence"]


def _find_starts(folder: Path) -> dict[str, int]:
    starts: dict[str, int] = {}
    for path in folder.glob("state*.json"):
        for writer_id, writer in load_csv_state(path).writers.items():
            starts[writer_id] = writer.started_us
    return starts
