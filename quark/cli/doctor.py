"""`quark doctor`: what waits where, what was refused or is damaged, and why."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from quark.cli.options import takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    describe_place,
    print_json,
)
from quark.cli.sync import print_lanes
from quark.cli.texts import BOLD, FOLD, PLAIN, Console, Text, make_table
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.write_ahead_log import find_log, measure_log
from quark_core.backends.contract import SupportsPrimary
from quark_core.backends.edits import DamagedRecords, SupportsRemoval
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import SessionStoreError
from quark_core.formatting import format_bytes
from quark_core.runs import recovery
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_ids import shorten_run_id


@click.command()
@takes_options
def doctor(*, storage_dir: Path | None = STORAGE_DIR, as_json: bool = AS_JSON) -> None:
    """Check for undelivered, rejected or damaged records.

    Shows the reason for each, and the command that delivers the records.
    """
    root = resolve_storage_dir(storage_dir)
    unreadable: str | None = None
    damaged: list[DamagedRecords] = []
    place = str(root / ".quark")
    try:
        store = open_reader(root, takes_over=False)
        place = describe_place(store)
        damaged = _list_damaged(store)
    except SessionStoreError as error:
        if not recovery.has_journals(root):
            raise
        # What waits can be said, and may be all that there is to know.
        unreadable = str(error)
    layout = StoreLayout(root)
    log_bytes = measure_log(layout.db_path)
    lanes = [lane for lane in recovery.survey(root) if lane.state != "delivered" or lane.damage]
    refused = recovery.count_quarantined(root)
    lost = recovery.list_lost(root)
    if as_json:
        print_json(
            {
                "store": {
                    "path": place,
                    "readable": unreadable is None,
                    "reason": unreadable,
                    "log_bytes": log_bytes,
                },
                "journals": [lane.to_dict() for lane in lanes],
                "damaged_journals": [item.to_dict() for item in lost],
                "quarantine": [item.to_dict() for item in refused],
                "damaged": [item.to_dict() for item in damaged],
            }
        )
        return
    if unreadable is None:
        click.echo(f"Store {place}: readable.")
    else:
        click.echo(f"Store {place}: cannot be read: {unreadable}")
    if log_bytes:
        click.echo(
            f"{find_log(layout.db_path).name} holds up to {format_bytes(log_bytes)} of new data "
            f"that {layout.db_path.name} lacks. To copy a store in use, run `quark backup DIR`. "
            f"When no run is running, `quark sync {shlex.quote(str(root))}` merges the files."
        )
    print_lanes(lanes, nothing="No records are waiting in journals.")
    if any(lane.state == "pending" for lane in lanes):
        click.echo(f"To deliver them: quark sync {shlex.quote(str(root))}")
    if refused:
        _print_table(
            "rejected by",
            [(item.run_id, item.backend, item.records, item.reason) for item in refused],
        )
    else:
        click.echo("No rejected records.")
    if lost:
        click.echo("Damaged journals (readable records are delivered, the files are kept):")
        for item in lost:
            click.echo(f"  {item.path}")
            for what in (*item.missing, *item.damage):
                click.echo(f"    {what}")
    if damaged:
        click.echo("Damaged records in the store, which readers skip:")
        _print_table(
            "kind", [(item.run_id, item.kind, item.records, item.reason) for item in damaged]
        )


def _list_damaged(store: SupportsPrimary) -> list[DamagedRecords]:
    """What the store has set aside.

    Raises:
        SessionStoreError: It cannot be read.
    """
    store.list_runs(limit=1)  # whether it can be read shows when it is
    removal: object = store
    return removal.list_damaged() if isinstance(removal, SupportsRemoval) else []


def _print_table(what: str, rows: Sequence[tuple[str, str, int, str]]) -> None:

    table = make_table({"run": BOLD, what: PLAIN, "records": {"justify": "right"}, "why": FOLD})
    for run_id, of, records, reason in rows:
        table.add_row(Text(shorten_run_id(run_id)), Text(of), str(records), Text(reason))
    Console().print(table)
