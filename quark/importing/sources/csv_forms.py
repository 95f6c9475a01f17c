"""What the columns of a table of metrics mean, told by its header and the name of its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quark.importing.foreign import ImportFailure
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
        raise ImportFailure(f"{path} has no column that could be a metric: {', '.join(header)}")
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
                f"{option}: there is no column {chosen!r}; there are {', '.join(header)}"
            )
        return header.index(chosen)
    return next((plain.index(name) for name in known if name in plain), None)


def _is_range_end(name: str, ranges: set[str]) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in ranges for end in _RANGE_ENDS)
