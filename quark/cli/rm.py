"""`quark rm`: runs into the trash."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.completion import complete_runs
from quark.cli.du import measure, print_usages, shorten_ids
from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    describe_several,
    find_by_id,
    find_ids,
    open_store,
    print_json,
)
from quark_core.config.arguments import resolve_storage_dir
from quark_core.delivery.journal_folder import find_folders
from quark_core.delivery.sync import count_waiting
from quark_core.errors import InvalidRunStateError, RunNotFoundError
from quark_core.formatting import format_bytes, format_count
from quark_core.ranks.launches import RankInfo
from quark_core.records import ArtifactRecord
from quark_core.records.query import Query
from quark_core.runs.backend_choice import open_primary, plan_backends
from quark_core.runs.run_ids import name_store, shorten_run_id
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.edits import RunUsage, SupportsRemoval

SHOWN_RUNS = 20
"""Lines of a table of runs that are to go."""

YES = option("Do not ask for confirmation.", "-y")


@contextmanager
def open_for_removal(root: Path) -> Iterator[SupportsRemoval]:
    """The store, to be changed; it must have been found to be there."""
    choice = plan_backends((), RankInfo()).primary
    assert choice is not None
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        yield measure(primary)
    finally:
        primary.close()


def choose_runs(
    texts: Sequence[str],
    known: Mapping[str, str | None],
    in_trash: Mapping[str, str | None] | None,
    where: str,
) -> list[str]:
    """The ids of runs that are given by id, by name, or by the beginning of one; each once.

    Args:
        texts: What was given.
        known: Names of the runs that it may be, by id.
        in_trash: Names of the runs in the trash; None where `known` is these.
        where: The store, as `name_store` has it.
    """
    chosen = []
    for text in texts:
        found = find_ids(text, known)
        if not found and in_trash is not None and (trashed := find_ids(text, in_trash)):
            raise RunNotFoundError(
                f"run {text!r} is already in the trash "
                f"({', '.join(map(shorten_run_id, trashed[:5]))}). `quark restore` restores it, "
                "and `quark gc` deletes it."
            )
        if not found and in_trash is not None:
            raise RunNotFoundError(
                f"no run matches {text!r} (ID, unique prefix or name) in {where}. "
                "`quark runs` lists the runs."
            )
        if not found:
            raise RunNotFoundError(
                f"no run in the trash of {where} matches {text!r}. "
                "`quark rm --list` lists the runs in the trash."
            )
        if len(found) > 1:
            raise RunNotFoundError(describe_several(text, found, known))
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


_SHOWN_IDS = 10


@click.command()
@takes_options
def rm(
    *,
    runs: tuple[str, ...] = argument(metavar="RUN...", shell_complete=complete_runs),
    storage_dir: Path | None = STORAGE_DIR,
    yes: bool = YES,
    force: bool = option("Remove runs that have undelivered records, too."),
    list_only: bool = option("List the runs in the trash.", "--list"),
    as_json: bool = AS_JSON,
) -> None:
    """Move runs to the trash.

    RUN is a run ID, unique prefix or name. Lists no longer show these runs.
    `quark restore` restores them, and `quark gc` deletes them permanently. Their
    copies in mirrors (MLflow, csv:DIR) are kept. On a Quark server, the key in
    QUARK_USER_KEY needs the scopes read and write.
    """
    store = open_store(storage_dir)
    trash = measure(store)
    if list_only:
        _print_trash(trash.list_trash(), name_store(store), as_json)
        return
    if not runs:
        raise click.UsageError("Missing argument 'RUN...'. `quark runs` lists the runs.")
    known = {str(stored.run.id): stored.run.name for stored in store.list_runs()}
    in_trash = {usage.run_id: usage.name for usage in trash.list_trash()}
    # A service lists the runs of one project store, and knows those of all by their ids.
    for text in runs:
        if not find_ids(text, known) and (stored := find_by_id(store, text)) is not None:
            known[str(stored.run.id)] = stored.run.name
    chosen = choose_runs(runs, known, in_trash, name_store(store))
    usages = trash.measure_runs(chosen)
    _refuse_living(usages)
    root = resolve_storage_dir(storage_dir)
    if not force:
        _refuse_undelivered(root, chosen)
    total_bytes = sum(usage.total_bytes for usage in usages)
    if not as_json:
        print_usages(usages, limit=SHOWN_RUNS)
    if not as_json:
        _tell_used(store, chosen)
    if not yes:
        counted = format_count(len(usages), "run")
        question = f"Move {counted} to the trash ({format_bytes(total_bytes)})?"
        click.confirm(question, abort=True, err=as_json)
    with open_for_removal(root) as removal:
        removal.trash_runs(chosen)
    if as_json:
        print_json({"trashed": [u.to_dict() for u in usages], "total_bytes": total_bytes})
        return
    ids = shorten_ids(chosen, [*known, *in_trash])
    shown = " ".join(ids) if len(ids) <= _SHOWN_IDS else "RUN... (`quark rm --list` lists them)"
    counted = format_count(len(usages), "run")
    click.echo(f"Moved {counted} to the trash ({format_bytes(total_bytes)}).")
    click.echo(f"To restore: quark restore{_storage_words(storage_dir)} {shown}")
    click.echo(f"To free the space: quark gc{_storage_words(storage_dir)}")


def _tell_used(store: Any, chosen: Sequence[str]) -> None:
    """Say which artifacts of these runs other runs use, or have aliases."""
    from quark_core.runs.artifact_versions import list_versions

    projects = set()
    for run_id in chosen:
        with suppress(RunNotFoundError):
            if store.read(run_id, ArtifactRecord.KIND, Query(limit=1)).count:
                projects.add(store.load_run(run_id).project.name)
    for project in sorted(projects):
        for version in list_versions(store, project):
            others = [user for user in version.used_by if user not in chosen]
            if version.record.run_id in chosen and others:
                click.echo(
                    f"{clean_line(version.name)} is used by "
                    f"{', '.join(map(shorten_run_id, others[:SHOWN_RUNS]))}."
                )


def _refuse_living(usages: Sequence[RunUsage]) -> None:
    alive = [shorten_run_id(usage.run_id) for usage in usages if usage.state == "running"]
    if alive:
        verb = "are" if len(alive) > 1 else "is"
        raise InvalidRunStateError(
            f"{', '.join(alive)} {verb} still running; nothing was removed. Stop the training "
            "process, or wait until it has ended."
        )


def _refuse_undelivered(root: Path, run_ids: Sequence[str]) -> None:
    found = _find_undelivered(root, run_ids)
    if found:
        lines = "; ".join(
            f"{shorten_run_id(run_id)}: {', '.join(what)}" for run_id, what in found.items()
        )
        raise InvalidRunStateError(
            f"some records are not delivered; nothing was removed ({lines}). "
            f"Deliver them with `quark sync {root}`, or pass --force."
        )


def _find_undelivered(root: Path, run_ids: Sequence[str]) -> dict[str, list[str]]:
    """What waits in journals of these runs, wherever they lie: run -> what and for whom."""
    found: dict[str, list[str]] = {}
    for folder in find_folders(root):
        manifest = folder.read_manifest()
        if manifest is None or manifest.run_id not in run_ids:
            continue
        what = [
            f"{format_count(lane.waiting, 'record')} waiting for {lane.backend}"
            + (f" ({lane.reason})" if lane.reason else "")
            for lane in count_waiting(folder, manifest)
            if lane.waiting or lane.state == "pending"
        ]
        if folder.is_written(manifest):
            what.append(f"process {manifest.process.pid} still has it open")
        if what:
            found.setdefault(manifest.run_id, []).extend(what)
    return found


def _print_trash(usages: Sequence[RunUsage], where: str, as_json: bool) -> None:
    if as_json:
        print_json([usage.to_dict() for usage in usages])
    elif not usages:
        click.echo(f"The trash of {where} is empty.")
    else:
        print_usages(usages)
        total = format_bytes(sum(usage.total_bytes for usage in usages))
        click.echo(f"{format_count(len(usages), 'run')} in the trash: {total}.")


def _storage_words(storage_dir: Path | None) -> str:
    return "" if storage_dir is None else f" -d {shlex.quote(str(storage_dir))}"
