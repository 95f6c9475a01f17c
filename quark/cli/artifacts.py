"""`quark artifacts`: what a run has stored beside its numbers, listed or copied out."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from shutil import copyfileobj
from typing import IO, TYPE_CHECKING

import click

from quark.cli.command_groups import ListingGroup
from quark.cli.completion import RUN
from quark.cli.options import FOLDER, argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    STORAGE_DIR,
    RunSource,
    print_json,
)
from quark.cli.texts import FOLD, RIGHT, Console, Text, make_table
from quark_core.artifacts.payload_folder import OutputFolder, make_file_name
from quark_core.backends.edits import AliasEdit, RunEdit, check_edit
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import ArtifactNotFoundError, QuarkError, RunNotFoundError, SessionStoreError
from quark_core.formatting import format_bytes, format_count, join_first
from quark_core.records.names import ARTIFACT_STORAGE_LAYOUT, decode_name, parse_artifact_name
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from quark_core.records import ArtifactRecord
    from quark_core.runs.artifact_versions import ArtifactVersion
    from quark_core.writers.artifact_reading import ArtifactReading

_MOST_PROJECTS = 10
_MOST_NAMES = 10


PROJECT = option("Project; required if the store has several.", "-p")


@click.command()
@takes_options
def versions(
    *,
    name: str | None = argument(),
    project: str | None = PROJECT,
    source: RunSource = SOURCE,
    as_json: bool = AS_JSON,
) -> None:
    """List the artifact versions of a project.

    With NAME, list only the versions of this artifact. The table shows each
    version's number, aliases and users.
    """
    from quark_core.runs.artifact_versions import list_versions

    chosen = choose_project(source, project)
    found = list_versions(source.reader, chosen, name)
    if not found:
        source.check_project(project, "--project")
        if name is not None:
            raise ArtifactNotFoundError(_tell_missing(source, project, name))
    if as_json:
        print_json([version.to_dict() for version in found])
    elif not found:
        click.echo(clean_line(f"No artifacts of project {chosen!r} in {source.store}."))
    else:
        _print_versions(found)


@click.command()
@takes_options
def get(
    *,
    name: str = argument(),
    project: str | None = PROJECT,
    output: Path = option(
        "Directory to copy to.",
        "-o",
        type=FOLDER,
        show_default="the working directory",
        default=Path(),
    ),
    source: RunSource = SOURCE,
) -> None:
    """Copy the files of an artifact version to a directory.

    NAME is model:best, model:v3, or model for the newest version. Each file is
    checked against its SHA-256. Existing files are kept.
    """
    from quark_core.writers.artifact_links import copy_version

    version = find(source, name, project)
    run = source.open(str(version.record.run_id))
    try:
        place = copy_version(run, version.record, output)
    except OSError as error:
        raise click.ClickException(f"{version.name}: {error}") from error
    click.echo(f"Copied {version.name} to {place}.")


@click.command()
@takes_options
def lineage(
    *,
    target: str = argument(),
    project: str | None = PROJECT,
    source: RunSource = SOURCE,
    as_json: bool = AS_JSON,
) -> None:
    """Show which runs made and used artifacts.

    TARGET is a run, or an artifact version such as model:best.
    """
    from quark_core.runs.artifact_versions import list_lineage

    try:
        run_id = None if ":" in target else str(source.find(target).run.id)
    except RunNotFoundError:
        run_id = None
    if run_id is None:
        version = find(source, target, project)
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
        click.echo(f"{title}:{'' if listed else ' none'}")
        if listed:
            _print_versions(listed)
    for gone in found.gone:
        click.echo(f"Used, but deleted: {gone}")


@click.command()
@takes_options
def alias(
    *,
    name: str = argument(),
    alias: str = argument(),
    remove: bool = option("Remove the alias."),
    project: str | None = PROJECT,
    storage_dir: Path | None = STORAGE_DIR,
) -> None:
    """Add ALIAS to an artifact version, or remove it.

    NAME is a version such as model:v3, or another alias of it. The change is
    recorded as an event of the run that made the version. On a Quark server, the
    key in QUARK_USER_KEY needs the scopes read and write.
    """
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
    click.echo(f"{'Removed' if remove else 'Set'} the alias {alias!r} of {version.name}.")


def find(source: RunSource, name: str, project: str | None) -> ArtifactVersion:
    """The version that is named on the command line.

    Raises:
        ArtifactNotFoundError: There is none.
    """
    from quark_core.runs.artifact_versions import find_version

    return find_version(source.reader, choose_project(source, project), parse_artifact_name(name))


def _tell_missing(source: RunSource, project: str | None, name: str) -> str:
    from quark_core.runs.artifact_versions import list_versions

    versions = list_versions(source.reader, choose_project(source, project))
    known = list(dict.fromkeys(decode_name(version.key) for version in versions))
    there = f" Artifacts: {join_first([*map(repr, known)], _MOST_NAMES)}." if known else ""
    return f"no artifact {name!r:.200} in {source.store}.{there}"


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
    told = ", ".join(map(repr, found[:_MOST_PROJECTS]))
    raise QuarkError(
        f"{source.store} has {len(found)} projects. Choose one with --project: {told}."
        if found
        else f"no runs in {source.store}"
    )


def _print_versions(found: Sequence[ArtifactVersion]) -> None:

    table = make_table({("version", "aliases", "type", "made by", "used by"): FOLD, "size": RIGHT})
    for version in found:
        record = version.record
        table.add_row(
            Text(version.name),
            Text(", ".join(version.aliases)),
            Text(record.artifact_type),
            Text(version.run_name or shorten_run_id(str(record.run_id))),
            Text(", ".join(map(shorten_run_id, version.used_by))),
            Text(format_bytes(record.size_bytes)),
        )
    Console().print(table)


@click.group(cls=ListingGroup, subcommand_metavar="RUN [KEY] | COMMAND [ARGS]...")
def artifacts() -> None:
    """List and copy artifacts, or manage their versions.

    `quark artifacts RUN` is short for `quark artifacts list RUN`. If a run has the
    name of a subcommand, write the long form.
    """


@artifacts.command("list")
@takes_options
def list_artifacts(
    *,
    run: str = RUN,
    key: str | None = argument(),
    artifact_type: str | None = option("Only artifacts of this type.", "--type"),
    output: Path | None = option(
        "Copy the files into this directory, by type and key.", "-o", type=FOLDER
    ),
    source: RunSource = SOURCE,
    as_json: bool = AS_JSON,
) -> None:
    """List the artifacts of RUN.

    RUN is a run ID, unique prefix or name. With KEY, list only the artifacts of
    this key. With --output, also copy their files. Each file is checked against
    its SHA-256. Existing files are kept.
    """
    from quark_core.runs.artifact_versions import HIDDEN_TYPES
    from quark_core.writers.artifact_reading import ArtifactReading

    reader = source.open(run)
    store = ArtifactReading(reader)
    found = store.read(artifact_key=key, artifact_type=artifact_type)
    if artifact_type is None and key is None and output is None:
        # Parts of others, which their type shows.
        found = tuple(record for record in found if record.artifact_type not in HIDDEN_TYPES)
    if as_json:
        print_json([record.to_dict() for record in found])
    elif not found:
        what = "matching artifacts" if key or artifact_type else "artifacts"
        click.echo(f"Run {shorten_run_id(str(reader.run_id))} of {source.store} has no {what}.")
        if source.backend is not None:
            click.echo(
                "A mirror may store files without records. MLflow stores both with quark=full."
            )
    elif output is None:
        Console().print(make_artifact_table(found))
        total = sum({record.sha256: record.size_bytes for record in found}.values())
        counted = format_count(len(found), "artifact")
        click.echo(f"{counted}, {format_bytes(total)}. To copy the files, pass --output DIR.")
        if isinstance(reader.context.run_path, Path):
            click.echo(f"Stored in {reader.context.run_path / ARTIFACT_STORAGE_LAYOUT['root']}")
        else:
            click.echo(f"Stored in {reader.context.run_path}")
    if output is not None:
        _copy(store, found, output)


for _command in (versions, get, lineage, alias):
    artifacts.add_command(_command)


def make_artifact_table(records: Sequence[ArtifactRecord]) -> Table:
    """Artifacts as a table for the terminal."""
    counters = [
        name for name in ("step", "epoch") if any(getattr(r, name) is not None for r in records)
    ]
    table = make_table({("artifact", "type"): FOLD, (*counters, "size"): RIGHT})
    for record in records:
        size = Text(format_bytes(record.size_bytes))
        if record.payload_relative_path is None:
            size.append(" not stored", style="red")
        counts = [getattr(record, name) for name in counters]
        table.add_row(
            Text(record.artifact_key),
            Text(record.artifact_type),
            *["" if count is None else str(count) for count in counts],
            size,
        )
    return table


def _copy(store: ArtifactReading, records: Sequence[ArtifactRecord], output: Path) -> None:
    folder = OutputFolder(output)
    copied = failed = 0
    for record in records:
        parts = _place(record)
        target = output.joinpath(*parts)
        try:
            with folder.open(parts) or nullcontext() as found:
                if found is not None:
                    if _holds(found, record):
                        copied += 1
                    else:
                        click.echo(f"{target} already exists and was not changed.", err=True)
                    continue
            with store.open(record) as source, folder.write(parts) as file:
                copyfileobj(source, file, 1024 * 1024)
        except (SessionStoreError, OSError) as error:
            failed += 1
            click.echo(f"quark: {target}: {error}", err=True)
        else:
            copied += 1
    click.echo(f"Copied {copied} of {format_count(len(records), 'file')} to {output}.", err=True)
    if failed:
        raise SystemExit(1)


def _place(record: ArtifactRecord) -> tuple[str, ...]:
    """Folders and name of a payload; made of a record, which anybody may have written."""
    name = (record.payload_relative_path or str(record.id)).rpartition("/")[2]
    key = record.artifact_key.split("/")
    return tuple(make_file_name(part) for part in (record.artifact_type, *key, name))


def _holds(file: IO[bytes], record: ArtifactRecord) -> bool:
    """Whether a file is the payload already."""
    file.seek(0, 2)
    if file.tell() != record.size_bytes:
        return False
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest() == record.sha256  # type: ignore[arg-type]
