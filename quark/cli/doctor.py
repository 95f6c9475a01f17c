"""`quark doctor`: what waits where, what was refused or is damaged, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.store_access import json_option, print_json, storage_option
from quark.cli.sync import print_lanes
from quark_core.run_arguments import resolve_storage_dir

if TYPE_CHECKING:
    from quark_core.keeping import DamagedRecords

__all__ = ["doctor"]


@click.command()
@storage_option
@json_option
def doctor(storage_dir: Path | None, as_json: bool) -> None:
    """Say what waits in the journals, what is in quarantine or damaged, and why."""
    from quark_core import recovery

    root = resolve_storage_dir(storage_dir)
    lanes = [lane for lane in recovery.survey(root) if lane.state != "delivered" or lane.damage]
    refused = recovery.count_quarantined(root)
    damaged = _list_damaged(root)
    if as_json:
        print_json(
            {
                "journals": [lane.to_dict() for lane in lanes],
                "quarantine": [item.to_dict() for item in refused],
                "damaged": [item.to_dict() for item in damaged],
            }
        )
        return
    print_lanes(lanes, nothing="Nothing waits in a journal.")
    if any(lane.state == "pending" for lane in lanes):
        click.echo(f"Deliver it with: quark sync {root}")
    if refused:
        _print_table(
            "refused by",
            [(item.run_id, item.backend, item.records, item.reason) for item in refused],
        )
    else:
        click.echo("Nothing is in quarantine.")
    if damaged:
        click.echo("Damaged in the store, set aside, and left out of every read:")
        _print_table(
            "kind", [(item.run_id, item.kind, item.records, item.reason) for item in damaged]
        )


def _list_damaged(root: Path) -> list[DamagedRecords]:
    """What the store has set aside; nothing where there is no store."""
    from quark_core.composition import open_reader
    from quark_core.errors import SessionStoreError
    from quark_core.keeping import SupportsRemoval

    try:
        store = open_reader(root)
        return store.list_damaged() if isinstance(store, SupportsRemoval) else []
    except SessionStoreError as error:
        if (root / ".quark").exists():
            click.echo(f"The store itself cannot be read: {error}", err=True)
        return []


def _print_table(what: str, rows: Sequence[tuple[str, str, int, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True, style="bold")
    table.add_column(what)
    table.add_column("records", justify="right")
    table.add_column("why", overflow="fold")
    for run_id, of, records, reason in rows:
        table.add_row(Text(run_id[:12]), Text(of), str(records), Text(reason))
    Console().print(table)
