"""`quark sources`: the code that a run was made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.completion import RUN, complete_runs
from quark.cli.options import FOLDER, argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    print_json,
)
from quark.cli.texts import FOLD, RIGHT, WHOLE, Console, Text, make_table
from quark_core.artifacts.payload_folder import OutputFolder, make_file_name
from quark_core.formatting import format_bytes, format_count
from quark_core.records.names import split_path
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line, clean_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quark.provenance.sources import SourceDiff, SourceFile, SourceSnapshot

_STYLES = {"+": "green", "-": "red", "@": "cyan"}
_SHOWN_DIGITS = 12


@click.command()
@takes_options
def sources(
    *,
    run: str = RUN,
    path: str | None = argument(),
    other: str | None = option(
        "Show how the source code of OTHER differs from that of RUN.",
        "--diff",
        metavar="OTHER",
        shell_complete=complete_runs,
    ),
    restore: Path | None = option("Write the files to this new or empty directory.", type=FOLDER),
    attempt: int | None = option("Attempt to read.", least=0, show_default="the newest"),
    wants_git: bool = option(
        "Print the uncommitted changes of files that git tracks.", "--git-diff"
    ),
    source: RunSource = SOURCE,
    as_json: bool = AS_JSON,
) -> None:
    """Show, compare or restore a run's source code.

    RUN is a run ID, unique prefix or name. Without options, the files are listed.
    With PATH, this file is printed. With QUARK_SOURCES=off, runs save no source
    code.
    """
    from quark.provenance.sources import read_git_changes, read_sources

    if sum((path is not None and other is None, restore is not None, wants_git)) > 1 or (
        other is not None and (restore is not None or wants_git)
    ):
        raise click.UsageError("Pass only one of PATH, --diff, --restore and --git-diff.")
    run_id = str(source.find(run).run.id)
    if wants_git:
        _print_text(read_git_changes(source.reader, run_id, attempt=attempt) or "")
        return
    wants_texts = path is not None or other is not None or restore is not None
    kept = read_sources(source.reader, run_id, attempt=attempt, texts=wants_texts)
    if other is not None:
        other_id = str(source.find(other).run.id)
        _print_diff(kept, read_sources(source.reader, other_id), path, as_json=as_json)
    elif restore is not None:
        _restore(kept, restore, as_json=as_json)
    elif path is not None:
        _print_file(kept, path, as_json=as_json)
    elif as_json:
        print_json(_describe(kept))
    else:
        from quark.provenance.sources import list_attempts

        _print_list(kept, list_attempts(source.reader, run_id))


def _describe(kept: SourceSnapshot) -> dict[str, Any]:
    return {
        "run_id": kept.run_id,
        "attempt": kept.attempt,
        "digest": kept.digest,
        "root": kept.root,
        "main": kept.main,
        "entry": kept.entry,
        "outside": list(kept.outside),
        "changed": list(kept.changed),
        "left_out": dict(kept.left_out),
        "files": [_describe_file(file) for file in kept.files],
    }


def _describe_file(file: SourceFile | None) -> dict[str, Any] | None:
    if file is None:
        return None
    return {
        "path": file.path,
        "sha256": file.sha256,
        "size_bytes": file.size_bytes,
        "reason": file.reason,
    }


def _print_list(kept: SourceSnapshot, attempts: Sequence[int]) -> None:

    table = make_table({"file": FOLD, "size": RIGHT, "sha256": WHOLE, "": FOLD})
    for file in kept.files:
        notes = [file.reason] if file.reason else []
        notes += ["main script"] if file.path == kept.main else []
        notes += ["changed while the run was running"] if file.path in kept.changed else []
        table.add_row(
            Text(file.path),
            format_bytes(file.size_bytes),
            file.sha256[:_SHOWN_DIGITS],
            Text("; ".join(notes)),
        )
    console = Console()
    console.print(table)
    for name, reason in kept.left_out.items():
        console.print(Text(f"not saved: {name}: {reason}"))
    if kept.outside:
        console.print(Text(f"imported from other folders, not saved: {', '.join(kept.outside)}"))
    total = format_bytes(sum(file.size_bytes for file in kept.files))
    counted = format_count(len(kept.files), "file")
    console.print(Text(f"{counted}, {total}, digest {kept.digest[:_SHOWN_DIGITS]}"))
    console.print(Text(f"Folder: {kept.root}. Attempt {kept.attempt}, started as {kept.entry}."))
    if len(attempts) > 1:
        told = ", ".join(map(str, attempts))
        console.print(Text(f"Attempts with sources: {told}. --attempt N shows another one."))


def _print_file(kept: SourceSnapshot, path: str, *, as_json: bool) -> None:
    file = kept.find(path)
    if file is None:
        raise click.ClickException(
            f"run {shorten_run_id(kept.run_id)} has no source file {path!r}. "
            f"`quark sources {shorten_run_id(kept.run_id)}` lists its files."
        )
    if as_json:
        print_json({**(_describe_file(file) or {}), "text": file.text})
    elif file.text is None:
        raise click.ClickException(f"{path}: {file.reason}")
    else:
        _print_text(file.text)


def _print_text(text: str) -> None:
    click.echo(clean_text(text.replace("\r\n", "\n")), nl=not text.endswith("\n"))


def _print_diff(
    before: SourceSnapshot, after: SourceSnapshot, path: str | None, *, as_json: bool
) -> None:
    from quark.provenance.sources import count_equal, diff_sources

    found = [diff for diff in diff_sources(before, after) if path in (None, diff.path)]
    if as_json:
        print_json(
            {
                "run_id": before.run_id,
                "other_run_id": after.run_id,
                "equal": before.digest == after.digest,
                "files": [
                    {
                        "path": diff.path,
                        "kind": diff.kind,
                        "before": _describe_file(diff.before),
                        "after": _describe_file(diff.after),
                        "diff": list(diff.lines),
                    }
                    for diff in found
                ],
            }
        )
        return
    for diff in found:
        _print_file_diff(diff)
    count = count_equal(before, after)
    click.echo(
        f"{len(found)} file{' differs' if len(found) == 1 else 's differ'}, {count} "
        f"{'is' if count == 1 else 'are'} the same."
        if found
        else f"The sources are the same: {format_count(len(before), 'file')}."
    )


def print_diff_lines(lines: Iterable[str]) -> None:
    """Print lines of a diff, in colours."""
    for line in lines:
        click.secho(clean_text(line), fg=_STYLES.get(line[:1]))


def _print_file_diff(diff: SourceDiff) -> None:
    old = "" if diff.kind != "moved" or diff.before is None else f" from {diff.before.path}"
    click.secho(clean_line(f"{diff.kind} {diff.path}{old}"), bold=True)
    print_diff_lines(diff.lines)
    if not diff.lines and diff.kind != "moved":
        reasons = {file.reason for file in (diff.before, diff.after) if file and file.reason}
        click.echo(clean_line(f"  no lines to show: {'; '.join(sorted(reasons))}"))


def _place(path: str) -> tuple[str, ...] | None:
    """Folders and name of a file; None for one that no honest store has: see `OutputFolder`."""
    parts = split_path(path)
    # What is hidden, such as `.git/config`, may be run by who looks at the folder.
    return None if parts is None or any(make_file_name(part) != part for part in parts) else parts


def _restore(kept: SourceSnapshot, folder: Path, *, as_json: bool) -> None:
    try:
        if folder.is_symlink() or (folder.exists() and any(folder.iterdir())):
            raise click.ClickException(f"{folder} is not empty. Pass a new directory.")
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror or error}") from error
    out = OutputFolder(folder)
    written: list[SourceFile] = []
    altered: list[SourceFile] = []
    missing: list[SourceFile] = []
    for file in kept.files:
        parts = _place(file.path)
        if file.data is None or parts is None:
            missing.append(file)
            continue
        try:
            with out.write(parts) as target:
                target.write(file.data)
        except OSError as error:
            raise click.ClickException(
                f"{folder.joinpath(*parts)} cannot be written: {error.strerror or error}"
            ) from error
        (written if file.is_exact else altered).append(file)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "written": [file.path for file in written],
                "altered": [file.path for file in altered],
                "missing": [file.path for file in missing],
            }
        )
        return
    count = len(kept.files)
    click.echo(
        f"Restored {len(written) + len(altered)} of {format_count(count, 'file')} to {folder}."
    )
    for file in altered:
        click.echo(clean_line(f"{file.path}: {file.reason}; not the exact file that ran"), err=True)
    for file in missing:
        reason = file.reason or "its name is not safe to write"
        click.echo(clean_line(f"{file.path} was not restored: {reason}"), err=True)
