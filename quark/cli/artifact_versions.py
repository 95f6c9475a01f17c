"""`quark artifacts versions, get, lineage, alias`: versions over the runs of a project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import json_option, print_json, storage_option
from quark_core.errors import ArtifactNotFoundError, QuarkError, RunNotFoundError
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quark_core.runs.artifact_versions import ArtifactVersion

_MOST_PROJECTS = 10
_MOST_NAMES = 10


def project_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --project to a command."""
    return click.option(
        "-p", "--project", help="Of this project; needed where the store has several."
    )(command)


@click.command()
@click.argument("name", required=False)
@project_option
@storage_option
@backend_option
@json_option
def versions(
    name: str | None,
    project: str | None,
    storage_dir: Path | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """List the versions of a project's artifacts, or those of NAME: numbers, aliases, users."""
    from quark_core.runs.artifact_versions import list_versions

    source = RunSource(storage_dir, backend)
    chosen = choose_project(source, project)
    found = list_versions(source.reader, chosen, name)
    if not found:
        source.check_project(project, "--project")
        if name is not None:
            raise ArtifactNotFoundError(_tell_missing(source, project, name))
    if as_json:
        print_json([version.to_dict() for version in found])
    elif not found:
        click.echo(clean_line(f"There is no artifact of project {chosen!r} in {source.store}."))
    else:
        _print_versions(found)


@click.command()
@click.argument("name")
@project_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Into this directory [default: the working directory].",
)
@storage_option
@backend_option
def get(
    name: str, project: str | None, output: Path, storage_dir: Path | None, backend: str | None
) -> None:
    """Copy an artifact out: NAME is model:best, model:v3, or model for the newest.

    Each payload is checked against its SHA-256; nothing that exists is replaced.
    """
    from quark_core.writers.artifact_links import copy_version

    source = RunSource(storage_dir, backend)
    version = find(source, name, project)
    run = source.open(str(version.record.run_id))
    try:
        place = copy_version(run, version.record, output)
    except OSError as error:
        raise click.ClickException(f"{version.name}: {error}") from error
    click.echo(f"{version.name} is in {place}")


@click.command()
@click.argument("what")
@project_option
@storage_option
@backend_option
@json_option
def lineage(
    what: str,
    project: str | None,
    storage_dir: Path | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """Say where artifacts come from and go: WHAT is a run, or a version such as model:best."""
    from quark_core.runs.artifact_versions import list_lineage

    source = RunSource(storage_dir, backend)
    try:
        run_id = None if ":" in what else str(source.find(what).run.id)
    except RunNotFoundError:
        run_id = None
    if run_id is None:
        version = find(source, what, project)
        if as_json:
            print_json(version.to_dict())
        else:
            _print_versions([version])
        return
    found = list_lineage(source.reader, run_id)
    if as_json:
        print_json(
            {
                "made": [version.to_dict() for version in found.made],
                "used": [version.to_dict() for version in found.used],
                "gone": list(found.gone),
            }
        )
        return
    for title, listed in (("Used by this run", found.used), ("Made by this run", found.made)):
        click.echo(f"{title}:{'' if listed else ' nothing'}")
        if listed:
            _print_versions(listed)
    for gone in found.gone:
        click.echo(f"used, and no longer there: {gone}")


@click.command()
@click.argument("name")
@click.argument("alias")
@click.option("--remove", is_flag=True, help="Take the alias away.")
@project_option
@storage_option
def alias(
    name: str, alias: str, remove: bool, project: str | None, storage_dir: Path | None
) -> None:
    """Let ALIAS name a version from now on: NAME is model:v3, or any other name of it.

    Who did, and when, is an event of the run that has made it. With QUARK_PERSISTENCE_URL
    the key in QUARK_USER_KEY needs the scopes read and write.
    """
    from quark_core.backends.edits import AliasEdit, RunEdit, check_edit
    from quark_core.config.arguments import resolve_storage_dir
    from quark_core.runs.run_editing import find_user, open_editor

    source = RunSource(storage_dir, None)
    version = find(source, name, project)
    record = version.record
    edit = AliasEdit(
        artifact_key=record.artifact_key,
        artifact_id=record.id,
        sha256=record.sha256,
        version=version.number,
        alias=alias,
        removed=remove,
    )
    run_id = str(record.run_id)
    checked = check_edit(RunEdit(alias=edit))
    with open_editor(resolve_storage_dir(storage_dir), run_id, "aliases") as editor:
        editor.edit_run(run_id, checked, by=find_user())
    click.echo(f"{alias} {'no longer names' if remove else 'names'} {version.name}")


def find(source: RunSource, name: str, project: str | None) -> ArtifactVersion:
    """The version that is named on the command line.

    Raises:
        ArtifactNotFoundError: There is none.
    """
    from quark_core.records.names import parse_artifact_name
    from quark_core.runs.artifact_versions import find_version

    return find_version(source.reader, choose_project(source, project), parse_artifact_name(name))


def _tell_missing(source: RunSource, project: str | None, name: str) -> str:
    from quark_core.records.names import decode_name
    from quark_core.runs.artifact_versions import list_versions

    versions = list_versions(source.reader, choose_project(source, project))
    known = list(dict.fromkeys(decode_name(version.key) for version in versions))
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    there = f"there are {', '.join(known[:_MOST_NAMES])}{more}" if known else "there is none at all"
    return f"NAME: there is no artifact {name!r:.200} in {source.store}; {there}"


def choose_project(source: RunSource, project: str | None) -> str:
    """The project that is asked for, or the only one that there is.

    Raises:
        QuarkError: There are several.
    """
    if project is not None:
        return project
    found = sorted({stored.project.name for stored in source.reader.list_runs()})
    if len(found) == 1:
        return found[0]
    told = ", ".join(found[:_MOST_PROJECTS])
    raise QuarkError(
        f"{source.store} has {len(found)} projects: choose one with --project ({told})"
        if found
        else f"there is no run in {source.store}"
    )


def _print_versions(found: Sequence[ArtifactVersion]) -> None:
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    from quark.cli.texts import Console, Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("version", "aliases", "type", "made by", "used by"):
        table.add_column(header, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for version in found:
        record = version.record
        table.add_row(
            Text(version.name),
            Text(", ".join(version.aliases)),
            Text(record.artifact_type),
            Text(version.run_name or str(record.run_id)),
            Text(", ".join(version.used_by)),
            Text(decimal(record.size_bytes)),
        )
    Console().print(table)
