"""`quark artifacts`: what a run has stored beside its numbers, listed or copied out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from quark.cli.artifact_versions import alias, get, lineage, versions
from quark.cli.command_groups import LongInHelp
from quark.cli.completion import complete_runs
from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import (
    count_things,
    json_option,
    print_json,
    storage_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from quark_core.records import ArtifactRecord
    from quark_core.writers.artifact_reading import ArtifactReading

_LIST = "list"


class _Artifacts(click.Group):
    """A group of which `list` need not be said: `quark artifacts RUN` is as it was."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        said = args[0] if args else None
        if said not in self.commands and said not in ctx.help_option_names:
            args = [_LIST, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Artifacts, subcommand_metavar="RUN [KEY] | COMMAND [ARGS]...")
def artifacts() -> None:
    """List the artifacts of RUN, or see to their versions.

    `quark artifacts RUN` is `quark artifacts list RUN`; a run that is called as one of the
    commands needs the `list`.
    """


@artifacts.command(_LIST)
@click.argument("run", shell_complete=complete_runs)
@click.argument("key", required=False)
@click.option("-t", "--type", "artifact_type", cls=LongInHelp, help="Only artifacts of this type.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Copy the payloads into this directory, by type and key.",
)
@storage_option
@backend_option
@json_option
def list_artifacts(
    run: str,
    key: str | None,
    artifact_type: str | None,
    output: Path | None,
    storage_dir: Path | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """List the artifacts of RUN (its ID, unique prefix or name).

    With KEY only those under that key. With --output their payloads are copied
    out, each checked against its SHA-256; a file that exists is left alone.
    """
    from rich.filesize import decimal

    from quark.cli.texts import Console
    from quark_core.records.names import ARTIFACT_STORAGE_LAYOUT
    from quark_core.runs.artifact_versions import HIDDEN_TYPES
    from quark_core.writers.artifact_reading import ArtifactReading

    source = RunSource(storage_dir, backend)
    reader = source.open(run)
    store = ArtifactReading(reader)
    found = store.read(artifact_key=key, artifact_type=artifact_type)
    if artifact_type is None and key is None and output is None:
        # Parts of others, which their type shows.
        found = tuple(record for record in found if record.artifact_type not in HIDDEN_TYPES)
    if as_json:
        print_json([record.to_dict() for record in found])
    elif not found:
        what = "artifacts that fit" if key or artifact_type else "artifacts"
        click.echo(f"Run {reader.run_id} of {source.store} has no {what}.")
        if backend is not None:
            click.echo("A mirror may have files without records; MLflow has both with quark=full.")
    elif output is None:
        Console().print(make_artifact_table(found))
        total = sum({record.sha256: record.size_bytes for record in found}.values())
        counted = count_things(len(found), "artifact")
        click.echo(f"{counted}, {decimal(total)}; --output DIR copies them out.")
        if isinstance(reader.context.run_path, Path):
            click.echo(f"They lie in {reader.context.run_path / ARTIFACT_STORAGE_LAYOUT['root']}")
        else:
            click.echo(f"They lie with {reader.context.run_path}")
    if output is not None:
        _copy(store, found, output)


for _command in (versions, get, lineage, alias):
    artifacts.add_command(_command)


def make_artifact_table(records: Sequence[ArtifactRecord]) -> Table:
    """Artifacts as a table for the terminal."""
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    from quark.cli.texts import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("artifact", overflow="fold")
    table.add_column("type", overflow="fold")
    counters = [
        name for name in ("step", "epoch") if any(getattr(r, name) is not None for r in records)
    ]
    for header in (*counters, "size"):
        table.add_column(header, justify="right", no_wrap=True)
    for record in records:
        size = Text(decimal(record.size_bytes))
        if record.payload_relative_path is None:
            size.append(" not kept", style="red")
        counts = [getattr(record, name) for name in counters]
        table.add_row(
            Text(record.artifact_key),
            Text(record.artifact_type),
            *["" if count is None else str(count) for count in counts],
            size,
        )
    return table


def _copy(store: ArtifactReading, records: Sequence[ArtifactRecord], output: Path) -> None:
    from shutil import copyfileobj

    from quark_core.artifacts.payload_folder import OutputFolder
    from quark_core.errors import SessionStoreError

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
                        click.echo(f"{target} exists and is left alone", err=True)
                    continue
            with store.open(record) as source, folder.write(parts) as file:
                copyfileobj(source, file, 1024 * 1024)
        except (SessionStoreError, OSError) as error:
            failed += 1
            click.echo(f"quark: {target}: {error}", err=True)
        else:
            copied += 1
    click.echo(f"{copied} of {len(records)} payloads are in {output}", err=True)
    if failed:
        raise SystemExit(1)


def _place(record: ArtifactRecord) -> tuple[str, ...]:
    """Folders and name of a payload; made of a record, which anybody may have written."""
    from quark_core.artifacts.payload_folder import make_file_name

    name = (record.payload_relative_path or str(record.id)).rpartition("/")[2]
    key = record.artifact_key.split("/")
    return tuple(make_file_name(part) for part in (record.artifact_type, *key, name))


def _holds(file: IO[bytes], record: ArtifactRecord) -> bool:
    """Whether a file is the payload already."""
    import hashlib

    file.seek(0, 2)
    if file.tell() != record.size_bytes:
        return False
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest() == record.sha256  # type: ignore[arg-type]
