"""`quark runs`: the runs of a store that fit, newest first or sorted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

import click
from rich import box
from rich.table import Table

from quark.analysis.metric_roles import find_main_metric, is_loss
from quark.cli.completion import complete_groups, complete_metrics, complete_projects, complete_tags
from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    print_json,
)
from quark.cli.texts import Console, Text, describe_fork, describe_state
from quark_core.backends.run_summary import measure_duration_s
from quark_core.config.arguments import check_group_path, is_below, resolve_storage_dir
from quark_core.errors import SchemaValidationError
from quark_core.formatting import (
    format_age,
    format_count,
    format_duration,
    format_value,
    join_first,
)
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.names import decode_name
from quark_core.records.query import And, Comparison, Expression, Field, HasTag, InGroup
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import MetricSummary, RunSummary, StoredRun
    from quark_core.records.query import Field, RunSearch

# Journals of so many runs are looked at under a list.
_MOST_ASKED = 20
_SHOWN_GROUPS = 10
_STATES = ("running", "completed", "failed", "interrupted", "lost")


class _SearchMistake(click.ClickException):
    """A mistake in an expression: the message points at it, and needs no usage beside it."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"quark: {self.format_message()}", file=file, err=file is None)


@click.command()
@takes_options
def runs(
    *,
    source: RunSource = SOURCE,
    project: str | None = option(
        "Only runs of this project.", "-p", shell_complete=complete_projects
    ),
    status: str | None = option("Only runs in this state.", "-s", type=click.Choice(_STATES)),
    tag: tuple[str, ...] = option(
        "Only runs with this tag. Repeatable.", "-t", shell_complete=complete_tags
    ),
    where: str | None = option(
        "Filter, such as \"val/loss < 0.3 and config.lr == 3e-4 and 'baseline' in tags\".",
        "-w",
        metavar="EXPR",
    ),
    sort: tuple[str, ...] = option(
        'Sort by a metric, config.KEY or run field; "-KEY" is descending. Repeatable.',
        metavar="EXPR",
        shell_complete=complete_metrics,
    ),
    limit: int = option("Number of runs to show.", "-n", least=0, default=20),
    archived: bool = option("Include archived runs."),
    group: str | None = option(
        "Only runs of this group and its subgroups.",
        "-g",
        metavar="PATH",
        shell_complete=complete_groups,
    ),
    columns: tuple[str, ...] = option(
        "Columns to add, separated by commas: a metric, config.KEY, field.NAME or run field.",
        metavar="EXPR",
    ),
    group_by: str | None = option(
        "Group runs by config, group, structure, code, field.NAME or config.KEY.", metavar="KEY"
    ),
    metric: str | None = option(
        'Metric of --group-by, such as "val/acc" or "max(val/acc)".',
        metavar="EXPR",
        shell_complete=complete_metrics,
        show_default="last value of the objective or loss",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """List, filter and sort runs, newest first.

    Metrics and config values in --where and --sort become columns. Expressions
    support comparisons, and, or, not, in, ~ (contains), and last, first, min, max
    and count of a metric.
    """
    from quark_core.runs.run_search import build_search, find_runs

    try:
        search = build_search(
            project=project,
            where=where,
            order_by=sort,
            # One more than is shown tells whether there are more; groups are of all runs.
            limit=limit + 1 if group_by is None else None,
            archived=archived,
            where_argument="--where",
            order_argument="--sort",
        )
        asked = list(dict.fromkeys([*search.fields, *_parse_columns(columns)]))
        grouping = None if group_by is None else _Grouping(group_by, metric)
        store = source.reader
        found = find_runs(store, _add_filters(search, status, tag, group))
    except SchemaValidationError as error:
        raise _SearchMistake(str(error)) from None
    if not found:
        if source.backend is not None and not store.list_runs(limit=1):
            raise click.UsageError(f"--backend: no runs at {clean_line(source.backend)}.")
        source.check_project(project, "--project")
        _check_group(store, group)
    if grouping is not None and found:
        grouping.show(found, limit, as_json=as_json)
        return
    shown = found[:limit]
    if not as_json:
        none_words = f"No matching runs in {source.store}."
        _print_table(shown, asked, none_words, has_more=len(found) > limit)
        if source.backend is None:
            _tell_unstored(source, shown)
        name = getattr(store, "store_name", None)
        if not found and name is not None:
            click.echo(
                f"Only the project store {name!r} of the server was searched, because of "
                "QUARK_STORE_NAME or ?store=. To search the whole workspace, use ?store=*."
            )
        return
    print_json([_describe(run) for run in shown])


def _tell_unstored(source: RunSource, shown: Sequence[RunSummary]) -> None:
    """Say of which runs the end may wait outside of the store, as where its disk was full."""
    from quark_core.runs.recovery import list_lost

    place = resolve_storage_dir(source.storage_dir)
    root = shlex.quote(str(place))
    ids_shown = [run.stored.run.id or "" for run in shown]
    damaged = [run_id for run_id in ids_shown if list_lost(place, run_id)]
    if damaged:
        ids = ", ".join(map(shorten_run_id, damaged))
        click.echo(f"Some records of {ids} are lost: quark doctor -d {root}")
    lost = [run.stored.run.id or "" for run in shown if run.state == "lost"]
    waiting = [
        run_id
        for run_id in lost[:_MOST_ASKED]
        if run_id not in damaged and source.describe_unstored(run_id)
    ]
    if waiting:
        ids = ", ".join(map(shorten_run_id, waiting))
        click.echo(
            f"Some records of {ids} are not in the store yet, maybe including the final status: "
            f"quark sync {root}"
        )


def _describe(run: RunSummary) -> dict[str, Any]:
    """A run for other programs."""
    loss = find_main_metric(run)
    progress = run.stored.progress if run.state == "running" else None
    return {
        **run.stored.run.to_dict(),
        "state": run.state,
        "exit_code": run.stored.exit_code,
        "ending": None if run.stored.ending is None else run.stored.ending.to_dict(),
        "duration_s": measure_duration_s(run.stored, run.last_metric_at),
        "last_loss": None if loss is None else loss.last,
        "loss_metric": None if loss is None else loss.key,
        "newest_step": run.newest_step,
        "progress": None if progress is None else progress.to_dict(),
        "config": run.config,
        "fields": dict(run.stored.fields),
        "digests": run.stored.digests.to_dict(),
        "metrics": run.to_dict()["metrics"],
    }


def _parse_columns(columns: Sequence[str]) -> list[Field]:
    if not columns:
        return []
    from quark_core.search.parser import parse_column

    found: list[Field] = []
    for text in columns:
        try:
            found.append(parse_column(text, "--columns"))
        except SchemaValidationError:
            if "," not in text:
                raise
            # A name that has a comma itself is one column, in quotes.
            found += [parse_column(part.strip(), "--columns") for part in text.split(",")]
    return found


def _check_group(store: SupportsRead, group: str | None) -> None:
    """Refuse a group that no run is in; for where nothing was found."""
    if group is None:
        return

    stored = store.list_runs()
    known = sorted({path for run in stored for path in run.run.groups})
    if not stored or any(is_below(path, group) for path in known):
        return
    there = join_first(list(map(repr, known)), _SHOWN_GROUPS) if known else "none"
    raise click.UsageError(f"--group: no group {group!r} here. Groups: {there}.")


class _Grouping:
    """What `--group-by` and `--metric` ask for.

    Raises:
        SchemaValidationError: They cannot be understood.
    """

    def __init__(self, by: str, metric: str | None) -> None:
        from quark.analysis.run_groups import check_grouping
        from quark_core.search.parser import parse_column

        self._by = check_grouping(by, "--group-by")
        self._metric = metric
        self._field = None if metric is None else parse_column(metric, "--metric")

    def show(self, runs: Sequence[RunSummary], limit: int, *, as_json: bool) -> None:
        """Print the groups of some runs, at least one."""
        from quark.analysis.run_groups import group_runs
        from quark.cli.groups import make_group_table, make_measure

        measured, measure = make_measure(self._field, runs)
        groups = group_runs(runs, self._by, measure)
        if not any(measure(run) is not None for run in runs):
            self._check(runs)
        if as_json:
            metric = self._metric or measured
            told = [{"by": self._by, "metric": metric, **g.to_dict()} for g in groups]
            print_json(told[:limit])
            return
        console = Console()
        if limit:
            console.print(make_group_table(groups[:limit], self._by, measured))
        if len(groups) > limit:
            console.print(f"There are {len(groups)} groups; --limit shows more.", style="dim")

    def _check(self, runs: Sequence[RunSummary]) -> None:
        """Refuse a metric that none of the runs has."""
        from quark_core.runs.reading import refuse_unknown_metric

        if self._field is None or self._field.scope != "metric":
            return
        known = {key for run in runs for key in run.metrics}
        try:
            refuse_unknown_metric(self._field.name, known, "--metric", "none of the runs")
        except SchemaValidationError as error:
            raise click.UsageError(str(error).replace("has no", "has", 1)) from None


def _add_filters(
    search: RunSearch, status: str | None, tags: Sequence[str], group: str | None
) -> RunSearch:
    path = None if group is None else check_group_path(group, "--group")
    terms: list[Expression] = [HasTag(tag) for tag in tags]
    if path is not None:
        terms.append(InGroup(path, below=True))
    if status is not None:
        terms.append(Comparison(Field("run", "state"), "==", status))
    if search.where is not None:
        terms.append(search.where)
    source = search.source
    if source is not None:
        # A store that is asked over a network is asked in words.
        words = [f"{_quote(tag)} in tags" for tag in tags]
        words += [] if path is None else [f"{_quote(path)} in groups"]
        words += [] if status is None else [f"state == {_quote(status)}"]
        words += [f"({source.where})" if words else source.where] if source.where else []
        source = replace(source, where=" and ".join(words) or None)
    return replace(search, where=And(tuple(terms)) if terms else None, source=source)


def _quote(text: str) -> str:
    """A text as the language of searches has it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + escaped.replace("\n", "\\n").replace("\t", "\\t") + "'"


def _print_table(
    runs: Sequence[RunSummary], asked: Sequence[Field], none_words: str, *, has_more: bool
) -> None:
    console = Console()
    if not runs:
        console.print("There are more runs; --limit shows them." if has_more else none_words)
        return
    if len(runs) <= MANY_RUNS:
        console.print(make_table(runs, asked, console.width))
    else:
        rule = "-" if console.options.ascii_only else "─"
        for block in list_blocks(runs, asked, console.width, rule):
            console.print(block, soft_wrap=True)
    if has_more:
        counted = format_count(len(runs), "run")
        console.print(f"Only {counted} shown; --limit shows more.", style="dim")


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
        _Column("started", [Text(format_age(each.run.created_at)) for each in stored]),
        _Column(
            "duration",
            [
                Text(format_duration(measure_duration_s(run.stored, run.last_metric_at)))
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
        return format_age(format_time(value))
    return _describe_value(value)


def _describe_metric(metric: MetricSummary | None, statistic: str) -> str:
    if metric is None:
        return "-"
    if statistic == "count":
        return str(metric.count)
    values = {"first": metric.first, "min": metric.low, "max": metric.high, "last": metric.last}
    value = values[statistic]
    return _NOT_FINITE if value is None else format_value(value)


def _describe_value(value: Any) -> str:
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
