"""`quark edit`: what is said of a run, while it trains or after its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quark.cli.completion import RUN, complete_groups, complete_tags
from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    find_run,
    open_store,
    print_json,
    usage_mistakes,
)
from quark_core.config.arguments import resolve_storage_dir
from quark_core.system.terminal_text import clean_line


@click.command()
@takes_options
def edit(
    *,
    run: str = RUN,
    storage_dir: Path | None = STORAGE_DIR,
    name: str | None = option('New name; "" removes it.'),
    notes: str | None = option('New notes; "" removes them.'),
    tag: tuple[str, ...] = option("Tag to add. Repeatable.", "-t", shell_complete=complete_tags),
    untag: tuple[str, ...] = option("Tag to remove. Repeatable.", shell_complete=complete_tags),
    group: tuple[str, ...] = option(
        "Group to add the run to. Repeatable.", "-g", metavar="PATH", shell_complete=complete_groups
    ),
    ungroup: tuple[str, ...] = option(
        "Group to remove the run from. Repeatable.", metavar="PATH", shell_complete=complete_groups
    ),
    field: tuple[str, ...] = option(
        "Custom field to set; the value is JSON or else text. Repeatable.", metavar="NAME=VALUE"
    ),
    unfield: tuple[str, ...] = option("Custom field to remove. Repeatable.", metavar="NAME"),
    archived: bool | None = option(
        "Hide the run in lists, or show it again.", "--archive/--unarchive", default=None
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Edit a run's name, notes, tags and groups, or archive it.

    RUN is a run ID, unique prefix or name. Each change is recorded as an event of
    the run, with the user and the previous value. An archived run keeps its data:
    `quark runs --archived` lists it, and `quark rm` removes a run. On a Quark
    server, the key in QUARK_USER_KEY needs the scopes read and write.
    """
    from quark_core.runs.run_editing import edit_run

    if {name, notes, archived} == {None} and not any((tag, untag, group, ungroup, field, unfield)):
        raise click.UsageError(
            "Nothing to change. Pass --name, --notes, --tag, --untag, --group, --ungroup, --field, "
            "--unfield, --archive or --unarchive."
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
            raise click.UsageError(f"--field {text[:60]!r} is not NAME=VALUE.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
