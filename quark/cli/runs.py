"""`quark runs`: the runs of a store, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.store_access import json_option, open_store, print_json, storage_option

if TYPE_CHECKING:
    from quark_core.backend import StoredRun

__all__ = ["runs"]

_STATES = ("running", "completed", "failed", "interrupted", "lost")


@click.command()
@storage_option
@click.option("-p", "--project", help="Only runs of this project.")
@click.option("-s", "--status", type=click.Choice(_STATES), help="Only runs in this state.")
@click.option("-t", "--tag", multiple=True, help="Only runs with this tag; repeat for several.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most N."
)
@json_option
def runs(
    storage_dir: Path | None,
    project: str | None,
    status: str | None,
    tag: tuple[str, ...],
    limit: int,
    as_json: bool,
) -> None:
    """List runs, newest first."""
    from quark.cli.run_summary import last_loss
    from quark.cli.texts import find_duration_s

    store = open_store(storage_dir)
    found = [
        stored
        for stored in store.list_runs(project=project)
        if status in (None, stored.state) and set(tag) <= set(stored.run.tags)
    ]
    rows = [
        (stored, find_duration_s(stored), last_loss(store, str(stored.run.id)))
        for stored in found[:limit]
    ]
    if as_json:
        print_json(
            [
                {
                    **stored.run.to_dict(),
                    "state": stored.state,
                    "duration_s": duration_s,
                    "last_loss": loss,
                }
                for stored, duration_s, loss in rows
            ]
        )
        return
    _print_table(rows, len(found))


def _print_table(rows: list[tuple[StoredRun, float, float | None]], found: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from quark.cli.texts import describe_age, describe_duration, describe_number, describe_state

    console = Console()
    if not rows:
        console.print("No runs here fit.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    named = any(stored.run.name for stored, _, _ in rows)
    table.add_column("run", no_wrap=True, style="bold")
    if named:
        table.add_column("name")
    table.add_column("project", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("started", no_wrap=True)
    table.add_column("duration", justify="right", no_wrap=True)
    table.add_column("last loss", justify="right", no_wrap=True)
    table.add_column("tags")
    ids = [str(stored.run.id) for stored, _, _ in rows]
    shown = _shorten(ids)
    for (stored, duration_s, loss), run_id in zip(rows, shown, strict=True):
        cells = [Text(run_id)]
        if named:
            cells.append(Text(stored.run.name or ""))
        table.add_row(
            *cells,
            Text(stored.project.name),
            describe_state(stored.state),
            describe_age(stored.run.created_at),
            describe_duration(duration_s),
            describe_number(loss),
            Text(", ".join(stored.run.tags)),
        )
    console.print(table)
    if found > len(rows):
        console.print(f"{len(rows)} of {found} runs; --limit shows more.", style="dim")


def _shorten(ids: list[str]) -> list[str]:
    """The shortest beginnings, of eight characters at least, that still tell the ids apart."""
    length = 8
    while len({run_id[:length] for run_id in ids}) < len(ids):
        length += 1
    return [run_id[:length] for run_id in ids]
