"""`quark runs`: the runs of a store that fit, newest first or sorted."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from quark.cli.completion import complete_metrics, complete_projects, complete_tags
from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import json_option, print_json, storage_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.expression import Field, RunSearch

__all__ = ["runs"]

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
    as_json: bool,
) -> None:
    """List runs, newest first, or those that fit an expression, sorted.

    The metrics and settings that --where and --sort ask for become columns. The
    language is described in docs/reference/search.md.
    """
    from quark.cli.texts import find_duration_s
    from quark_core.errors import SchemaValidationError
    from quark_core.runs.searching import build_search, find_runs

    try:
        search = build_search(
            project=project,
            where=where,
            order_by=sort,
            # One more than is shown tells whether there are more.
            limit=limit + 1,
            archived=archived,
            where_argument="--where",
            order_argument="--sort",
        )
        store = RunSource(storage_dir, backend).reader
        found = find_runs(store, _add_filters(search, status, tag))
    except SchemaValidationError as error:
        raise _SearchMistake(str(error)) from None
    shown = found[:limit]
    if not as_json:
        _print_table(shown, search.fields, has_more=len(found) > limit)
        name = getattr(store, "store_name", None)
        if not found and name is not None:
            click.echo(
                f"Only the project store {name!r} of the service was asked: QUARK_STORE_NAME names "
                "another one, and ?store=* behind the service's URL asks for all of them."
            )
        return
    from quark.cli.run_table import find_loss

    print_json(
        [
            {
                **run.stored.run.to_dict(),
                "state": run.state,
                "exit_code": run.stored.exit_code,
                "duration_s": find_duration_s(run.stored, run.last_metric_at),
                "last_loss": None if (loss := find_loss(run)) is None else loss.last,
                "loss_metric": None if loss is None else loss.key,
                "newest_step": run.newest_step,
                "config": run.config,
                "metrics": run.to_dict()["metrics"],
            }
            for run in shown
        ]
    )


def _add_filters(search: RunSearch, status: str | None, tags: Sequence[str]) -> RunSearch:
    from dataclasses import replace

    from quark_core.records.expression import And, Comparison, Expression, Field, HasTag

    terms: list[Expression] = [HasTag(tag) for tag in tags]
    if status is not None:
        terms.append(Comparison(Field("run", "state"), "==", status))
    if search.where is not None:
        terms.append(search.where)
    source = search.source
    if source is not None:
        # A store that is asked over a network is asked in words.
        words = [f"{_quote(tag)} in tags" for tag in tags]
        words += [] if status is None else [f"state == {_quote(status)}"]
        words += [f"({source.where})" if words else source.where] if source.where else []
        source = replace(source, where=" and ".join(words) or None)
    return replace(search, where=And(tuple(terms)) if terms else None, source=source)


def _quote(text: str) -> str:
    """A text as the language of searches has it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + escaped.replace("\n", "\\n").replace("\t", "\\t") + "'"


def _print_table(runs: Sequence[RunSummary], asked: Sequence[Field], *, has_more: bool) -> None:
    from quark.cli.run_table import MANY_RUNS, list_blocks, make_table
    from quark.cli.texts import Console

    console = Console()
    if not runs:
        console.print("There are runs; --limit shows them." if has_more else "No runs here fit.")
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
