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
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from quark.importing.neutral_run import (
    PORTION_POINTS,
    ForeignRun,
    ImportFailure,
    Losses,
    PointList,
    Points,
    Portion,
    RunFacts,
    find_place,
)
from quark.importing.safe_files import DOCUMENT_BYTES, find_files, read_document
from quark_core.records import parse_time
from quark_core.records.names import decode_name

_STEPS = ("step", "global_step", "trainer_global_step", "iteration", "iter", "batch", "update")
_EPOCHS = ("epoch", "epochs", "trainer_epoch")
_TIMES = ("timestamp", "wall_time", "walltime", "time", "datetime", "date", "created_at")
_RUNS = ("run", "run_id", "run_name", "run_uuid", "trial", "trial_id", "experiment_name")
_KEYS = ("key", "metric", "metric_key", "metric_name", "tag", "name", "variable")
_VALUES = ("value", "metric_value")
_ASIDE = frozenset({"", "unnamed_0", "index", "runtime", "sequence", "attempt", "rank", "writer"})
_OURS = ("step", "epoch", "key", "value", "timestamp", "attempt", "rank", "sequence")
"""How the header of our own mirror's metrics_long.csv begins."""

_TENSORBOARD = {"wall_time", "step", "value"}
_TENSORBOARD_NAME = re.compile(r"(?:run-(?P<run>.*)-tag-)?(?P<tag>.+)")
_RANGE_ENDS = ("__MIN", "__MAX")
_JOIN = " - "

Cell = tuple[str | None, str, int]
"""Run (None where the table is of one), metric and column of a value in a wide table."""


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Columns that the user names; None lets the header say.

    Attributes:
        step, time, run: Names of columns.
    """

    step: str | None = None
    time: str | None = None
    run: str | None = None


@dataclass(slots=True, kw_only=True)
class TableForm:
    """Where in a row a point is.

    Attributes:
        step, epoch, time, run: Places of these columns, or None.
        key, value: Of a long table, one point a row, the places of both.
        cells: Of a wide table, its metrics.
        metric: Of a table of one metric alone, what it is called.
        is_ours: The keys are stored ones of ours.
    """

    step: int | None = None
    epoch: int | None = None
    time: int | None = None
    run: int | None = None
    key: int | None = None
    value: int | None = None
    cells: list[Cell] = field(default_factory=list)
    metric: str | None = None
    is_ours: bool = False

    def name_runs(self) -> list[str | None]:
        """The runs that the header names; None is the one that it does not name."""
        return list(dict.fromkeys(run for run, _, _ in self.cells)) or [None]

    def list_points(self, row: Sequence[str]) -> Iterator[tuple[str | None, str, str]]:
        """Run, metric and text of each value of a row."""
        run = None if self.run is None else row[self.run].strip() or None
        if self.value is not None:
            key = self.metric if self.key is None else row[self.key]
            if key:
                yield run, decode_name(key) if self.is_ours else key, row[self.value]
            return
        for named, metric, place in self.cells:
            yield named if run is None else run, metric, row[place]


def find_form(header: Sequence[str], path: Path, choice: ColumnChoice) -> TableForm:
    """What the columns of a table mean.

    Args:
        header: Names of the columns.
        path: The file; it names the metric of a table that does not.
        choice: What the user says.

    Raises:
        ImportFailure: There is no metric, or a column that the user names is missing.
    """
    plain = [_simplify(name) for name in header]
    form = TableForm(
        step=_choose(header, plain, choice.step, _STEPS, "--step"),
        epoch=_choose(header, plain, None, _EPOCHS, ""),
        time=_choose(header, plain, choice.time, _TIMES, "--time"),
        run=_choose(header, plain, choice.run, _RUNS, "--run-column"),
        is_ours=tuple(header[: len(_OURS)]) == _OURS,
    )
    key = _choose(header, plain, None, _KEYS, "")
    value = _choose(header, plain, None, _VALUES, "")
    if value is not None and key is not None:
        form.key, form.value = key, value
        return form
    if value is not None and set(plain) <= _TENSORBOARD:
        found = _TENSORBOARD_NAME.fullmatch(path.stem)
        form.value, form.metric = value, found["tag"] if found else path.stem
        return form
    used = {form.step, form.epoch, form.time, form.run}
    known = set(header)
    ranges = {name for name in header if any(f"{name}{end}" in known for end in _RANGE_ENDS)}
    for place, name in enumerate(header):
        if place in used or plain[place] in _ASIDE or _is_range_end(name, ranges):
            continue
        run, join, metric = name.partition(_JOIN) if name in ranges else ("", "", name)
        form.cells.append((run if join else None, metric if join else name, place))
    if not form.cells:
        raise ImportFailure(f"{path} has no numeric column for a metric: {', '.join(header)}")
    return form


def parse_moment(text: str) -> int | None:
    """Microseconds of a moment: ISO 8601, or a number of seconds, ms or us since the epoch."""
    try:
        number = float(text)
    except ValueError:
        try:
            return parse_time(text.strip().replace(" UTC", "Z"))
        except (ValueError, OverflowError):
            return None
    for limit, factor in _UNITS:
        if 0 <= number < limit:
            return round(number * factor)
    return None


_UNITS = ((1e11, 1e6), (1e14, 1e3), (1e17, 1.0), (1e20, 1e-3))
"""Numbers of a unit lie below; no training was in the first months of 1970."""


def _simplify(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _choose(
    header: Sequence[str],
    plain: Sequence[str],
    chosen: str | None,
    known: Sequence[str],
    option: str,
) -> int | None:
    if chosen is not None:
        if chosen not in header:
            raise ImportFailure(
                f"{option}: unknown column {chosen!r}. The columns are {', '.join(header)}"
            )
        return header.index(chosen)
    return next((plain.index(name) for name in known if name in plain), None)


def _is_range_end(name: str, ranges: set[str]) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in ranges for end in _RANGE_ENDS)


_STATUSES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted"}
_NAME_TAG = "tags.mlflow.runName"
_NOTE_TAG = "tags.mlflow.note.content"
_COMMIT_TAG = "tags.mlflow.source.git.commit"
_OWN_TAGS = "tags.mlflow."


def is_table_of_runs(header: Sequence[str]) -> bool:
    """Whether each row is a run."""
    return "run_id" in header and any(name.startswith(("params.", "metrics.")) for name in header)


def find_table_runs(
    path: Path, rows: Iterable[Mapping[str, str]], project: str
) -> Iterator[ForeignRun]:
    """The runs of a table."""
    for row in rows:
        if row.get("run_id"):
            yield TableRun(path, row, project)


class TableRun(ForeignRun):
    """One row; its position is which metrics were taken."""

    def __init__(self, path: Path, row: Mapping[str, str], project: str) -> None:
        self.key = f"{path}\0{row['run_id']}"
        self._path = path
        self._row = row
        self._project = project

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        row = self._row
        return RunFacts(
            identity=row["run_id"],
            project=self._project,
            name=row.get(_NAME_TAG) or None,
            notes=row.get(_NOTE_TAG) or None,
            tags=[
                f"{name.removeprefix('tags.')}={text}"
                for name, text in row.items()
                if name.startswith("tags.") and not name.startswith(_OWN_TAGS) and text
            ],
            config={
                name.removeprefix("params."): _parse(text)
                for name, text in row.items()
                if name.startswith("params.") and text
            },
            environment={"csv": {"file": str(self._path)}},
            status=_STATUSES.get(row.get("status", "FINISHED"), "running"),
            started_us=parse_moment(row.get("start_time", "")),
            ended_us=parse_moment(row.get("end_time", "")),
            git_commit=row.get(_COMMIT_TAG) or None,
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        import numpy as np

        taken = list(position.get("metrics", ()))
        found: dict[str, float] = {}
        for name, text in self._row.items():
            metric = name.removeprefix("metrics.")
            if metric == name or not text or metric in taken:
                continue
            try:
                found[metric] = losses.read_number("metric", metric, text)
            except ValueError:
                losses.add("metric", metric, "its value is not a number")
        if not found:
            return
        time_us = self.describe().ended_us or round(self._path.stat().st_mtime * 1e6)
        count = len(found)
        losses.add("history", "metrics", "this table has only the last value of each metric", count)
        yield Portion(
            position={"metrics": [*taken, *found]},
            points=Points(
                list(found),
                np.arange(count),
                np.zeros(count, np.int64),
                np.array(list(found.values())),
                np.full(count, time_us),
            ),
        )


def _parse(text: str) -> Any:
    from quark_backends.mlflow.reader import parse_param

    return parse_param(text)


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
    root = find_place(place)
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
            raise ImportFailure(f"{path} is not a table of metrics: no column contains numbers")
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
                    f"{self.path} is shorter than when it was imported: it is a different file"
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
            raise ImportFailure(f"{self.path} cannot be read from byte {at} on: {error}") from error

    def _read_line(self, file: BinaryIO) -> bytes:
        line = file.readline(DOCUMENT_BYTES + 1)
        if len(line) > DOCUMENT_BYTES:
            raise ImportFailure(f"{self.path} has a line of more than {DOCUMENT_BYTES} bytes")
        return line

    def _is_settled(self) -> bool:
        """Whether nobody has written for a while."""
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
        points, default_us = PointList(in_us=True), round(table.path.stat().st_mtime * 1e6)
        number = rows - skip
        end = offset
        try:
            for end, row in table.read(offset):
                number += 1
                if skip:
                    skip -= 1
                    continue
                _take_row(form, row, self._name, number - 1, default_us, points, losses)
                if len(points) >= PORTION_POINTS:
                    yield self._make_portion(points, end, number)
        except OSError as error:
            raise ImportFailure(f"{table.path} cannot be read: {error}") from error
        if table.is_cut:
            losses.add("row", table.path.name, "the last row is incomplete; import it later")
        if end != int(position.get("offset", 0)):
            yield self._make_portion(points, end, number)

    def _make_portion(self, found: PointList, offset: int, rows: int) -> Portion:
        points = found.take() if len(found) else None
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


def _take_row(
    form: TableForm,
    row: Sequence[str],
    run: str | None,
    number: int,
    default_us: int,
    points: PointList,
    losses: Losses,
) -> None:
    """Take the points of one row that are of a run.

    Args:
        form: What the columns mean.
        row: The row.
        run: The run.
        number: Which row it is; the step where there is none.
        default_us: When its points were, where it does not say so.
        points: Where they go.
        losses: Told of what is no number.
    """
    step, epoch = _read_counter(row, form.step), _read_counter(row, form.epoch)
    if step < 0 and epoch < 0:
        step = number
    moment = None if form.time is None else parse_moment(row[form.time])
    for named, metric, text in form.list_points(row):
        if named != run or not text or text.isspace():
            continue
        try:
            value = losses.read_number("column", metric, text)
        except ValueError:
            losses.add("column", metric, "it is a text, not a metric")
            continue
        points.add(metric, step, value, default_us if moment is None else moment, epoch)


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
