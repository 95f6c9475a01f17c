"""`quark doctor`: what waits where, what was refused and why."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.store_access import json_option, print_json, storage_option
from quark.cli.sync import print_lanes
from quark_core.run_arguments import resolve_storage_dir

__all__ = ["doctor"]


@click.command()
@storage_option
@json_option
def doctor(storage_dir: Path | None, as_json: bool) -> None:
    """Say what waits in the journals, what is in quarantine, and why."""
    from quark_core import recovery

    root = resolve_storage_dir(storage_dir)
    lanes = [lane for lane in recovery.survey(root) if lane.state != "delivered" or lane.damage]
    refused = recovery.count_quarantined(root)
    if as_json:
        print_json(
            {
                "journals": [lane.to_dict() for lane in lanes],
                "quarantine": [item.to_dict() for item in refused],
            }
        )
        return
    print_lanes(lanes, nothing="Nothing waits in a journal.")
    if any(lane.state == "pending" for lane in lanes):
        click.echo(f"Deliver it with: quark sync {root}")
    if not refused:
        click.echo("Nothing is in quarantine.")
        return

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True, style="bold")
    table.add_column("refused by")
    table.add_column("records", justify="right")
    table.add_column("why", overflow="fold")
    for item in refused:
        table.add_row(
            Text(item.run_id[:12]), Text(item.backend), str(item.records), Text(item.reason)
        )
    Console().print(table)
