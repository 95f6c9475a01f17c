"""`quark backup`: a store as a folder that can be carried away, and checked."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import STORAGE_DIR
from quark_backends.store.upkeep.backup import BackupManifest, back_up_store, verify_backup
from quark_core.config.arguments import resolve_storage_dir
from quark_core.formatting import format_bytes, format_count
from quark_core.runs import recovery

KEEP_GOING = option("Back up even if artifact files are missing or damaged, and list them.")


@click.command()
@takes_options
def backup(
    *,
    directory: Path = argument(),
    storage_dir: Path | None = STORAGE_DIR,
    keep_going: bool = KEEP_GOING,
    verify: bool = option("Check the backup in DIRECTORY against its hashes."),
) -> None:
    """Back up a store to DIRECTORY, or verify a backup.

    Copies the store with its artifacts and journals. Runs may write to it
    meanwhile. DIRECTORY must not exist. It appears when all files are copied and
    verified, and is a storage folder itself: `quark runs -d DIRECTORY` lists its
    runs. To restore it, copy its folder .quark to the place of the store, and run
    `quark sync` there.
    """
    if verify:
        manifest = verify_backup(directory)
        click.echo(f"{directory} is complete and undamaged: {describe_backup(manifest)}.")
        print_lacking(manifest)
        return
    root = resolve_storage_dir(storage_dir)
    recovery.journal_black_boxes(root)
    manifest = back_up_store(root, directory, keep_going=keep_going)
    click.echo(f"{directory}: {describe_backup(manifest)}, verified.")
    print_lacking(manifest)
    click.echo(f"To check it later: quark backup --verify {shlex.quote(str(directory))}")


def describe_backup(manifest: BackupManifest) -> str:
    """What a backup is of, when it was made, and how much there is in it."""
    size_bytes = sum(file.size_bytes for file in manifest.files.values())
    counts = ", ".join(
        f"{count:,} {what if count != 1 else what.removesuffix('s')}"
        for what, count in manifest.counts.items()
    )
    files = format_count(len(manifest.files), "file")
    size = format_bytes(size_bytes)
    return f"a {manifest.kind} at {manifest.made_at}: {counts}; {files}, {size}"


def print_lacking(manifest: BackupManifest) -> None:
    """Say what the store lacked when its backup was made."""
    for line in manifest.lacking:
        click.echo(f"quark: warning: missing in the store and the backup: {line}", err=True)
