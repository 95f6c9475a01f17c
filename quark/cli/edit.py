"""`quark edit`: what is said of a run, while it trains or after its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quark.cli.command_groups import LongInHelp
from quark.cli.completion import complete_groups, complete_runs, complete_tags
from quark.cli.store_access import (
    find_run,
    json_option,
    open_store,
    print_json,
    storage_option,
    usage_mistakes,
)
from quark_core.config.arguments import resolve_storage_dir
from quark_core.system.terminal_text import clean_line


@click.command()
@click.argument("run", shell_complete=complete_runs)
@storage_option
@click.option("--name", help='The new name; "" takes it away.')
@click.option("--notes", help='The new notes; "" takes them away.')
@click.option(
    "-t",
    "--tag",
    multiple=True,
    shell_complete=complete_tags,
    help="Add this tag; repeat for several.",
)
@click.option(
    "--untag",
    multiple=True,
    shell_complete=complete_tags,
    help="Remove this tag; repeat for several.",
)
@click.option(
    "-g",
    "--group",
    metavar="PATH",
    multiple=True,
    shell_complete=complete_groups,
    help="Put it into this group; repeat for several.",
)
@click.option(
    "--ungroup",
    metavar="PATH",
    multiple=True,
    shell_complete=complete_groups,
    help="Take it out of this group; repeat for several.",
)
@click.option(
    "-f",
    "--field",
    cls=LongInHelp,
    metavar="NAME=VALUE",
    multiple=True,
    help="Note this field; the value is read as JSON, else as text. Repeat for several.",
)
@click.option(
    "--unfield",
    metavar="NAME",
    multiple=True,
    help="Take this field away; repeat for several.",
)
@click.option(
    "--archive/--restore",
    "archived",
    default=None,
    help="Leave the run out of lists that do not ask for archived runs, or take it back.",
)
@json_option
def edit(
    run: str,
    storage_dir: Path | None,
    name: str | None,
    notes: str | None,
    tag: tuple[str, ...],
    untag: tuple[str, ...],
    group: tuple[str, ...],
    ungroup: tuple[str, ...],
    field: tuple[str, ...],
    unfield: tuple[str, ...],
    archived: bool | None,
    as_json: bool,
) -> None:
    """Change what is said of RUN (its ID, unique prefix or name).

    Who changed what, and what was before, is among the run's events. An archived run
    keeps everything (`quark rm` is what removes one): `quark runs --archived` lists it.
    With QUARK_PERSISTENCE_URL the key in QUARK_USER_KEY needs the scopes read and write.
    """
    from quark_core.runs.run_editing import edit_run

    if {name, notes, archived} == {None} and not any((tag, untag, group, ungroup, field, unfield)):
        raise click.UsageError(
            "nothing to change: give --name, --notes, --tag, --untag, --group, --ungroup, --field, "
            "--unfield, --archive or --restore"
        )
    fields = _read_fields(field)
    store = open_store(storage_dir)
    run_id = str(find_run(store, run).run.id)
    with usage_mistakes():
        record = edit_run(
            run_id,
            name=name,
            notes=notes,
            add_tags=tag,
            remove_tags=untag,
            archived=archived,
            add_groups=group,
            remove_groups=ungroup,
            fields=fields,
            remove_fields=unfield,
            storage_dir=resolve_storage_dir(storage_dir),
        )
    if as_json:
        print_json(record.to_dict())
        return

    changed = ", ".join([*fields, *(f"{name} removed" for name in unfield)])
    for label, value in (
        ("name", record.name),
        ("notes", record.notes),
        ("tags", ", ".join(record.tags)),
        ("groups", ", ".join(record.groups)),
        ("archived", record.archived_at),
        *([("fields", changed)] if changed else []),
    ):
        click.echo(clean_line(f"{label:<9} {value or '-'}"))


def _read_fields(given: tuple[str, ...]) -> dict[str, Any]:
    """Names and values of `NAME=VALUE`; a value that is no JSON is a text."""
    fields: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--field must be NAME=VALUE, got {text[:60]!r}")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
