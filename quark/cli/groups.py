"""`quark groups`: the groups that runs are in, as a tree; `describe` says what one is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.completion import complete_metrics, complete_projects
from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import json_option, print_json, storage_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quark_core.backends.contract import SupportsRead
    from quark_core.records.expression import Field
    from quark_core.runs.group_tree import GroupNode

__all__ = ["groups"]

_LIST = "list"
_INDENT = "  "
_RUN_CHARACTERS = 8


class _Groups(click.Group):
    """A group of which `list` need not be said: `quark groups PROJECT` lists those of one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        said = args[0] if args else None
        if said not in self.commands and said not in ctx.help_option_names:
            args = [_LIST, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Groups, subcommand_metavar="[PROJECT] | COMMAND [ARGS]...")
def groups() -> None:
    """List the groups that runs are in, or say what one is.

    `quark groups PROJECT` is `quark groups list PROJECT`. A run gets into a group by
    `start_run(group="paper/fig3")`, `session.add_to_group` or `quark edit RUN --group PATH`.
    """


@groups.command(_LIST)
@click.argument("project", required=False, shell_complete=complete_projects)
@storage_option
@backend_option
@click.option(
    "--metric",
    metavar="EXPR",
    shell_complete=complete_metrics,
    help='Say which run of each group is best by this, such as "val/acc" or "max(val/acc)".',
)
@click.option(
    "--mode",
    type=click.Choice(("min", "max")),
    help="Which way the metric is better [default: by its name].",
)
@json_option
def list_groups(
    project: str | None,
    storage_dir: Path | None,
    backend: str | None,
    metric: str | None,
    mode: str | None,
    as_json: bool,
) -> None:
    """List the groups of PROJECT, or of all, each with what lies in it."""
    reader = RunSource(storage_dir, backend).reader
    best: Mapping[tuple[str, str], tuple[float, str]] = {}
    if metric is None:
        nodes = _read_tree(reader, project)
    else:
        nodes, best = _read_measured(reader, project, metric, mode)
    if as_json:
        print_json([_describe(node, best) for node in nodes])
    elif nodes:
        _print_tree(nodes, metric, best)
    else:
        click.echo(
            'No run is in a group here. start_run(group="paper/fig3") puts one there, and so does '
            "quark edit RUN --group PATH."
        )


def _describe(node: GroupNode, best: Mapping[tuple[str, str], tuple[float, str]]) -> dict[str, Any]:
    value, run_id = best.get((node.project, node.path), (None, None))
    return {**node.to_dict(), "best": value, "best_run": run_id}


def _read_tree(reader: SupportsRead, project: str | None) -> list[GroupNode]:
    from quark_core.runs.group_tree import make_group_tree

    runs = [run for run in reader.list_runs(project=project) if run.run.archived_at is None]
    return make_group_tree(runs)


def _read_measured(
    reader: SupportsRead, project: str | None, metric: str, mode: str | None
) -> tuple[list[GroupNode], dict[tuple[str, str], tuple[float, str]]]:
    """The tree, and the best value of each group with the run that has it."""
    from quark.cli.group_table import make_measure
    from quark_core.errors import SchemaValidationError
    from quark_core.runs.searching import build_search, find_runs
    from quark_core.search.parser import parse_column

    try:
        field = parse_column(metric, "--metric")
        downwards = _find_mode(field, mode) == "min"
        _, measure = make_measure(_choose_figure(field, metric, downwards=downwards))
        summaries = find_runs(reader, build_search(project=project))
    except SchemaValidationError as error:
        raise click.UsageError(str(error)) from None
    values = {run.run_id: measure(run) for run in summaries}
    nodes = _read_tree(reader, project)
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for node in nodes:
        known = [
            (value, str(run.run.id))
            for run in node.runs
            if (value := values.get(str(run.run.id))) is not None
        ]
        if known:
            chosen = min(known) if downwards else max(known)
            best[node.project, node.path] = chosen
    return nodes, best


def _find_mode(field: Field, mode: str | None) -> str:
    from quark_core.analysis.best_run import choose_mode

    return choose_mode(field.name, mode)  # type: ignore[arg-type]


def _choose_figure(field: Field, written: str, *, downwards: bool) -> Field:
    """The figure that is meant: of a bare metric its best one."""
    from dataclasses import replace

    if field.scope != "metric" or "(" in written:
        return field
    return replace(field, statistic="min" if downwards else "max")


def _print_tree(
    nodes: Sequence[GroupNode],
    metric: str | None,
    best: Mapping[tuple[str, str], tuple[float, str]],
) -> None:
    from rich import box
    from rich.table import Table

    from quark.cli.texts import Console, Text, describe_age, describe_number

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(Text("group"), overflow="fold")
    table.add_column(Text("runs"), justify="right", no_wrap=True)
    table.add_column(Text("newest"), no_wrap=True)
    if metric is not None:
        table.add_column(Text(f"best {metric}"), no_wrap=True)
    table.add_column(Text("what it is"), overflow="fold")
    project = None
    for node in nodes:
        if node.project != project:
            project = node.project
            table.add_row(Text(project, "bold"), *[""] * (len(table.columns) - 1))
        cells = [
            Text(_INDENT * (node.depth + 1) + node.name),
            Text(str(len(node.runs))),
            Text("-" if node.newest_at is None else describe_age(node.newest_at)),
        ]
        if metric is not None:
            value, run_id = best.get((node.project, node.path), (None, ""))
            shown = (
                "-" if value is None else f"{describe_number(value)} ({run_id[:_RUN_CHARACTERS]})"
            )
            cells.append(Text(shown))
        said = [node.description or "", *(f"{k}={v}" for k, v in node.fields.items()), *node.tags]
        table.add_row(*cells, Text("  ".join(filter(None, said))))
    Console().print(table)
