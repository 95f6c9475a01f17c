"""Runs in CSV files: any table of metrics, one point a row or one metric a column.

    one row a point     columns key (metric, tag …) and value
    one metric a column every column that is not the step, the epoch, the time or the run
    W&B's charts        "run - metric" with __MIN and __MAX beside it: a run for each
    TensorBoard's       Wall time, Step, Value: the file's name is the metric
    MLflow's runs       run_id, params.…, metrics.…, tags.…: a run for each row
    Quark's own mirror  a folder with run.json: the run as it was, under its id
    hparams.yaml        beside the file, as Lightning writes it: the configuration

Without a step or an epoch, the number of the row is the step. Without a time, it is that of
the file. A run is known by the path of its file.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from quark.importing.foreign import (
    PORTION_POINTS,
    ForeignRun,
    ImportFailure,
    Points,
    Portion,
    RunFacts,
)
from quark.importing.losses import Losses
from quark.importing.places import DOCUMENT_BYTES, find_files, read_document
from quark.importing.sources.csv_forms import ColumnChoice, TableForm, find_form, parse_moment
from quark.importing.sources.csv_runs import find_table_runs, is_table_of_runs

_DELIMITERS = ",;\t|"
_PLAIN_STEMS = frozenset({"metrics", "metrics_long", "progress", "history", "log", "results"})
_FIELD_BYTES = 16 * 2**20
# Rows without a number from which on a file is taken for none of metrics.
_MOST_TRIED = 10_000


def find_runs(
    place: str | Path, choice: ColumnChoice | None = None, *, project: str | None = None
) -> Iterator[ForeignRun]:
    """The runs in a CSV file, or in those under a folder.

    Args:
        place: The file or folder.
        choice: Columns that the user names.
        project: Their project; by default the folder's name.

    Raises:
        ImportFailure: There is no such place.
    """
    csv.field_size_limit(_FIELD_BYTES)
    root = Path(place).expanduser()
    if not root.exists():
        raise ImportFailure(f"{root} does not exist")
    root = root.resolve()
    for path in find_files(root, "*.csv"):
        own = path.parent / "run.json"
        if own.is_file() and path.name != "metrics_long.csv" and not root.is_file():
            continue  # the other tables of our own mirror
        yield from _find_in_file(path, choice or ColumnChoice(), project)


def _find_in_file(path: Path, choice: ColumnChoice, project: str | None) -> Iterator[ForeignRun]:
    try:
        table = CsvTable(path)
        if is_table_of_runs(table.header):
            yield from find_table_runs(path, table.read_all(), project or path.stem)
            return
        form = find_form(table.header, path, choice)
        if not any(_has_number(form, row) for _, row in islice(table.read(0), _MOST_TRIED)):
            raise ImportFailure(f"{path} is no table of metrics: no column of it holds numbers")
        names = form.name_runs()
        if form.run is not None:
            names = list(dict.fromkeys(row[form.run].strip() or None for _, row in table.read(0)))
        for name in names:
            yield CsvRun(table, form, name, project or path.parent.name)
    except (ImportFailure, OSError) as error:
        yield BrokenFile(path, str(error))


def _has_number(form: TableForm, row: Sequence[str]) -> bool:
    """Whether a row has a point."""
    for _, _, text in form.list_points(row):
        with suppress(ValueError):
            float(text)
            return True
    return False


class BrokenFile(ForeignRun):
    """A file that holds no runs, or cannot be read: it fails where a run would be taken."""

    def __init__(self, path: Path, reason: str) -> None:
        self.key = str(path)
        self._reason = reason

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        raise ImportFailure(self._reason)

    def read(
        self,
        position: Mapping[str, Any],  # noqa: ARG002 - as every run has it
        losses: Losses,  # noqa: ARG002
    ) -> Iterator[Portion]:
        """See `ForeignRun`."""
        raise ImportFailure(self._reason)


class CsvTable:
    """A CSV file that may still grow.

    Attributes:
        path: It.
        header: The names of its columns.
        head: Stays the same as long as the header does.
        start: Offset of the first row.
        is_cut: Whether the last row that was met is half written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_cut = False
        with path.open("rb") as file:
            first = self._read_line(file)
            text = first.decode("utf-8-sig", "replace")
            counts = {mark: text.count(mark) for mark in _DELIMITERS}
            self.delimiter = max(counts, key=lambda mark: counts[mark])
            file.seek(0)
            row = next(self._cut(file, 0), None)
        if row is None:
            raise ImportFailure(f"{path} has no header yet")
        self.start, self.header = row
        self.header[0] = self.header[0].removeprefix("\ufeff")
        self.head = hashlib.sha256(first).hexdigest()[:16]

    def read(self, offset: int) -> Iterator[tuple[int, list[str]]]:
        """Whole rows from an offset on, each with the offset behind it; short ones are filled up.

        Raises:
            ImportFailure: The file is shorter.
            OSError: It cannot be read.
        """
        width = len(self.header)
        with self.path.open("rb") as file:
            if self.path.stat().st_size < offset:
                raise ImportFailure(
                    f"{self.path} is shorter than when it was imported: it is another file now"
                )
            at = max(offset, self.start)
            file.seek(at)
            for end, row in self._cut(file, at):
                if row:
                    yield end, row + [""] * (width - len(row))

    def read_all(self) -> Iterator[dict[str, str]]:
        """Every row, by the names of the columns."""
        for _, row in self.read(0):
            yield dict(zip(self.header, row, strict=False))

    def _cut(self, file: BinaryIO, at: int) -> Iterator[tuple[int, list[str]]]:
        whole = at

        def lines() -> Iterator[str]:
            nonlocal at, whole
            while line := self._read_line(file):
                at += len(line)
                whole = at if line.endswith(b"\n") else -1
                yield line.decode("utf-8", "replace").replace("\0", "")

        try:
            for row in csv.reader(lines(), delimiter=self.delimiter, strict=False):
                # The last line may be half written; of a file that is done it has no end either.
                self.is_cut = whole < 0 and not self._is_settled()
                if self.is_cut:
                    return
                yield at, row
        except csv.Error as error:
            raise ImportFailure(f"{self.path} cannot be read on at byte {at}: {error}") from error

    def _read_line(self, file: BinaryIO) -> bytes:
        line = file.readline(DOCUMENT_BYTES + 1)
        if len(line) > DOCUMENT_BYTES:
            raise ImportFailure(f"{self.path} has a line of more than {DOCUMENT_BYTES} bytes")
        return line

    def _is_settled(self) -> bool:
        """Whether nobody has written for a while."""
        import time

        return time.time() - self.path.stat().st_mtime > _SETTLED_S


_SETTLED_S = 2.0


class CsvRun(ForeignRun):
    """One run of a table of metrics.

    Its position is the offset behind the last row, and how many rows that were: a file that
    was written anew with more columns is read on behind as many rows.
    """

    def __init__(self, table: CsvTable, form: TableForm, name: str | None, project: str) -> None:
        self.key = f"{table.path}\0{name or ''}"
        self._table = table
        self._form = form
        self._name = name
        self._project = project
        self._span: list[int] | None = None

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        path = self._table.path
        identity = str(path) if self._name is None else f"{path}#{self._name}"
        own = _load_own(path.parent)
        if own is not None:
            return own
        stem = path.parent.name if path.stem in _PLAIN_STEMS else path.stem
        span = self._span or self._find_first()
        return RunFacts(
            identity=identity,
            project=self._project,
            name=self._name or stem,
            config=_load_config(path.parent),
            environment={"csv": {"file": str(path)}},
            is_told=False,
            started_us=round(path.stat().st_mtime * 1e6) if span is None else span[0],
            ended_us=None if span is None else span[1],
        )

    def _find_first(self) -> list[int] | None:
        """When the first row of the run was, twice; None where nothing says it."""
        form = self._form
        if form.time is None:
            return None
        for _, row in self._table.read(0):
            is_own = form.run is None or (row[form.run].strip() or None) == self._name
            if is_own and (moment := parse_moment(row[form.time])) is not None:
                return [moment, moment]
        return None

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        return f"{self._table.path.stat().st_size}:{self._table.head}"

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        table, form = self._table, self._form
        rows, skip = int(position.get("rows", 0)), 0
        offset = int(position.get("offset", 0))
        if position and position.get("head") != table.head:
            offset, skip = 0, rows
        self._span = list(position["span"]) if position.get("span") else None
        taker = _PointTaker(losses, round(table.path.stat().st_mtime * 1e6))
        number = rows - skip
        end = offset
        try:
            for end, row in table.read(offset):
                number += 1
                if skip:
                    skip -= 1
                    continue
                taker.take_row(form, row, self._name, number - 1)
                if len(taker) >= PORTION_POINTS:
                    yield self._make_portion(taker, end, number)
        except OSError as error:
            raise ImportFailure(f"{table.path} cannot be read: {error}") from error
        if table.is_cut:
            losses.add("row", table.path.name, "the last row has no end; it is taken later")
        if end != int(position.get("offset", 0)):
            yield self._make_portion(taker, end, number)

    def _make_portion(self, taker: _PointTaker, offset: int, rows: int) -> Portion:
        points = taker.take()
        if points is not None:
            low, high = int(points.times_us.min()), int(points.times_us.max())
            span = self._span or [low, high]
            self._span = [min(span[0], low), max(span[1], high)]
        position = {
            "offset": offset,
            "rows": rows,
            "head": self._table.head,
            "span": self._span,
        }
        return Portion(position=position, points=points)


class _PointTaker:
    """Collects the points of rows as columns."""

    def __init__(self, losses: Losses, default_us: int) -> None:
        self._losses = losses
        self._default_us = default_us
        self._clear()

    def _clear(self) -> None:
        self._names: dict[str, int] = {}
        self._which: list[int] = []
        self._steps: list[int] = []
        self._epochs: list[int] = []
        self._values: list[float] = []
        self._times: list[int] = []

    def __len__(self) -> int:
        return len(self._values)

    def take_row(self, form: TableForm, row: Sequence[str], run: str | None, number: int) -> None:
        """The points of one row that are of a run.

        Args:
            form: What the columns mean.
            row: The row.
            run: The run.
            number: Which row it is; the step where there is none.
        """
        step = _read_counter(row, form.step)
        epoch = _read_counter(row, form.epoch)
        if step < 0 and epoch < 0:
            step = number
        moment = None if form.time is None else parse_moment(row[form.time])
        time_us = self._default_us if moment is None else moment
        for named, metric, text in form.list_points(row):
            if named != run or not text or text.isspace():
                continue
            try:
                value = self._losses.read_number("column", metric, text)
            except ValueError:
                self._losses.add("column", metric, "it holds a text, which is no metric")
                continue
            self._which.append(self._names.setdefault(metric, len(self._names)))
            self._values.append(value)
            self._steps.append(step)
            self._epochs.append(epoch)
            self._times.append(time_us)

    def take(self) -> Points | None:
        """What was collected; nothing is left then."""
        import numpy as np

        if not self._values:
            return None
        points = Points(
            list(self._names),
            np.array(self._which, np.int64),
            np.array(self._steps, np.int64),
            np.array(self._values, np.float64),
            np.array(self._times, np.int64),
            np.array(self._epochs, np.int64),
        )
        self._clear()
        return points


def _read_counter(row: Sequence[str], place: int | None) -> int:
    """A step or an epoch; -1 where there is none."""
    if place is None:
        return -1
    text = row[place]
    if text.isdecimal():
        return min(int(text), _INT64_MAX)
    try:
        number = float(text)
    except ValueError:
        return -1
    return int(number) if 0 <= number < _INT64_MAX else -1


_INT64_MAX = 2**63 - 1


def _load_config(folder: Path) -> Mapping[str, Any]:
    """The hyperparameters that lie beside a table; empty where there are none, or no reader."""
    data = read_document(folder / "hparams.yaml")
    if data is None:
        return {}
    try:
        import yaml

        found = yaml.safe_load(data.decode("utf-8", "replace"))
    except Exception:  # noqa: BLE001 - it may be anybody's file, and is no part of the metrics
        return {}
    return found if isinstance(found, dict) else {}


def _load_own(folder: Path) -> RunFacts | None:
    """What our own mirror says of the run; None where it is none of its folders."""
    try:
        run = json.loads(read_document(folder / "run.json") or b"")
        config = read_document(folder / "config.json")
        values = {} if config is None else json.loads(config)["values"]
        return RunFacts(
            identity=str(run["id"]),
            run_id=str(run["id"]),
            project=run["project"]["name"],
            name=run["name"],
            notes=run["notes"],
            tags=run["tags"],
            config=values,
            environment=run.get("environment") or {},
            status=run["status"],
            started_us=run["created_us"],
            ended_us=run["ended_us"],
            git_commit=run["git_commit"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
