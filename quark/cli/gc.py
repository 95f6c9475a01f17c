"""`quark gc`: what is in the trash away for good."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.du import measure, print_usages
from quark.cli.options import option, takes_options
from quark.cli.rm import SHOWN_RUNS, YES, open_for_removal
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    open_store,
    print_json,
)
from quark.cli.texts import make_progress
from quark_core.config.arguments import resolve_storage_dir
from quark_core.formatting import format_bytes, format_count
from quark_core.runs.run_ids import name_store, shorten_run_id

if TYPE_CHECKING:
    from quark_core.backends.edits import Collection, SupportsRemoval

_DAY_S = 86_400.0


@click.command()
@takes_options
def gc(
    *,
    storage_dir: Path | None = STORAGE_DIR,
    older_than: float = option(
        "Only runs that have been in the trash for this long.",
        least=0,
        metavar="DAYS",
        show_default=False,
        default=0.0,
    ),
    yes: bool = YES,
    dry_run: bool = option("Show what would be deleted, and delete nothing."),
    as_json: bool = AS_JSON,
) -> None:
    """Delete the runs in the trash permanently.

    Their disk space becomes free. The command works in small steps while other
    runs are writing. You can interrupt it: the next call continues. On a Quark
    server, it empties the trash of the whole workspace and needs the scope admin.
    """
    older_than_s = older_than * _DAY_S
    store = open_store(storage_dir)
    plan = measure(store).collect_trash(older_than_s=older_than_s, dry_run=True)
    if dry_run:
        if as_json:
            print_json(plan.to_dict())
        else:
            _print_plan(plan, name_store(store))
        return
    if not as_json:
        _print_plan(plan, name_store(store))
    if plan.runs and not yes:
        total = format_bytes(sum(usage.total_bytes for usage in plan.runs))
        question = f"Permanently delete {format_count(len(plan.runs), 'run')} ({total})?"
        click.confirm(question, abort=True, err=as_json)
    with open_for_removal(resolve_storage_dir(storage_dir)) as removal:
        try:
            # What somebody else puts into the trash meanwhile was agreed to by nobody.
            done = _collect(removal, older_than_s, [usage.run_id for usage in plan.runs])
        except KeyboardInterrupt:
            click.echo("quark: interrupted; the store is intact and `quark gc` continues", err=True)
            sys.exit(130)
    if as_json:
        # Those that the plan left out were not asked for a second time.
        print_json(replace(done, skipped={**plan.skipped, **done.skipped}).to_dict())
        return
    for run_id, reason in done.skipped.items():
        click.echo(f"Kept {shorten_run_id(run_id)}: {reason}.")
    click.echo(
        f"Deleted {format_count(len(done.runs), 'run')}. "
        f"Store size: {format_bytes(done.before_bytes)} before, "
        f"{format_bytes(done.after_bytes)} now ({format_bytes(done.freed_bytes)} freed)."
    )
    for note in done.notes:
        click.echo(note)


def _collect(removal: SupportsRemoval, older_than_s: float, run_ids: Sequence[str]) -> Collection:
    from rich.progress import DownloadColumn

    with make_progress(DownloadColumn()) as progress:
        tasks: dict[str, Any] = {}

        def show(what: str, done_bytes: int, total_bytes: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done_bytes, total=total_bytes)

        return removal.collect_trash(older_than_s=older_than_s, run_ids=run_ids, on_progress=show)


def _print_plan(plan: Collection, where: str) -> None:
    if plan.runs:
        print_usages(plan.runs, limit=SHOWN_RUNS)
    else:
        click.echo(f"No runs to delete in the trash of {where}.")
    for run_id, reason in plan.skipped.items():
        click.echo(f"Kept {shorten_run_id(run_id)}: {reason}.")
    for path, size_bytes in plan.leftovers.items():
        click.echo(f"left over: {path} ({format_bytes(size_bytes)})")
