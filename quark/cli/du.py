"""`quark du`: what a store takes up, by project and by run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    describe_place,
    open_store,
    print_json,
)
from quark.cli.texts import (
    BOLD,
    FOLD,
    PLAIN,
    RIGHT,
    WHOLE,
    Console,
    Text,
    describe_state,
    make_grid,
    make_table,
)
from quark_core.backends.contract import SupportsPrimary
from quark_core.backends.edits import RunUsage, StoreUsage, SupportsRemoval
from quark_core.errors import SessionStoreError
from quark_core.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table


@click.command()
@takes_options
def du(
    *,
    storage_dir: Path | None = STORAGE_DIR,
    limit: int = option("Number of runs to show.", "-n", least=0, default=20),
    as_json: bool = AS_JSON,
) -> None:
    """Show disk usage by project and run, largest first.

    Counts each file below .quark once, as `du` does. Data that mirrors store
    elsewhere (MLflow, csv:DIR) is not counted.
    """
    usage = measure(open_store(storage_dir)).measure_store()
    projects = _sum_up_projects(usage.runs)
    if as_json:
        print_json(
            {
                "store_root": usage.store_root,
                "total_bytes": usage.total_bytes,
                "database_file_bytes": usage.database_file_bytes,
                "free_bytes": usage.free_bytes,
                "overhead_bytes": usage.overhead_bytes,
                "shared_bytes": usage.shared_bytes,
                "elsewhere_bytes": usage.elsewhere_bytes,
                "trash_bytes": sum(run.total_bytes for run in usage.trash),
                "projects": projects,
                "runs": [run.to_dict() for run in usage.runs],
            }
        )
        return

    console = Console()
    if len(projects) > 1:
        console.print(_project_table(projects))
    if usage.runs and limit:
        print_usages(usage.runs, known=usage.runs, limit=limit)
    console.print(_total_table(usage))


def measure(store: object) -> SupportsRemoval:
    """A store as what measures and removes runs.

    Raises:
        SessionStoreError: It can do neither.
    """
    if isinstance(store, SupportsRemoval):
        return store
    place = describe_place(store) if isinstance(store, SupportsPrimary) else type(store).__name__
    raise SessionStoreError(f"the store {place} cannot measure or remove runs")


def shorten_ids(ids: Sequence[str], known: Iterable[str]) -> list[str]:
    """The shortest beginnings, of eight characters at least, that fit one known run each."""
    everyone = set(known) | set(ids)
    shown = []
    for run_id in ids:
        length = 8
        others = [other for other in everyone if other[:8] == run_id[:8] and other != run_id]
        while length < len(run_id) and any(o.startswith(run_id[:length]) for o in others):
            length += 1
        shown.append(run_id[:length])
    return shown


def print_usages(
    usages: Sequence[RunUsage], *, known: Iterable[RunUsage] = (), limit: int | None = None
) -> None:
    """Print a table of runs and what they take up.

    Args:
        usages: The runs.
        known: All runs that their shortened ids must be told from.
        limit: At most so many, the largest; a line says how many more there are.
    """
    count = len(usages)
    if limit is not None and count > limit:
        usages = sorted(usages, key=lambda usage: -usage.total_bytes)[:limit]
    named = any(usage.name for usage in usages)
    names = ("name", "project") if named else ("project",)
    sizes = ("points", "database", "files", "total")
    table = make_table(
        {"run": BOLD, names: FOLD, "state": WHOLE, sizes: RIGHT}, collapse_padding=True
    )
    ids = shorten_ids([usage.run_id for usage in usages], [usage.run_id for usage in known])
    for usage, run_id in zip(usages, ids, strict=True):
        cells = [Text(run_id)]
        if named:
            cells.append(Text(usage.name or ""))
        trashed = usage.trashed_at is not None
        table.add_row(
            *cells,
            Text(usage.project),
            Text("in trash", style="dim") if trashed else describe_state(usage.state),
            f"{usage.points:,}",
            format_bytes(usage.database_bytes),
            format_bytes(usage.file_bytes),
            format_bytes(usage.total_bytes),
        )
    console = Console()
    console.print(table)
    if count > len(usages):
        console.print(f"{len(usages)} of {count} runs, the largest.", style="dim")


def _sum_up_projects(runs: Iterable[RunUsage]) -> list[dict[str, Any]]:
    """One entry per project, the largest first, without what is in the trash."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.trashed_at is not None:
            continue
        entry = found.setdefault(
            run.project,
            {"project": run.project}
            | dict.fromkeys(("runs", "points", "database_bytes", "file_bytes", "total_bytes"), 0),
        )
        entry["runs"] += 1
        for name in ("points", "database_bytes", "file_bytes", "total_bytes"):
            entry[name] += getattr(run, name)
    return sorted(found.values(), key=lambda entry: (-entry["total_bytes"], entry["project"]))


def _project_table(projects: Sequence[dict[str, Any]]) -> Table:

    table = make_table(
        {
            "project": FOLD | {"style": "bold"},
            ("runs", "points", "database", "files", "total"): RIGHT,
        },
        collapse_padding=True,
    )
    for entry in projects:
        table.add_row(
            Text(entry["project"]),
            f"{entry['runs']:,}",
            f"{entry['points']:,}",
            format_bytes(entry["database_bytes"]),
            format_bytes(entry["file_bytes"]),
            format_bytes(entry["total_bytes"]),
        )
    return table


def _total_table(usage: StoreUsage) -> Table:

    kept = [run for run in usage.runs if run.trashed_at is None]
    trash_bytes = sum(run.total_bytes for run in usage.trash)
    rows = [
        (format_count(len(kept), "run"), sum(run.total_bytes for run in kept), ""),
        (f"{len(usage.trash)} in the trash", trash_bytes, "quark gc" if trash_bytes else ""),
        ("free in the database", usage.free_bytes, "quark gc" if usage.free_bytes else ""),
        ("database overhead", usage.overhead_bytes, "indexes, page ends, write-ahead log"),
        ("shared files", usage.shared_bytes, ""),
    ]
    if usage.elsewhere_bytes:
        rows.append(("journals elsewhere", -usage.elsewhere_bytes, "in QUARK_JOURNAL_DIR"))
    table = make_grid(PLAIN, RIGHT, {"style": "dim"})
    for label, size_bytes, remark in rows:
        table.add_row(label, format_bytes(size_bytes), remark)
    table.add_row(
        Text("total", style="bold"),
        Text(format_bytes(usage.total_bytes), style="bold"),
        Text(usage.store_root, overflow="fold"),
    )
    return table
