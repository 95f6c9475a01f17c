"""`quark groups`: the groups that runs are in, as a tree; `describe` says what one is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.table import Table

from quark import projects
from quark.analysis.metric_roles import find_main_metric
from quark.cli.command_groups import ListingGroup
from quark.cli.completion import complete_groups, complete_metrics, complete_projects
from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    STORAGE_DIR,
    RunSource,
    open_store,
    print_json,
    usage_mistakes,
)
from quark.cli.texts import FOLD, RIGHT, WHOLE, Console, Text, make_table
from quark_core.formatting import format_age, format_value
from quark_core.records.names import decode_name
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quark.analysis.run_groups import GroupedRuns
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.edits import StoredGroup
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.query import Field

    _Best = Mapping[tuple[str, str], tuple[float, str]]

_INDENT = "  "
_RUN_CHARACTERS = 8
_MOST_NAMES = 5


@click.group(cls=ListingGroup, subcommand_metavar="[PROJECT] | COMMAND [ARGS]...")
def groups() -> None:
    """List groups of runs, or describe one.

    `quark groups PROJECT` is short for `quark groups list PROJECT`. To add a run to a
    group, use `start_run(group="paper/fig3")`, `session.add_to_group` or
    `quark edit RUN --group PATH`.
    """


@groups.command("list")
@takes_options
def list_groups(
    *,
    project: str | None = argument(shell_complete=complete_projects),
    source: RunSource = SOURCE,
    metric: str | None = option(
        'Show the best run of each group by this metric, such as "val/acc".',
        metavar="EXPR",
        shell_complete=complete_metrics,
    ),
    mode: Literal["min", "max"] | None = option(
        "Direction in which the metric improves.", show_default="by its name"
    ),
    as_json: bool = AS_JSON,
) -> None:
    """List the groups of PROJECT, or of all projects."""
    reader = source.reader
    best = {} if metric is None else _find_best(reader, project, metric, mode)
    found = projects.list_groups(reader, project)
    if not found:
        source.check_project(project, "PROJECT")
    if as_json:
        print_json([_describe(group, best) for group in found])
    elif found:
        _print_tree(found, metric, best)
    else:
        click.echo(
            f"No groups in {source.store}. To add a run to a group, use "
            'start_run(group="paper/fig3") or `quark edit RUN --group PATH`.'
        )


@groups.command()
@takes_options
def describe(
    *,
    path: str = argument(shell_complete=complete_groups),
    text: str = argument(),
    project: str | None = option(
        "Project of the group.",
        "-p",
        shell_complete=complete_projects,
        show_default="the one that has the group, or the only one",
    ),
    storage_dir: Path | None = STORAGE_DIR,
) -> None:
    """Edit the description of the group at PATH.

    An empty TEXT removes the description. On a Quark server, the key in
    QUARK_USER_KEY needs the scopes read and write.
    """
    with usage_mistakes():
        name = _find_project(path, storage_dir) if project is None else project
        projects.project(name, storage_dir=storage_dir).group(path).update(description=text)
    click.echo(clean_line(f"{path} of {name}: {text or 'no description'}"))
    if not _has_runs(name, path, storage_dir):
        click.echo("The group has no runs yet.")


def _has_runs(project: str, path: str, storage_dir: Path | None) -> bool:
    with contextlib.closing(open_store(storage_dir)) as reader:
        return any(
            group.path == path and group.runs for group in projects.list_groups(reader, project)
        )


def _find_project(path: str, storage_dir: Path | None) -> str:
    """The project that has a group, or the only one of a store."""
    reader = open_store(storage_dir)
    try:
        from quark import projects

        having = {group.project for group in projects.list_groups(reader) if group.path == path}
        names = having or {run.project.name for run in reader.list_runs()}
    finally:
        reader.close()
    if len(names) != 1:
        listed = ", ".join(map(repr, sorted(names)[:_MOST_NAMES])) or "none"
        raise click.UsageError(f"Pass the project of group {path!r} with --project: {listed}.")
    return next(iter(names))


def _describe(group: StoredGroup, best: _Best) -> dict[str, Any]:
    value, run_id = best.get((group.project, group.path), (None, None))
    return {**group.to_dict(), "best": value, "best_run": run_id}


def _find_best(
    reader: SupportsRead, project: str | None, metric: str, mode: str | None
) -> dict[tuple[str, str], tuple[float, str]]:
    """The best value of each group, and of those above it, with the run that has it."""
    from quark.analysis.run_search import choose_mode
    from quark_core.runs.run_search import build_search, find_runs
    from quark_core.search.parser import parse_column

    with usage_mistakes():
        field = parse_column(metric, "--metric")
        runs = find_runs(reader, build_search(project=project))
        downwards = choose_mode(field.name, mode, runs) == "min"  # type: ignore[arg-type]
        _, measure = make_measure(_choose_figure(field, metric, downwards=downwards))
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for run in runs:
        value = measure(run)
        if value is None or not math.isfinite(value):
            continue
        for path in {up for group in run.stored.run.groups for up in _list_up(group)}:
            place = run.stored.project.name, path
            known = best.get(place)
            if known is None or (value < known[0] if downwards else value > known[0]):
                best[place] = value, run.run_id
    return best


def _list_up(path: str) -> list[str]:
    """A path, and those that it lies in."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _choose_figure(field: Field, written: str, *, downwards: bool) -> Field:
    """The figure that is meant: of a bare metric its best one."""
    if field.scope != "metric" or "(" in written:
        return field
    return replace(field, statistic="min" if downwards else "max")


def _print_tree(found: Sequence[StoredGroup], metric: str | None, best: _Best) -> None:

    newest = ("newest",) if metric is None else ("newest", f"best {metric}")
    heads = {"group": FOLD, "runs": RIGHT, newest: WHOLE, "description": FOLD}
    table = make_table(heads, padding=(0, 1, 0, 0))
    project = None
    for group in found:
        if group.project != project:
            project = group.project
            table.add_row(Text(project, "bold"), *[""] * (len(table.columns) - 1))
        cells = [
            Text(_INDENT * (group.path.count("/") + 1) + group.path.rpartition("/")[2]),
            Text(str(group.runs)),
            Text("-" if group.newest_at is None else format_age(group.newest_at)),
        ]
        if metric is not None:
            value, run_id = best.get((group.project, group.path), (None, ""))
            shown = "-" if value is None else f"{format_value(value)} ({run_id[:_RUN_CHARACTERS]})"
            cells.append(Text(shown))
        said = [
            group.description or "",
            *(f"{k}={v}" for k, v in group.fields.items()),
            *group.tags,
        ]
        table.add_row(*cells, Text("  ".join(filter(None, said))))
    Console().print(table)


_SHOWN_RUNS = 3
_MOST_METRICS = 2


def make_measure(
    field: Field | None, runs: Sequence[RunSummary] = ()
) -> tuple[str, Callable[[RunSummary], float | None]]:
    """What the figure of a run is called, and how it is found.

    Args:
        field: A metric, or any field that is a number; None for what a run is judged by.
        runs: The runs, which say what they are judged by.
    """
    if field is None:
        mains = (find_main_metric(run) for run in runs)
        keys = sorted({decode_name(main.key) for main in mains if main is not None})

        def find(run: RunSummary) -> float | None:
            loss = find_main_metric(run)
            return None if loss is None else loss.last

        few = 0 < len(keys) <= _MOST_METRICS
        return f"last {' or '.join(keys) if few else 'loss or objective'}", find
    from quark_core.search.evaluation import find_value
    from quark_core.search.resolution import spell_name

    def look_up(run: RunSummary) -> float | None:
        for name in spell_name(field):
            value = find_value(replace(field, name=name), run)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    name = decode_name(field.name) if field.scope == "metric" else field.name
    if field.scope in ("config", "field"):
        name = f"{field.scope}.{name}"
    if field.statistic == "last":
        return (f"last {name}" if field.scope == "metric" else name), look_up
    return f"{field.statistic}({name})", look_up


def make_group_table(groups: Sequence[GroupedRuns], by: str, measured: str) -> Table:
    """A table of groups, at least one.

    Args:
        groups: The groups.
        by: What they have in common.
        measured: What the figures are of: each group shows their mean and deviation.
    """
    table = make_table(
        {
            by: FOLD | {"style": "bold", "min_width": len(by)},
            ("runs", measured): RIGHT,
            ("range", "newest"): WHOLE,
            "members": FOLD,
        },
        padding=(0, 1, 0, 0),
    )
    for group in groups:
        table.add_row(
            Text(group.label),
            Text(str(len(group.runs))),
            Text(_describe_mean(group)),
            Text(_describe_spread(group)),
            Text(format_age(group.newest_at)),
            Text(_list_runs(group)),
        )
    return table


def _describe_mean(group: GroupedRuns) -> str:
    if group.mean is None:
        return "-"
    mean = format_value(group.mean)
    few = "" if len(group.values) == len(group.runs) else f" of {len(group.values)}"
    if group.deviation is None:
        return f"{mean}{few}"
    return f"{mean} ± {format_value(group.deviation)}{few}"


def _describe_spread(group: GroupedRuns) -> str:
    if group.low is None or group.high is None or len(group.values) < 2:
        return "-"
    return f"{format_value(group.low)} … {format_value(group.high)}"


def _list_runs(group: GroupedRuns) -> str:
    ids = [run.run_id[:_RUN_CHARACTERS] for run in group.runs[:_SHOWN_RUNS]]
    more = len(group.runs) - len(ids)
    return ", ".join(ids) + (f" and {more} more" if more else "")
