"""`quark rm`, `quark restore` and `quark gc`: away with runs, by way of a trash."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.store_access import json_option, open_store, print_json, storage_option
from quark.cli.usage import describe_bytes, measure, print_usages, shorten_ids
from quark_core.errors import InvalidRunStateError, RunNotFoundError
from quark_core.run_arguments import resolve_storage_dir

if TYPE_CHECKING:
    from quark_core.keeping import Collection, RunUsage, SupportsRemoval

__all__ = ["gc", "restore", "rm"]

_DAY_S = 86_400.0
_SHOWN_IDS = 10
_SHOWN_RUNS = 20

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@click.command()
@click.argument("runs", nargs=-1, metavar="RUN...")
@storage_option
@yes_option
@click.option("--force", is_flag=True, help="Also with records that are not delivered yet.")
@click.option("--list", "list_only", is_flag=True, help="Only show what is in the trash.")
@json_option
def rm(
    runs: tuple[str, ...],
    storage_dir: Path | None,
    yes: bool,
    force: bool,
    list_only: bool,
    as_json: bool,
) -> None:
    """Put RUNs (ids, beginnings of ids, names) into the trash.

    They vanish from every list; `quark restore` puts them back, `quark gc`
    frees their space. What a mirror has of them (MLflow, csv:DIR) stays.
    """
    store = open_store(storage_dir)
    trash = measure(store)
    if list_only:
        _print_trash(trash.list_trash(), as_json)
        return
    if not runs:
        raise click.UsageError("name at least one RUN, or give --list")
    known = {str(stored.run.id): stored.run.name for stored in store.list_runs()}
    in_trash = {usage.run_id: usage.name for usage in trash.list_trash()}
    chosen = _choose(runs, known, in_trash)
    usages = trash.measure_runs(chosen)
    _refuse_living(usages)
    root = resolve_storage_dir(storage_dir)
    if not force:
        _refuse_undelivered(root, chosen)
    total_bytes = sum(usage.total_bytes for usage in usages)
    if not as_json:
        print_usages(usages, limit=_SHOWN_RUNS)
    if not yes:
        question = f"Put {_count(len(usages))} into the trash ({describe_bytes(total_bytes)})?"
        click.confirm(question, abort=True, err=as_json)
    with _open_for_removal(root) as removal:
        removal.trash_runs(chosen)
    if as_json:
        print_json({"trashed": [u.to_dict() for u in usages], "total_bytes": total_bytes})
        return
    ids = shorten_ids(chosen, [*known, *in_trash])
    shown = " ".join(ids) if len(ids) <= _SHOWN_IDS else "RUN... (`quark rm --list` lists them)"
    click.echo(f"{_count(len(usages))} in the trash: {describe_bytes(total_bytes)}.")
    click.echo(f"Put back with: quark restore{_storage_words(storage_dir)} {shown}")
    click.echo(f"Free the space with: quark gc{_storage_words(storage_dir)}")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@storage_option
@json_option
def restore(runs: tuple[str, ...], storage_dir: Path | None, as_json: bool) -> None:
    """Put RUNs (ids, beginnings of ids, names) back out of the trash."""
    in_trash = {u.run_id: u.name for u in measure(open_store(storage_dir)).list_trash()}
    chosen = _choose(runs, in_trash, None)
    with _open_for_removal(resolve_storage_dir(storage_dir)) as removal:
        removal.restore_runs(chosen)
    if as_json:
        print_json({"restored": chosen})
        return
    for run_id in chosen:
        click.echo(f"{run_id} is back.")


@click.command()
@storage_option
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="DAYS",
    help="Only what has been in the trash for so long.",
)
@yes_option
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc(
    storage_dir: Path | None, older_than: float, yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove what is in the trash for good, and give its space back to the disk.

    Works in small steps, beside trainings that write. May be broken off at
    any moment; the next call goes on.
    """
    older_than_s = older_than * _DAY_S
    plan = measure(open_store(storage_dir)).collect_trash(older_than_s=older_than_s, dry_run=True)
    if dry_run:
        if as_json:
            print_json(plan.to_dict())
        else:
            _print_plan(plan)
        return
    if not as_json:
        _print_plan(plan)
    if plan.runs and not yes:
        total = describe_bytes(sum(usage.total_bytes for usage in plan.runs))
        question = f"Remove {_count(len(plan.runs))} ({total}) for good?"
        click.confirm(question, abort=True, err=as_json)
    with _open_for_removal(resolve_storage_dir(storage_dir)) as removal:
        try:
            done = _collect(removal, older_than_s)
        except KeyboardInterrupt:
            click.echo("Broken off. The store is whole; `quark gc` goes on from here.", err=True)
            sys.exit(130)
    if as_json:
        print_json(done.to_dict())
        return
    click.echo(
        f"{_count(len(done.runs))} removed. The store took {describe_bytes(done.before_bytes)} "
        f"and takes {describe_bytes(done.after_bytes)}: "
        f"{describe_bytes(done.freed_bytes)} are free again."
    )
    for note in done.notes:
        click.echo(note)


def _collect(removal: SupportsRemoval, older_than_s: float) -> Collection:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    # Where nothing can be redrawn, a bar would only leave an empty line.
    shown = console.is_interactive
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(what: str, done_bytes: int, total_bytes: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done_bytes, total=total_bytes)

        return removal.collect_trash(older_than_s=older_than_s, on_progress=show)


@contextmanager
def _open_for_removal(root: Path) -> Iterator[SupportsRemoval]:
    """The store, to be changed; it must have been found to be there."""
    from quark_core.composition import open_primary, plan_backends
    from quark_core.ranks import RankInfo

    choice = plan_backends((), RankInfo()).primary
    assert choice is not None
    primary = open_primary(choice, choice.configure(root))
    try:
        yield measure(primary)
    finally:
        primary.close()


def _choose(
    texts: Sequence[str], known: Mapping[str, str | None], in_trash: Mapping[str, str | None] | None
) -> list[str]:
    """The ids of runs that are given by id, by the beginning of it, or by name; each once.

    Args:
        texts: What was given.
        known: Names of the runs that it may be, by id.
        in_trash: Names of the runs in the trash; None where `known` is these.
    """
    chosen = []
    for text in texts:
        found = _find(text, known)
        if not found and in_trash is not None and (trashed := _find(text, in_trash)):
            raise RunNotFoundError(
                f"{text!r} is in the trash already ({', '.join(trashed[:5])}): `quark restore` "
                "puts it back, `quark gc` frees its space"
            )
        if not found and in_trash is not None:
            raise RunNotFoundError(f"no run begins with {text!r}; `quark runs` lists them")
        if not found:
            raise RunNotFoundError(
                f"no run in the trash begins with {text!r}; `quark rm --list` lists them"
            )
        if len(found) > 1:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise RunNotFoundError(
                f"{text!r} fits {len(found)} runs: {', '.join(found[:5])}{more}; give more of it"
            )
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def _find(text: str, known: Mapping[str, str | None]) -> list[str]:
    found = [run_id for run_id, name in known.items() if text in (run_id, name)]
    # An empty text is the beginning of every id, and surely not what was meant.
    return found or [run_id for run_id in known if text and run_id.startswith(text)]


def _refuse_living(usages: Sequence[RunUsage]) -> None:
    alive = [usage.run_id for usage in usages if usage.state == "running"]
    if alive:
        verb = "are" if len(alive) > 1 else "is"
        raise InvalidRunStateError(
            f"{', '.join(alive)} {verb} still running, so nothing was removed: stop the training "
            "(Ctrl-C ends its run too), or wait until it is over"
        )


def _refuse_undelivered(root: Path, run_ids: Sequence[str]) -> None:
    found = _find_undelivered(root, run_ids)
    if found:
        lines = "; ".join(f"{run_id}: {', '.join(what)}" for run_id, what in found.items())
        raise InvalidRunStateError(
            f"not all that was logged has been delivered, so nothing was removed ({lines}). "
            f"Deliver it with `quark sync {root}`, or remove it as well with --force"
        )


def _find_undelivered(root: Path, run_ids: Sequence[str]) -> dict[str, list[str]]:
    """What waits in journals of these runs, wherever they lie: run -> what and for whom."""
    from quark_core.delivery.journal_folder import find_folders
    from quark_core.delivery.sync import count_waiting

    found: dict[str, list[str]] = {}
    for folder in find_folders(root):
        manifest = folder.read_manifest()
        if manifest is None or manifest.run_id not in run_ids:
            continue
        what = [
            f"{lane.waiting} records wait for {lane.backend}"
            + (f" ({lane.reason})" if lane.reason else "")
            for lane in count_waiting(folder, manifest)
            if lane.waiting or lane.state == "pending"
        ]
        if folder.is_written(manifest):
            what.append(f"process {manifest.process.pid} still has it open")
        if what:
            found.setdefault(manifest.run_id, []).extend(what)
    return found


def _print_trash(usages: Sequence[RunUsage], as_json: bool) -> None:
    if as_json:
        print_json([usage.to_dict() for usage in usages])
    elif not usages:
        click.echo("The trash is empty.")
    else:
        print_usages(usages)
        total = describe_bytes(sum(usage.total_bytes for usage in usages))
        click.echo(f"{_count(len(usages))} in the trash: {total}.")


def _print_plan(plan: Collection) -> None:
    if plan.runs:
        print_usages(plan.runs, limit=_SHOWN_RUNS)
    else:
        click.echo("No run in the trash is to be removed.")
    for run_id, reason in plan.skipped.items():
        click.echo(f"{run_id} stays: {reason}.")
    for path, size_bytes in plan.leftovers.items():
        click.echo(f"left over: {path} ({describe_bytes(size_bytes)})")


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _storage_words(storage_dir: Path | None) -> str:
    import shlex

    return "" if storage_dir is None else f" -d {shlex.quote(str(storage_dir))}"
