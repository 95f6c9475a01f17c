"""Copies a store with all that belongs to it, also while trainings write to it.

Journals and files come first, then the database as of one moment, then what
came in between: what a lane delivers meanwhile leaves the journal only once
the database has it, and a payload is there before the record that names it.
So the copy has whatever the store had when it was begun, and every payload
that a record in it names. Its root is a storage root as any other.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from quark_backends.store.databases.connection import SqliteConnection, StoreConnection
from quark_backends.store.databases.layout import DATABASE, STORE_FOLDER, StoreLayout, name_folder
from quark_backends.store.databases.snapshot import open_still
from quark_backends.store.databases.sqlite import find_store, open_database, read_version
from quark_backends.store.upkeep.backup_folder import BackupFolder, BackupManifest
from quark_core.delivery.journal_folder import JournalFolder, find_folders
from quark_core.errors import SessionStoreError, StoreNotFoundError
from quark_core.records import ArtifactRecord
from quark_core.records.names import ARTIFACT_STORAGE_LAYOUT, object_path
from quark_core.records.query import Query

FindPlaces = Callable[[str, str], Iterable[str]]
"""Where in a backup the payload of a run and of a hash may lie."""

_OBJECTS = Path(ARTIFACT_STORAGE_LAYOUT["object"]).parent.parent.name
_PARTIAL = Path(ARTIFACT_STORAGE_LAYOUT["partial"]).name
_LEASE = ".lease"
_SHA256_DIGITS = 64
# Stores from before this version have no artifacts, and no trash.
_ARTIFACTS_SINCE = 2
# Where the folders of runs lie.
_PLACES = ("runs", "trash")
_SHOWN = 3


def back_up_store(storage_dir: Path, target: Path, *, keep_going: bool = False) -> BackupManifest:
    """Make a folder that has all of a storage root's store.

    Args:
        storage_dir: The storage root.
        target: The folder to make; a storage root itself then.
        keep_going: Whether a backup is made of a store that lacks payloads, or
            has damaged ones, as well.

    Raises:
        SessionStoreError: There is no store, it cannot be read, it lacks
            payloads, or there is no room; nothing is left then.
    """
    root = StoreLayout(storage_dir).root
    if root in (place := Path(os.path.abspath(target))).parents or place == root:
        raise SessionStoreError(f"{target} lies in the store itself; name a folder outside of it")
    with BackupFolder(target) as backup:
        counts = copy_store(backup, storage_dir, "")

        def find_places(run_id: str, sha256: str) -> list[str]:
            payload = f"{name_folder(run_id)}/{object_path(sha256)}"
            return [f"{STORE_FOLDER}/{place}/{payload}" for place in _PLACES]

        note_lacking(backup, storage_dir, "", find_places)
        check_payloads(backup, keep_going=keep_going)
        return backup.finish("store", counts | count_payloads(backup))


def copy_store(backup: BackupFolder, storage_dir: Path, within: str) -> dict[str, int]:
    """Copy a storage root's store into a backup.

    Args:
        backup: The backup.
        storage_dir: The storage root.
        within: Where in the backup its copy lies: empty, or a path that ends in `/`.

    Returns:
        How many runs and journals there are.

    Raises:
        SessionStoreError: There is no store, it cannot be copied, or there is no room.
    """
    layout = _find_layout(storage_dir)
    top = f"{within}{STORE_FOLDER}/"
    journals = _copy_journals(backup, storage_dir, top)

    def is_readable_journal(path: str) -> bool:
        return _is_journal(path) and JournalFolder(layout.root / path).read_manifest() is not None

    # One that cannot be read is copied as it is.
    copy_tree(
        backup,
        layout.root,
        top,
        leave_out=lambda path: is_readable_journal(path) or _is_left_out(path),
    )
    if not layout.db_path.exists():
        ids = {path.removeprefix(top).split("/")[1] for path in backup.list(f"{top}runs/")}
        return {"runs": len(ids), "journals": journals}
    backup.copy_database(layout.db_path, f"{top}{DATABASE}")
    copy_tree(
        backup, layout.root, top, leave_out=lambda path: _is_journal(path) or _is_left_out(path)
    )
    with _open_copy(backup, top) as (connection, version):
        kept = " WHERE trashed_us IS NULL" if version >= _ARTIFACTS_SINCE else ""
        (runs,) = connection.execute(f"SELECT count(*) FROM run{kept}").fetchone()
    return {"runs": runs, "journals": journals}


def note_lacking(
    backup: BackupFolder, storage_dir: Path, within: str, find_places: FindPlaces
) -> None:
    """Note in a backup which payloads a copied store names that are not in it.

    Args:
        backup: The backup.
        storage_dir: The storage root that the store was copied from.
        within: As of `copy_store`.
        find_places: Says where in the backup a payload may lie.

    Raises:
        SessionStoreError: A database cannot be read.
    """
    layout, top = StoreLayout(storage_dir), f"{within}{STORE_FOLDER}/"
    if f"{top}{DATABASE}" not in backup.files:
        return
    missing: dict[str, list[str]] = {}
    with _open_copy(backup, top) as (connection, version):
        if version < _ARTIFACTS_SINCE:
            return
        for run_id, sha256 in find_named_payloads(connection):
            if not any(path in backup.files for path in find_places(run_id, sha256)):
                missing.setdefault(run_id, []).append(sha256)
    if missing:
        # `quark gc` takes a run's rows before its files, so it may have come between.
        try:
            with closing(open_still(layout.db_path)) as connection:
                for (run_id,) in connection.execute("SELECT run_id FROM removed"):
                    missing.pop(run_id, None)
        except sqlite3.Error as error:
            raise SessionStoreError(f"{layout.db_path} cannot be read: {error}") from error
    for run_id, hashes in missing.items():
        backup.lacking += [describe_missing(run_id, sha256) for sha256 in hashes]


def describe_missing(run_id: str, sha256: str) -> str:
    """A line on a payload that a record names and the store lacks."""
    return f"payload {sha256} of run {run_id} is not in the store"


def count_payloads(backup: BackupFolder) -> dict[str, int]:
    """How many files are payloads of artifacts."""
    return {"payloads": sum(_find_hash(path) is not None for path in backup.files)}


def copy_tree(
    backup: BackupFolder, source: Path, within: str, *, leave_out: Callable[[str], bool]
) -> None:
    """Copy what is in a folder and not in the backup yet.

    Args:
        backup: The backup.
        source: The folder; what goes meanwhile is left out.
        within: Where in the backup it goes: a path that ends in `/`.
        leave_out: Says of a path, relative to the folder, whether it is not wanted.

    Raises:
        SessionStoreError: Something cannot be copied, or there is no room.
    """
    for relative, is_link in _walk(source, leave_out):
        path = f"{within}{relative}"
        if path in backup.files or path in backup.links:
            continue
        if not is_link:
            backup.copy_file(source / relative, path)
        elif not backup.copy_link(source / relative, path):
            note = f"{source / relative} leads out of its folder, and was not followed"
            if note not in backup.lacking:
                backup.lacking.append(note)
    copy_modes(backup, source, within)


def copy_modes(backup: BackupFolder, source: Path, within: str) -> None:
    """Give the folders of a part of a backup the modes that those have that they were copied from.

    Args:
        backup: The backup.
        source: Where that part was copied from.
        within: As of `copy_tree`.
    """
    folders = {""}
    for path in backup.list(within):
        parts = path.removeprefix(within).split("/")[:-1]
        folders |= {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
    for folder in folders:
        backup.copy_mode(source / folder, f"{within}{folder}")


def find_named_payloads(connection: StoreConnection) -> Iterator[tuple[str, str]]:
    """Run and SHA-256 of each payload that the records of a store name, in the trash or not.

    Args:
        connection: In a transaction that reads.
    """
    from quark_backends.store.reading.stored_rows import StoredRows, WriterRow

    rows = StoredRows(connection)
    parts = [f"SELECT writer_pk FROM {table} WHERE kind = ?" for table in ("batch", "chunk")]
    writers = connection.execute(
        "SELECT writer.pk, run.id, writer.id, writer.attempt, writer.rank FROM writer"
        f" JOIN run ON run.pk = run_pk WHERE writer.pk IN ({' UNION '.join(parts)})",
        (ArtifactRecord.KIND, ArtifactRecord.KIND),
    ).fetchall()
    for writer_pk, run_id, writer_id, attempt, rank in writers:
        writer = WriterRow(writer_pk, run_id, writer_id, attempt, rank, None)
        found = rows.load(writer, ArtifactRecord.KIND, Query(all_attempts=True))
        hashes, places = found["sha256"].tolist(), found["payload_relative_path"].tolist()
        for sha256, place in zip(hashes, places, strict=True):
            if place is not None:
                yield run_id, sha256


def check_payloads(backup: BackupFolder, *, keep_going: bool) -> None:
    """Refuse a backup that lacks something, or has a payload that is not what its name says.

    Raises:
        SessionStoreError: It does, and `keep_going` is not asked for.
    """
    for path, file in backup.files.items():
        sha256 = _find_hash(path)
        if sha256 is not None and sha256 != file.sha256:
            backup.lacking.append(f"{path} is damaged: its content is not what its name says")
    if backup.lacking and not keep_going:
        more = len(backup.lacking) - _SHOWN
        shown = "; ".join(backup.lacking[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise SessionStoreError(
            f"no backup was made, since the store is not whole: {shown}. "
            "With --keep-going it is made of what there is."
        )


def _find_layout(storage_dir: Path) -> StoreLayout:
    """The store under a root, or what a service's client keeps there, which is journals only."""
    layout = StoreLayout(storage_dir)
    try:
        found = find_store(storage_dir)
    except SessionStoreError:
        if layout.db_path.exists() or next(find_folders(storage_dir), None) is None:
            raise
        return layout
    if found is None:
        raise StoreNotFoundError(f"{storage_dir} holds no Quark store (no {STORE_FOLDER} folder)")
    return found


def _copy_journals(backup: BackupFolder, storage_dir: Path, top: str) -> int:
    """Copy the journals of a root, wherever they lie; how many."""
    copied = 0
    for folder in find_folders(storage_dir):
        manifest = folder.read_manifest()
        if manifest is None:
            continue
        within = f"{top}runs/{name_folder(manifest.run_id)}/journal/{folder.path.name}/"
        # How far its lanes are is looked at last, so that little is sent again.
        copy_tree(backup, folder.path, within, leave_out=_is_mark)
        copy_tree(backup, folder.path, within, leave_out=_is_manifest)
        # The copy has no process that writes it, nor any claim to what the other one writes.
        still = msgspec.structs.replace(manifest, black_box=None)
        backup.write_file(f"{within}journal.json", iter([msgspec.json.encode(still)]))
        if f"{within}closed" not in backup.files:
            backup.write_file(f"{within}closed", iter([]))
        copied += 1
    return copied


@contextmanager
def _open_copy(backup: BackupFolder, top: str) -> Iterator[tuple[SqliteConnection, int]]:
    """The database of a copied store, which is left as it is, and its version."""
    copy = backup.locate(f"{top}{DATABASE}")
    try:
        with closing(open_database(copy, "mode=ro&immutable=1")) as connection:
            yield connection, read_version(connection, copy.parent)
    except sqlite3.Error as error:
        raise SessionStoreError(f"the copied database cannot be read: {error}") from error


def _walk(source: Path, leave_out: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Files and links of a folder, relative to it; True for links, which are not followed."""
    waiting = [""]
    while waiting:
        within = waiting.pop()
        try:
            entries = sorted(os.scandir(source / within), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # it went meanwhile
        except OSError as error:
            raise SessionStoreError(f"{source / within} cannot be copied: {error}") from error
        for entry in entries:
            relative = f"{within}{entry.name}"
            if leave_out(relative):
                continue
            if entry.is_symlink():
                yield relative, True
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(f"{relative}/")
            else:
                yield relative, False


def _is_left_out(path: str) -> bool:
    """Whether something in a store's folder is copied in another way, or means nothing elsewhere.

    Args:
        path: Relative to the folder.
    """
    if "/" not in path and (path == DATABASE or path.startswith((f"{DATABASE}-", f"{DATABASE}."))):
        return True
    return _is_of_one_process(path)


def _is_journal(path: str) -> bool:
    """Whether something in a store's folder is the journal of a run that is not in the trash."""
    parts = path.split("/")
    return len(parts) == 4 and parts[0] == "runs" and parts[2] == "journal"


def _is_of_one_process(path: str) -> bool:
    """Whether a file says what a process is doing now, rather than what it has done."""
    name = path.rpartition("/")[2]
    return name == _PARTIAL or name.endswith(".part") or _LEASE in name


def _is_mark(path: str) -> bool:
    return path == "journal.json" or path.split("/")[0] == "lanes" or _is_of_one_process(path)


def _is_manifest(path: str) -> bool:
    return path == "journal.json" or _is_of_one_process(path)


def _find_hash(path: str) -> str | None:
    """The SHA-256 that a payload's name says that it has; None for what is no payload."""
    parts = path.split("/")
    if len(parts) < 3 or len(parts[-1]) != _SHA256_DIGITS or parts[-2] != parts[-1][:2]:
        return None
    return parts[-1] if parts[-3] == _OBJECTS or parts[0] == "payloads" else None
