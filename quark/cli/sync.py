"""`quark sync`: deliver what processes left behind in their journals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.store_access import json_option, print_json
from quark_core.run_arguments import resolve_storage_dir

if TYPE_CHECKING:
    from quark_core.delivery.sync import LaneSync

__all__ = ["print_lanes", "sync"]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("--dry-run", is_flag=True, help="Only say what waits where.")
@json_option
def sync(directory: Path | None, dry_run: bool, as_json: bool) -> None:
    """Deliver every journal under DIRECTORY [default: the working directory].

    Journals of runs that are still being written are left to their process.
    May be repeated at any time. Exit status 1 where something still waits.
    """
    from quark_core import recovery

    root = resolve_storage_dir(directory)
    if not recovery.has_journals(root):
        # A mistyped folder, or one that a newer Quark wrote, has nothing that waits either.
        _check_store(root)
    if dry_run:
        results = recovery.survey(root)
    elif as_json:
        results = recovery.sync(root)
    else:
        results = _sync_with_progress(root)
    if as_json:
        print_json([result.to_dict() for result in results])
    else:
        print_lanes(results, nothing="Nothing waits here.")
    if not dry_run and any(result.state == "waiting" for result in results):
        sys.exit(1)


def _check_store(root: Path) -> None:
    """See that there is a store that can be read.

    Raises:
        SessionStoreError: There is none, or it cannot be read.
    """
    from quark_core.composition import open_reader

    open_reader(root).list_runs(limit=1)


def _sync_with_progress(root: Path) -> list[LaneSync]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from quark_core import recovery

    waiting = sum(lane.waiting for lane in recovery.survey(root) if lane.state != "held")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Where nothing can be redrawn, a bar would only leave an empty line.
    shown = console.is_interactive
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("records", total=waiting)
        return recovery.sync(root, on_progress=lambda count: progress.advance(task, count))


def print_lanes(lanes: list[LaneSync], *, nothing: str) -> None:
    """Print a table of lanes, or a line where there are none."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not lanes:
        console.print(nothing)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True, style="bold")
    table.add_column("backend")
    table.add_column("state", no_wrap=True)
    table.add_column("delivered", justify="right", no_wrap=True)
    table.add_column("waiting", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for lane in lanes:
        why = [lane.reason] if lane.reason else []
        why += [f"{count} refused: {reason}" for reason, count in lane.quarantined.items()]
        why += [f"{lane.unknown} may be there already"] if lane.unknown else []
        why += lane.damage
        table.add_row(
            Text(lane.run_id[:12]),
            Text(lane.backend),
            lane.state,
            str(lane.delivered),
            str(lane.waiting),
            Text("; ".join(why)),
        )
    console.print(table)
