"""`quark mirror`: what the mirrors of a run have, whether it is all, and filling one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.analyze import FAILED_CHECK
from quark.cli.command_groups import SuggestingGroup
from quark.cli.completion import RUN
from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    find_run,
    open_store,
    print_json,
)
from quark.cli.texts import FOLD, RIGHT, WHOLE, Console, Text, make_progress, make_table
from quark_core.backends.contract import Backend, Capability, SupportsRead
from quark_core.backends.registry import check_capabilities, default_registry
from quark_core.config.arguments import resolve_storage_dir
from quark_core.config.redaction import redact_text
from quark_core.delivery.sync import sync_folder
from quark_core.errors import BackendError, SessionStoreError
from quark_core.formatting import format_count
from quark_core.runs.backend_choice import choose_backend, find_chosen, find_local_path, open_lane
from quark_core.runs.run_ids import name_store, shorten_run_id

if TYPE_CHECKING:
    from rich.table import Table

    from quark.mirrors import Comparison, MirrorState, Replay
    from quark_core.backends.contract import SupportsPrimary, SupportsRead
    from quark_core.backends.run_summary import StoredRun
    from quark_core.runs.backend_choice import BackendChoice

_STYLES = {"delivered": "green", "delivering": "cyan", "waiting": "yellow", "begun": "yellow"}
_SHOWN = 20


@click.group(cls=SuggestingGroup)
def mirror() -> None:
    """Show, verify or fill the mirrors of a run."""


@mirror.command()
@takes_options
def status(
    *, run: str = RUN, storage_dir: Path | None = STORAGE_DIR, as_json: bool = AS_JSON
) -> None:
    """Show the delivery state of each backend of RUN.

    RUN is a run ID, unique prefix or name. The table counts the records that were
    delivered, are waiting, were rejected, or are unknown.

    \b
    Exit codes:
      0    everything is delivered
      1    the run or the store cannot be read
      2    usage error
      3    records are waiting, rejected, unknown, or were never sent
    """  # noqa: D301 - click wants the character
    from quark.mirrors import find_sent, load_generations, note_outputs, survey_mirrors

    store = open_store(storage_dir)
    stored = find_run(store, run)
    states = survey_mirrors(*_place(store, stored, storage_dir))
    if any(not state.primary for state in states):
        generations = load_generations(store, str(stored.run.id))
        note_outputs(states, generations, find_sent(*_place(store, stored, storage_dir)))
    if as_json:
        print_json([state.to_dict() for state in states])
    elif not states:
        click.echo(
            f"Run {shorten_run_id(str(stored.run.id))} of {name_store(store)} has no mirrors and "
            "no waiting records."
        )
    else:
        _print(_make_status_table(states))
    if any(s.waiting or s.quarantined or s.unknown or s.unsent for s in states):
        sys.exit(FAILED_CHECK)


@mirror.command()
@takes_options
def verify(
    *,
    run: str = RUN,
    others: tuple[str, ...] = option(
        "Backend (name or URI) to compare with, instead of the run's mirrors.",
        "--with",
        metavar="BACKEND",
    ),
    all_kinds: bool = option("Count kinds that a mirror does not store as missing."),
    storage_dir: Path | None = STORAGE_DIR,
    as_json: bool = AS_JSON,
) -> None:
    """Compare the record counts of RUN and its mirrors.

    RUN is a run ID, unique prefix or name. Counts by metric and by kind of record,
    in the primary store and in each mirror.

    \b
    Exit codes:
      0    the counts are equal
      1    the run or the store cannot be read, or no mirror could be compared
      2    usage error
      3    the counts differ
    """  # noqa: D301 - click wants the character
    from quark.mirrors import count_records, find_sent, survey_mirrors

    store = open_store(storage_dir)
    stored = find_run(store, run)
    places = others or tuple(
        state.specification
        for state in survey_mirrors(*_place(store, stored, storage_dir))
        if not state.primary
    )
    counts = count_records(store, str(stored.run.id))
    sent = find_sent(*_place(store, stored, storage_dir))
    root = resolve_storage_dir(storage_dir)
    found = [
        _compare(counts, place, stored, root, sent.get(place, set()), asked=bool(others))
        for place in places
    ]
    if as_json:
        print_json([comparison.to_dict() for comparison in found])
    elif not found:
        short = shorten_run_id(str(stored.run.id))
        click.echo(f"quark: run {short} has no mirror. Pass one, as in --with csv:./out.", err=True)
    else:
        for comparison in found:
            _print_comparison(comparison)
    compared = [each for each in found if each.refusal is None]
    different = any(not each.equal or (all_kinds and each.not_kept) for each in compared)
    if different or not compared:
        sys.exit(FAILED_CHECK if different else 1)


@mirror.command()
@takes_options
def replay(
    *,
    run: str = RUN,
    places: tuple[str, ...] = option(
        "Backend (name or URI) to send to. It may be a new mirror.", "--to", metavar="BACKEND"
    ),
    storage_dir: Path | None = STORAGE_DIR,
    as_json: bool = AS_JSON,
) -> None:
    """Send missing records of RUN from the store to its mirrors.

    RUN is a run ID, unique prefix or name. If a mirror cannot detect duplicates, it
    is filled only if it has no records of the run.

    \b
    Exit codes:
      0    the mirrors have all records
      1    records were rejected, or are missing afterwards
      2    usage error
    """  # noqa: D301 - click wants the character
    from quark.mirrors import find_journals, survey_mirrors

    root = resolve_storage_dir(storage_dir)
    store = open_store(storage_dir)
    stored = find_run(store, run)
    run_id = str(stored.run.id)
    if stored.state != "running":
        # What waits in journals comes first, or the order of things would be another one.
        for folder, manifest in find_journals(root, run_id):
            sync_folder(folder, manifest, open_lane)
    states = [
        state for state in survey_mirrors(*_place(store, stored, storage_dir)) if not state.primary
    ]
    wanted = places or tuple(state.specification for state in states)
    if not wanted:
        raise click.UsageError(
            f"run {shorten_run_id(run_id)} has no mirror. Pass one, as in --to csv:./out."
        )
    done = [
        _replay(store, stored, _choose(place, root, asked=bool(places)), place, states, root)
        for place in wanted
    ]
    if as_json:
        print_json([each.to_dict() for each in done])
    else:
        for each in done:
            _print_replay(each, run_id)
    if any(each.refused or each.unseen for each in done):
        sys.exit(1)


def _place(
    store: SupportsPrimary, stored: StoredRun, storage_dir: Path | None
) -> tuple[Path, Path, str]:
    root, run_id = resolve_storage_dir(storage_dir), str(stored.run.id)
    return root, find_local_path(store, root, run_id), run_id


def _choose(place: str, root: Path, *, asked: bool) -> BackendChoice:
    """The backend that was asked for, or that the run's folder names and this user has chosen.

    Raises:
        BackendUnavailable: This user has not.
        UnknownBackendError: Nothing installed answers to it.
    """
    if asked:
        return choose_backend(place, default_registry())
    return find_chosen(place, root, default_registry())[0]


def _compare(
    counts: Any, place: str, stored: StoredRun, root: Path, sent: set[str], *, asked: bool
) -> Comparison:
    from quark.mirrors import Comparison, compare_counts

    try:
        with _open_mirror(_choose(place, root, asked=asked), stored, root) as reader:
            if reader is None:
                return Comparison(backend=place, refusal="this backend cannot be read")
            return compare_counts(counts, reader, str(stored.run.id), place, sent)
    except (BackendError, SessionStoreError) as error:
        return Comparison(backend=place, refusal=str(error))


@contextmanager
def _open_mirror(
    choice: BackendChoice, stored: StoredRun, root: Path
) -> Iterator[SupportsRead | None]:
    """A mirror opened for reading; None where it cannot be read."""
    definition = choice.definition
    if Capability.READ not in definition.capabilities:
        yield None
        return
    config = replace(choice.configure(root, project=stored.project.name), read_only=True)
    opened: Backend = check_capabilities(definition, definition.open(config))
    assert isinstance(opened, SupportsRead)
    try:
        yield opened
    finally:
        opened.close()


def _replay(
    store: SupportsPrimary,
    stored: StoredRun,
    choice: BackendChoice,
    place: str,
    states: list[MirrorState],
    root: Path,
) -> Replay:
    from quark.mirrors import replay_run

    named = (place, redact_text(place))
    known = next((s for s in states if s.specification in named or s.backend == place), None)
    with make_progress("{task.completed}") as progress:
        task = progress.add_task(f"records to {redact_text(place)}", total=None)
        return replay_run(
            store,
            stored,
            choice,
            known,
            root,
            on_progress=lambda count: progress.advance(task, count),
        )


def _make_status_table(states: list[MirrorState]) -> Table:

    counted = ("batches", "waiting", "rejected", "unknown")
    backend = FOLD | {"style": "bold"}
    table = make_table({"backend": backend, "state": WHOLE, counted: RIGHT, "why": FOLD})
    for state in states:
        why = [*state.reasons]
        why += [f"{count} rejected: {reason}" for reason, count in state.quarantined.items()]
        why += ["a replay was interrupted"] if state.state == "begun" else []
        if state.unsent:
            lacks = ", ".join(f"{count} {kind}" for kind, count in state.unsent.items())
            why.append(f"never sent: {lacks}")
        counts = (state.waiting, sum(state.quarantined.values()), state.unknown)
        role = " (primary)" if state.primary else ""
        table.add_row(
            Text.assemble(state.specification, (role, "dim")),
            Text(state.state, style=_STYLES.get(state.state, "")),
            str(state.batches),
            *(Text(str(count), style="yellow" if count else "dim") for count in counts),
            Text("; ".join(dict.fromkeys(why))),
        )
    return table


def _print_comparison(comparison: Comparison) -> None:

    name = (comparison.backend, "bold")
    if comparison.refusal is not None:
        _print(Text.assemble(name, ": not compared: ", (comparison.refusal, "yellow")))
        return
    left_out = ""
    if comparison.not_kept:
        left_out = f"; it does not store {', '.join(comparison.not_kept)}"
    if comparison.equal:
        told = f": equal, {format_count(comparison.compared, 'record')}{left_out}"
        _print(Text.assemble(name, (told, "green")))
        return
    _print(Text.assemble(name, (": differs", "red"), left_out))
    figures = ("primary", "mirror", "difference")
    table = make_table({"": {"style": "dim"}, "name": FOLD, figures: RIGHT})
    rows = [("kind", kind, pair) for kind, pair in comparison.kinds.items()]
    rows += [("metric", key, pair) for key, pair in comparison.metrics.items()]
    for what, key, (has, got) in rows[:_SHOWN]:
        table.add_row(what, Text(key), str(has), str(got), f"{got - has:+d}")
    _print(table)
    if len(rows) > _SHOWN:
        click.echo(f"  and {len(rows) - _SHOWN} more; --json prints all")


def _print_replay(replay: Replay, run_id: str) -> None:

    parts = [f"{format_count(replay.sent, 'record')} sent"]
    parts += [f"{replay.present} already present"] if replay.present else []
    _print(Text.assemble((replay.backend, "bold"), f": {', '.join(parts)}"))
    for reason, count in replay.refused.items():
        _print(Text(f"  {count} rejected: {reason}", style="yellow"))
    if replay.unseen:
        told = (
            f"  {replay.unseen} of them are still missing, although the mirror has a note of them. "
            "Delete the run there, or replay to another place."
        )
        _print(Text(told, style="yellow"))
    click.echo(f"  To compare: quark mirror verify {run_id} --with {replay.backend}")


def _print(what: Any) -> None:

    Console().print(what, soft_wrap=False)
