"""The table of `quark runs`: which columns a terminal has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from quark.analysis.metric_roles import find_main_metric, is_loss
from quark.cli.texts import (
    Text,
    describe_age,
    describe_duration,
    describe_fork,
    describe_number,
    describe_state,
    find_duration_s,
)
from quark_core.records.base import now_us
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun
    from quark_core.backends.run_summary import MetricSummary, RunSummary
    from quark_core.records.query import Field

# Fields of a run that have a column of their own anyway.
_SHOWN = frozenset({"created", "duration", "id", "name", "project", "state", "status", "tags"})
MANY_RUNS = 200
"""More runs are printed as plain lines: a table of Rich's takes a millisecond a cell."""

_BLOCK_ROWS = 100
_NOT_FINITE = "not finite"
_MAX_CELL = 40
_DIGEST_CHARACTERS = 8
_GAP = 2
_NARROW = 9
_CAUSE = 24
# What goes first where a terminal has no room for what was asked for.
_EXPENDABLE = (
    "duration",
    "tags",
    "forked from",
    "last loss",
    "project",
    "started",
    "ended by",
    "name",
)


@dataclass(slots=True)
class _Column:
    """A column; a flexible one may be narrower than what stands in it."""

    label: str
    cells: list[Text]
    right: bool = False
    flexible: bool = False
    narrow: int = _NARROW
    key: str = ""

    @property
    def head(self) -> int:
        """Columns of the terminal that its label takes."""
        return max(Text(line).cell_len for line in self.label.split("\n"))

    @property
    def width(self) -> int:
        """Columns of the terminal that everything in it takes."""
        return max(self.head, *(cell.cell_len for cell in self.cells))

    @property
    def least(self) -> int:
        """Columns of the terminal without which it cannot be read."""
        return min(self.width, max(self.narrow, self.head)) if self.flexible else self.width


def make_table(runs: Sequence[RunSummary], asked: Sequence[Field], width: int) -> Table:
    """A table of runs, at least one.

    Args:
        runs: The runs.
        asked: What the user searched for or sorted by; each gets a column.
        width: Columns of the terminal.
    """
    columns = _fit(_list_columns(runs, asked), width, has_extra=bool(asked))
    # Where even that is too much, every column gives way rather than the last one.
    fits = _measure(columns) <= width
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(
            Text(column.label, lines=True),
            justify="right" if column.right else "left",
            no_wrap=index == 0 or (fits and not column.flexible),
            min_width=column.least if fits else None,
            overflow="fold",
            style="bold" if index == 0 else "",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def list_blocks(
    runs: Sequence[RunSummary], asked: Sequence[Field], width: int, rule: str
) -> Iterator[Text]:
    """The table of many runs as lines, one for each run, in blocks of some.

    Args:
        runs: The runs.
        asked: As of `make_table`.
        width: Columns of the terminal; what is flexible is cut for it.
        rule: What the line below the head is made of.
    """
    columns = _fit(_list_columns(runs, asked), width, has_extra=bool(asked))
    widths = [column.width for column in columns]
    too_wide = sum(widths) + _GAP * len(widths) - width
    for place, column in enumerate(columns):
        if column.flexible and too_wide > 0:
            cut = min(too_wide, widths[place] - column.least)
            widths[place] -= cut
            too_wide -= cut
    heads = [Text(" ".join(column.label.split())) for column in columns]
    for head, size in zip(heads, widths, strict=True):
        head.stylize("bold")
        head.truncate(max(size, head.cell_len))
    widths = [max(size, head.cell_len) for head, size in zip(heads, widths, strict=True)]
    first = _join_cells(columns, widths, heads)
    first.append("\n " + rule * (sum(widths) + _GAP * (len(widths) - 1)), lines=True)
    yield first
    rows = zip(*(column.cells for column in columns), strict=True)
    while block := [_join_cells(columns, widths, row) for row in islice(rows, _BLOCK_ROWS)]:
        yield _join_lines(block)


def _join_cells(columns: Sequence[_Column], widths: Sequence[int], row: Sequence[Text]) -> Text:
    line = Text(" ")
    for place, (column, size, cell) in enumerate(zip(columns, widths, row, strict=True)):
        if cell.cell_len > size:
            cell.truncate(size, overflow="ellipsis")
        space = " " * (size - cell.cell_len)
        gap = " " * (_GAP if place else 0)
        line.append(gap + (space if column.right else ""))
        line.append(cell)
        line.append("" if column.right else space)
    return line


def _join_lines(lines: Sequence[Text]) -> Text:
    block = Text()
    for place, line in enumerate(lines):
        block.append("\n" if place else "", lines=True)
        block.append(line)
    return block


def _describe_status(stored: StoredRun) -> Text:
    text = describe_state(stored.state)
    if stored.progress is not None and stored.state == "running":
        text.append(f" {stored.progress.describe(now_us())}", style="dim")
    if stored.run.archived_at is not None:
        text.append(" (archived)", style="dim")
    return text


def _list_columns(runs: Sequence[RunSummary], asked: Sequence[Field]) -> list[_Column]:
    stored = [run.stored for run in runs]
    columns = [_Column("run", [Text(text) for text in _shorten([run.run_id for run in runs])])]
    if any(each.run.name for each in stored):
        columns.append(_Column("name", [Text(e.run.name or "") for e in stored], flexible=True))
    columns += [
        _Column("project", [Text(each.project.name) for each in stored], flexible=True),
        _Column("status", [_describe_status(each) for each in stored]),
        *_list_causes(stored),
        _Column("started", [Text(describe_age(each.run.created_at)) for each in stored]),
        _Column(
            "duration",
            [
                Text(describe_duration(find_duration_s(run.stored, run.last_metric_at)))
                for run in runs
            ],
            right=True,
        ),
        _make_main_column(runs),
    ]
    for field in asked:
        if field.scope == "run" and field.name in _SHOWN:
            continue
        columns.append(
            _Column(
                _label(field),
                [Text(_describe_field(field, run)) for run in runs],
                right=field.scope == "metric" or field.name in ("attempt", "step"),
                flexible=field.scope in ("config", "field") or field.name in ("groups", "notes"),
            )
        )
    if any(each.run.fork_step is not None for each in stored):
        forks = [Text(describe_fork(each.run, short=True) or "") for each in stored]
        columns.append(_Column("forked from", forks, flexible=True))
    columns.append(_Column("tags", [Text(", ".join(e.run.tags)) for e in stored], flexible=True))
    return columns


def _list_causes(runs: Sequence[StoredRun]) -> Iterator[_Column]:
    """Why runs broke off, where any did."""
    causes = ["" if run.ending is None else run.ending.describe() for run in runs]
    if any(causes):
        cells = [Text(_describe_value(cause) if cause else "") for cause in causes]
        yield _Column("ended by", cells, flexible=True, narrow=_CAUSE)


def _fit(columns: list[_Column], width: int, *, has_extra: bool) -> list[_Column]:
    """The columns that there is room for; what was asked for and how a run went are kept."""
    kept = list(columns)
    for label in _EXPENDABLE:
        if _measure(kept) <= width:
            break
        if label == "last loss" and not has_extra:
            continue
        kept = [column for column in kept if (column.key or column.label) != label]
    return kept


def _make_main_column(runs: Sequence[RunSummary]) -> _Column:
    """The last values of what runs are judged by: losses, or named where they are of none."""
    mains = [find_main_metric(run) for run in runs]
    names = {main.key for main in mains if main is not None and not is_loss(main.key)}
    others = len({main.key for main in mains if main is not None}) > 1
    label = "last loss" if not names else "last value" if others else f"last {decode_name(*names)}"
    cells = [
        Text(
            f"{decode_name(main.key)} {_describe_metric(main, 'last')}"
            if main is not None and main.key in names and others
            else _describe_metric(main, "last")
        )
        for main in mains
    ]
    return _Column(label, cells, right=True, key="last loss")


def _measure(columns: Sequence[_Column]) -> int:
    """Columns of the terminal without which they cannot be read."""
    return sum(column.least + _GAP for column in columns)


def _label(field: Field) -> str:
    if field.scope in ("config", "field"):
        # Over two lines, since keys are long and values are short.
        return f"{field.scope}.{'' if len(field.name) <= _NARROW else chr(10)}{field.name}"
    name = decode_name(field.name) if field.scope == "metric" else field.name
    return name if field.statistic == "last" else f"{field.statistic}({name})"


def _describe_field(field: Field, run: RunSummary) -> str:
    """What a run has in a field."""
    from quark_core.records import format_time
    from quark_core.search.evaluation import find_value
    from quark_core.search.resolution import spell_name

    if field.scope == "metric":
        found = (run.metrics.get(name) for name in spell_name(field))
        return _describe_metric(next(filter(None, found), None), field.statistic)
    value: Any = find_value(field, run)
    if field.scope == "run" and value is not None:
        if field.name == "groups":
            return ", ".join(value)
        if field.name.endswith("_digest"):
            return str(value)[:_DIGEST_CHARACTERS]
    if (
        value is not None
        and field.scope == "run"
        and field.name in ("ended", "updated", "archived")
    ):
        return describe_age(format_time(value))
    return _describe_value(value)


def _describe_metric(metric: MetricSummary | None, statistic: str) -> str:
    if metric is None:
        return "-"
    if statistic == "count":
        return str(metric.count)
    values = {"first": metric.first, "min": metric.low, "max": metric.high, "last": metric.last}
    value = values[statistic]
    return _NOT_FINITE if value is None else describe_number(value)


def _describe_value(value: Any) -> str:
    import json

    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def _shorten(ids: list[str]) -> list[str]:
    """The shortest beginnings, of eight characters at least, that still tell the ids apart."""
    length = 8
    while len({run_id[:length] for run_id in ids}) < len(ids):
        length += 1
    return [run_id[:length] for run_id in ids]
