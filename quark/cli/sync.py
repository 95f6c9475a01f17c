"""`quark sync`: deliver what processes left behind in their journals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import AS_JSON, print_json
from quark.cli.texts import (
    BOLD,
    FOLD,
    PLAIN,
    RIGHT,
    WHOLE,
    Console,
    Text,
    make_progress,
    make_table,
)
from quark_core.backends.registry import default_registry
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import SessionStoreError
from quark_core.formatting import format_bytes
from quark_core.runs import recovery
from quark_core.runs.backend_choice import choose_backend, open_reader, remember
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from quark_core.delivery.sync import LaneSync


@click.command()
@takes_options
def sync(
    *,
    directory: Path | None = argument(),
    dry_run: bool = option("Show what is waiting, and deliver nothing."),
    allowed: tuple[str, ...] = option(
        "Deliver to this backend (name or URI) too, now and in the future.",
        "--allow-backend",
        metavar="BACKEND",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Deliver records that earlier processes left behind.

    If a process is killed or loses its connection, its last records stay in a
    journal on disk. This command writes them to the store and the mirrors, offers
    rejected records again, compacts the store, and merges SQLite's write-ahead log
    into quark.db. It skips journals of runs that are still being written. It is
    safe to repeat.

    DIRECTORY defaults to the working directory, or the nearest parent that has a
    store. Records go only to this store, and to backends that you have used before,
    allowed, or set in the environment.

    \b
    Exit codes:
      0    everything is delivered
      1    records are waiting or rejected, or a journal is damaged
      2    usage error
    """  # noqa: D301 - click wants the character
    root = resolve_storage_dir(directory)
    _allow(allowed, root)
    if not recovery.has_journals(root):
        # A mistyped folder, or one that a newer Quark wrote, has nothing that waits either.
        _check_store(root)
    if dry_run:
        results = recovery.survey(root)
    elif as_json:
        results = recovery.sync(root)
    else:
        results = _sync_with_progress(root)
    if not dry_run:
        from quark_backends.embedded.compaction_process import compact_root

        compact_root(root)
    if as_json:
        print_json([result.to_dict() for result in results])
    else:
        print_lanes(results, nothing="No records are waiting.")
    if not dry_run:
        _settle(root)
    if any(result.damage or result.quarantined for result in results):
        sys.exit(1)
    if not dry_run and any(result.state == "waiting" for result in results):
        sys.exit(1)


def _allow(places: tuple[str, ...], root: Path) -> None:
    """Note backends that the user trusts.

    Raises:
        UnknownBackendError: Nothing installed answers to one.
    """
    if not places:
        return

    choices = [choose_backend(place, default_registry()) for place in places]
    if not remember(choices, root):
        click.echo(
            "quark: warning: the backend is allowed for this call only, because the config folder "
            "is not writable (HOME, XDG_CONFIG_HOME)",
            err=True,
        )


def _check_store(root: Path) -> None:
    """See that there is a store that can be read.

    Raises:
        SessionStoreError: There is none, or it cannot be read.
    """
    open_reader(root, takes_over=False).list_runs(limit=1)


def _settle(root: Path) -> None:
    """Make the database file whole by itself, and say where that cannot be done now."""
    from quark_backends.store.databases.layout import StoreLayout
    from quark_backends.store.databases.sqlite import checkpoint_file

    layout = StoreLayout(root)
    try:
        left_bytes = checkpoint_file(layout) if layout.db_path.exists() else 0
    except SessionStoreError as error:
        click.echo(f"quark: {error}", err=True)
        return
    if left_bytes:
        click.echo(
            f"{layout.db_path} is in use: its newest {format_bytes(left_bytes)} stay in the "
            "write-ahead log until then",
            err=True,
        )


def _sync_with_progress(root: Path) -> list[LaneSync]:
    from rich.progress import MofNCompleteColumn

    waiting = sum(lane.waiting for lane in recovery.survey(root) if lane.state != "held")
    with make_progress(MofNCompleteColumn()) as progress:
        task = progress.add_task("records", total=waiting)
        return recovery.sync(root, on_progress=lambda count: progress.advance(task, count))


def print_lanes(lanes: list[LaneSync], *, nothing: str) -> None:
    """Print a table of lanes, or a line where there are none."""
    console = Console()
    if not lanes:
        console.print(nothing)
        return
    table = make_table(
        {
            "run": BOLD,
            "backend": PLAIN,
            "state": WHOLE,
            ("delivered", "waiting"): RIGHT,
            "why": FOLD,
        }
    )
    for lane in lanes:
        why = [lane.reason] if lane.reason else []
        why += [f"{count} rejected: {reason}" for reason, count in lane.quarantined.items()]
        why += [f"{lane.unknown} may already be delivered"] if lane.unknown else []
        why += lane.damage
        table.add_row(
            Text(shorten_run_id(lane.run_id)),
            Text(lane.backend),
            lane.state,
            str(lane.delivered),
            str(lane.waiting),
            Text("; ".join(why)),
        )
    console.print(table)
