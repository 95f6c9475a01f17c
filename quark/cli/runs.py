"""`quark runs`: the runs of a store that fit, newest first or sorted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from quark.cli.completion import (
    complete_groups,
    complete_metrics,
    complete_projects,
    complete_tags,
)
from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import (
    describe_unstored,
    json_option,
    print_json,
    storage_option,
)
from quark_core.config.arguments import resolve_storage_dir
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import RunSummary
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
@storage_option
@backend_option
@click.option(
    "-p", "--project", shell_complete=complete_projects, help="Only runs of this project."
)
@click.option("-s", "--status", type=click.Choice(_STATES), help="Only runs in this state.")
@click.option(
    "-t",
    "--tag",
    multiple=True,
    shell_complete=complete_tags,
    help="Only runs with this tag; repeat for several.",
)
@click.option(
    "-w",
    "--where",
    metavar="EXPR",
    help="Only runs of which this is true, such as "
    "\"val/loss < 0.3 and config.lr == 3e-4 and 'baseline' in tags\".",
)
@click.option(
    "--sort",
    metavar="EXPR",
    multiple=True,
    shell_complete=complete_metrics,
    help='Sort by a metric, a config.KEY or a field of the run, such as "val/loss" or, '
    'descending, "-min(val/loss)"; repeat for ties.',
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Runs to show.",
)
@click.option("--archived", is_flag=True, help="Archived runs too, which are left out else.")
@click.option(
    "-g",
    "--group",
    metavar="PATH",
    shell_complete=complete_groups,
    help="Only runs of this group, and of what lies in it.",
)
@click.option(
    "--columns",
    metavar="EXPR",
    multiple=True,
    help="Show these too, by comma: a metric, config.KEY, field.NAME or a field of the run, such "
    'as "groups".',
)
@click.option(
    "--group-by",
    metavar="WHAT",
    help="Put runs together: config (seeds of one configuration), group, structure, code, "
    "field.NAME or config.KEY.",
)
@click.option(
    "--metric",
    metavar="EXPR",
    shell_complete=complete_metrics,
    help='Metric of --group-by: its last value, or "max(val/acc)" [default: loss or objective].',
)
@json_option
def runs(
    storage_dir: Path | None,
    backend: str | None,
    project: str | None,
    status: str | None,
    tag: tuple[str, ...],
    where: str | None,
    sort: tuple[str, ...],
    limit: int,
    archived: bool,
    group: str | None,
    columns: tuple[str, ...],
    group_by: str | None,
    metric: str | None,
    as_json: bool,
) -> None:
    """List runs, newest first, or those that fit an expression, sorted.

    The metrics and settings that --where and --sort ask for become columns.
    Expressions know comparisons, and, or, not, in, ~ (contains), and last,
    first, min, max and count of a metric.
    """
    from quark_core.errors import SchemaValidationError
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
        source = RunSource(storage_dir, backend)
        store = source.reader
        found = find_runs(store, _add_filters(search, status, tag, group))
    except SchemaValidationError as error:
        raise _SearchMistake(str(error)) from None
    if not found:
        if backend is not None and not store.list_runs(limit=1):
            from quark_core.system.terminal_text import clean_line

            raise click.UsageError(f"--backend: there are no runs at {clean_line(backend)}")
        source.check_project(project, "--project")
        _check_group(store, group)
    if grouping is not None and found:
        grouping.show(found, limit, as_json=as_json)
        return
    shown = found[:limit]
    if not as_json:
        none_words = f"No run fits in {source.store}."
        _print_table(shown, asked, none_words, has_more=len(found) > limit)
        if backend is None:
            _tell_unstored(store, storage_dir, shown)
        name = getattr(store, "store_name", None)
        if not found and name is not None:
            click.echo(
                f"Only the project store {name!r} of the service was asked: QUARK_STORE_NAME or "
                "?store= names it. Without them, or with ?store=*, all of the workspace is asked."
            )
        return
    print_json([_describe(run) for run in shown])


def _tell_unstored(
    store: SupportsRead, storage_dir: Path | None, shown: Sequence[RunSummary]
) -> None:
    """Say of which runs the end may wait outside of the store, as where its disk was full."""
    from quark_core.runs.recovery import list_lost

    place = resolve_storage_dir(storage_dir)
    root = shlex.quote(str(place))
    ids_shown = [run.stored.run.id or "" for run in shown]
    damaged = [run_id for run_id in ids_shown if list_lost(place, run_id)]
    if damaged:
        ids = ", ".join(map(shorten_run_id, damaged))
        click.echo(f"A part of {ids} is lost: quark doctor -d {root}")
    lost = [run.stored.run.id or "" for run in shown if run.state == "lost"]
    waiting = [
        run_id
        for run_id in lost[:_MOST_ASKED]
        if run_id not in damaged and describe_unstored(store, storage_dir, run_id)
    ]
    if waiting:
        ids = ", ".join(map(shorten_run_id, waiting))
        click.echo(
            f"Not everything of {ids} is in the store yet, and perhaps not how it ended: "
            f"quark sync {root}"
        )


def _describe(run: RunSummary) -> dict[str, Any]:
    """A run for other programs."""
    from quark.analysis.metric_roles import find_main_metric
    from quark.cli.texts import find_duration_s

    loss = find_main_metric(run)
    progress = run.stored.progress if run.state == "running" else None
    return {
        **run.stored.run.to_dict(),
        "state": run.state,
        "exit_code": run.stored.exit_code,
        "ending": None if run.stored.ending is None else run.stored.ending.to_dict(),
        "duration_s": find_duration_s(run.stored, run.last_metric_at),
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
    from quark_core.errors import SchemaValidationError
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
    from quark_core.config.arguments import is_below

    stored = store.list_runs()
    known = sorted({path for run in stored for path in run.run.groups})
    if not stored or any(is_below(path, group) for path in known):
        return
    more = f" and {len(known) - _SHOWN_GROUPS} more" if len(known) > _SHOWN_GROUPS else ""
    there = f"there are {', '.join(map(repr, known[:_SHOWN_GROUPS]))}{more}"
    raise click.UsageError(
        f"--group: there is no group {group!r} here; {there if known else 'no run is in any'}"
    )


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
        from quark.cli.group_table import make_group_table, make_measure
        from quark.cli.texts import Console

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
        from quark_core.errors import SchemaValidationError
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
    from dataclasses import replace

    from quark_core.config.arguments import check_group_path
    from quark_core.records.query import And, Comparison, Expression, Field, HasTag, InGroup

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
    from quark.cli.run_table import MANY_RUNS, list_blocks, make_table
    from quark.cli.texts import Console

    console = Console()
    if not runs:
        console.print("There are runs; --limit shows them." if has_more else none_words)
        return
    if len(runs) <= MANY_RUNS:
        console.print(make_table(runs, asked, console.width))
    else:
        rule = "-" if console.options.ascii_only else "─"
        for block in list_blocks(runs, asked, console.width, rule):
            console.print(block, soft_wrap=True)
    if has_more:
        these = "this one" if len(runs) == 1 else f"these {len(runs)}"
        console.print(f"There are more than {these}; --limit shows them.", style="dim")
