"""`quark restore`: runs back out of the trash."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.du import measure
from quark.cli.options import argument, takes_options
from quark.cli.rm import choose_runs, open_for_removal
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    open_store,
    print_json,
)
from quark_core.config.arguments import resolve_storage_dir
from quark_core.runs.run_ids import name_store, shorten_run_id


@click.command()
@takes_options
def restore(
    *,
    runs: tuple[str, ...] = argument(metavar="RUN...", required=True),
    storage_dir: Path | None = STORAGE_DIR,
    as_json: bool = AS_JSON,
) -> None:
    """Restore runs from the trash.

    RUN is a run ID, unique prefix or name. On a Quark server, the key in
    QUARK_USER_KEY needs the scopes read and write.
    """
    store = open_store(storage_dir)
    in_trash = {usage.run_id: usage.name for usage in measure(store).list_trash()}
    chosen = choose_runs(runs, in_trash, None, name_store(store))
    with open_for_removal(resolve_storage_dir(storage_dir)) as removal:
        removal.restore_runs(chosen)
    if as_json:
        print_json({"restored": chosen})
        return
    for run_id in chosen:
        click.echo(f"Restored {shorten_run_id(run_id)}.")
