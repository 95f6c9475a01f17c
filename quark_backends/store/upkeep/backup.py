"""Copies a store with all that belongs to it, also while trainings write to it.

Journals and files come first, then the database as of one moment, then what
came in between: what a lane delivers meanwhile leaves the journal only once
the database has it, and a payload is there before the record that names it.
So the copy has whatever the store had when it was begun, and every payload
that a record in it names. Its root is a storage root as any other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from quark_backends.store.databases.connection import SqliteConnection, StoreConnection
from quark_backends.store.databases.layout import (
    DATABASE,
    LOG_SUFFIX,
    STORE_FOLDER,
    StoreLayout,
    name_folder,
)
from quark_backends.store.databases.sqlite import (
    copy_database,
    find_store,
    open_still,
    read_version,
)
from quark_backends.store.databases.write_ahead_log import open_database
from quark_core.delivery.journal_folder import JournalFolder, find_folders
from quark_core.errors import SessionStoreError, StoreNotFoundError
from quark_core.records import ArtifactRecord, format_time
from quark_core.records.base import now_us
from quark_core.records.names import ARTIFACT_STORAGE_LAYOUT, object_path
from quark_core.records.query import Query
from quark_core.version import __version__

# A folder of copies that is whole or is not there.
#
# It is made beside its place, brought to the disk, read again, and only then
# given its manifest and its name: whatever ends that before leaves nothing that
# looks like a backup. The manifest names every file with its size and its
# SHA-256, and has a hash of its own.

MANIFEST = "backup.json"
"""Lies at the top of a backup, and makes it one."""

_FORMAT = "quark backup"
_VERSION = 1
_PIECE_BYTES = 2**20
_SHOWN = 3
# What a reader makes beside a database; the log is looked at by its size.
_SHARED_MEMORY_SUFFIX = "-shm"
_BINARY = getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | _BINARY
# Opening a pipe would wait for whoever writes it.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


class BackupFile(msgspec.Struct, frozen=True):
    """A file of a backup: how long it is, and its SHA-256 in hexadecimal."""

    size_bytes: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup is.

    Attributes:
        kind: What it is of: "store", or "service on SQLite", "service on PostgreSQL".
        made_at: When it was begun: what was stored by then is in it.
        quark_version: What made it.
        counts: How many there are of what, for people.
        files: Path, with `/` between its parts -> the file.
        links: Path -> where it leads, relative to it and within the backup.
        lacking: What the store itself lacked or had damaged, a line for each.
    """

    kind: str
    made_at: str
    quark_version: str
    counts: dict[str, int]
    files: dict[str, BackupFile]
    links: dict[str, str]
    lacking: list[str]
    format: str = _FORMAT
    version: int = _VERSION


class _Sealed(msgspec.Struct):
    """The manifest as it lies on the disk, with the SHA-256 of its bytes."""

    sha256: str
    manifest: msgspec.Raw


class BackupFolder:
    """A backup that is being made; as a context manager it goes away unless it was finished.

    Args:
        target: The folder that it becomes; there must be nothing yet.

    Attributes:
        files, links: What is in it so far; see `BackupManifest`.
        lacking: Likewise.

    Raises:
        SessionStoreError: There is something, or the place cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self._target = target = Path(os.path.abspath(target))
        self.files: dict[str, BackupFile] = {}
        self.links: dict[str, str] = {}
        self.lacking: list[str] = []
        self._made_at = format_time(now_us())
        if os.path.lexists(target):
            raise SessionStoreError(f"{target} already exists. Choose a new folder")
        self._path = target.with_name(f".{target.name}.part-{os.urandom(4).hex()}")
        try:
            # Of whoever makes it alone: keys of a service and their hashes may be in it.
            self._path.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove it, unless it was finished."""
        shutil.rmtree(self._path, ignore_errors=True)

    def check(self) -> None:
        """Bring it to the disk, and read all of it again.

        Raises:
            SessionStoreError: It is not what was copied.
        """
        try:
            for folder, _, _ in os.walk(self._path):
                _sync(Path(folder))
            wrong = _compare(self._path, self.files, self.links)
        except OSError as error:
            raise self._failed(error) from error
        if wrong:
            raise SessionStoreError(f"{self._target}: the copy differs from the original: {wrong}")

    def locate(self, path: str) -> Path:
        """Where a file of the backup lies while it is made."""
        return self._path / path

    def list(self, within: str) -> list[str]:
        """Paths of the files in it that begin so."""
        return [path for path in self.files if path.startswith(within)]

    def copy_file(self, source: Path, path: str) -> BackupFile | None:
        """Copy a file as it is now; None where it is gone or no regular file.

        Raises:
            SessionStoreError: It cannot be read, or its copy cannot be written.
        """
        try:
            descriptor = os.open(source, os.O_RDONLY | _NO_WAIT | _NO_LINK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SessionStoreError(f"{source} cannot be copied: {error}") from error
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            return self._write(path, _read_pieces(file.fileno(), source), status)

    def write_file(self, path: str, pieces: Iterator[bytes]) -> BackupFile:
        """Make a file of what is given.

        Raises:
            SessionStoreError: It cannot be written.
        """
        return self._write(path, pieces, None)

    def copy_link(self, source: Path, path: str) -> bool:
        """Copy a link that leads to something beside it; False for any other."""
        try:
            leads_to = os.readlink(source)
        except OSError:
            return False
        if not _leads_inside(path, leads_to):
            return False
        try:
            self.locate(path).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(leads_to, self.locate(path))
        except OSError as error:
            raise self._failed(error) from error
        self.links[path] = leads_to
        return True

    def copy_mode(self, source: Path, path: str) -> None:
        """Let who may read a folder, or a database, read its copy where that is restored."""
        with suppress(OSError):
            mode = stat.S_IMODE(source.stat().st_mode) | stat.S_IRWXU
            copy = self.locate(path)
            os.chmod(copy, mode if copy.is_dir() else mode & ~stat.S_IXUSR)

    def copy_database(self, db_path: Path, path: str) -> None:
        """Copy a SQLite database as of one moment, also while it is written, and check it.

        Raises:
            SessionStoreError: It cannot be read, or its copy cannot be written.
        """
        copy = self.locate(path)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy_database(db_path, copy)
            self.copy_mode(db_path, path)
            _sync(copy)
            with closing(open_database(copy, "mode=ro&immutable=1")) as connection:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            self.files[path] = _hash_file(copy)
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error
        if found != "ok":
            self.lacking.append(f"{db_path} is damaged: {found}")

    def finish(self, kind: str, counts: dict[str, int]) -> BackupManifest:
        """Bring it to the disk, read all of it again, and give it its name.

        Raises:
            SessionStoreError: It is not what was written, or there is no room.
        """
        manifest = BackupManifest(
            kind=kind,
            made_at=self._made_at,
            quark_version=__version__,
            counts=counts,
            files=self.files,
            links=self.links,
            lacking=self.lacking,
        )
        self.check()
        try:
            body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
            sealed = _Sealed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
            scratch = self._path / f"{MANIFEST}.new"
            scratch.write_bytes(msgspec.json.encode(sealed))
            _sync(scratch)
            os.rename(scratch, self._path / MANIFEST)
            _sync(self._path)
            if os.path.lexists(self._target):
                raise SessionStoreError(f"{self._target} was just created. Choose a new folder")
            os.rename(self._path, self._target)
            _sync(self._target.parent)
        except OSError as error:
            raise self._failed(error) from error
        return manifest

    def _write(
        self, path: str, pieces: Iterator[bytes], status: os.stat_result | None
    ) -> BackupFile:
        digest, size_bytes = hashlib.sha256(), 0
        copy = self.locate(path)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("xb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[file.write(view) :]
                    digest.update(piece)
                    size_bytes += len(piece)
                if status is not None:
                    os.chmod(copy, stat.S_IMODE(status.st_mode) | stat.S_IRUSR)
                    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self.files[path] = BackupFile(size_bytes, digest.hexdigest())
        return self.files[path]

    def _failed(self, error: Exception) -> SessionStoreError:
        reason = getattr(error, "strerror", None) or error
        return SessionStoreError(
            f"{self._target} cannot be created: {reason}. Nothing is left of it"
        )


def verify_backup(folder: Path) -> BackupManifest:
    """Read all of a backup, and hold each file against the manifest.

    What readers of its databases leave beside them does not count.

    Returns:
        The manifest.

    Raises:
        SessionStoreError: It is no backup, of a newer version, or not what was made.
    """
    manifest = _read_manifest(folder)
    try:
        wrong = _compare(folder, manifest.files, manifest.links)
    except OSError as error:
        raise SessionStoreError(f"{folder} cannot be read: {error}") from error
    if wrong:
        raise SessionStoreError(
            f"{folder} differs from the backup that was made at {manifest.made_at}: {wrong}"
        )
    return manifest


def _read_manifest(folder: Path) -> BackupManifest:
    try:
        sealed = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Sealed)
        body = bytes(sealed.manifest)
        head = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(head.get("version", b"0"))
        if isinstance(version, int) and version > _VERSION:
            raise SessionStoreError(
                f"the backup {folder} has format version {version}, but this Quark supports up "
                f"to {_VERSION}. Upgrade quark-tracker"
            )
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise SessionStoreError(f"the backup {folder} is damaged: its {MANIFEST} was changed")
        manifest = msgspec.json.decode(body, type=BackupManifest)
    except FileNotFoundError:
        raise StoreNotFoundError(
            f"{folder} is not a complete backup: it has no {MANIFEST}, which is written last"
        ) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SessionStoreError(
            f"the backup {folder} is damaged: its {MANIFEST} cannot be read: {error}"
        ) from error
    if manifest.format != _FORMAT:
        raise SessionStoreError(f"{folder} is not a backup: its {MANIFEST} has another format")
    return manifest


def _compare(folder: Path, files: Mapping[str, BackupFile], links: Mapping[str, str]) -> str:
    """What is wrong with what is in a folder; empty where nothing is."""
    wrong = []
    found_files, found_links = _list_all(folder)
    found_files.discard(MANIFEST)
    for path in [*files, *links]:
        kept = found_links if path in links else found_files
        if path not in kept:
            wrong.append(f"{path} is missing")
    for path, file in files.items():
        if path in found_files and _hash_file(folder / path) != file:
            wrong.append(f"{path} has different content")
    for path, leads_to in links.items():
        if path in found_links and os.readlink(folder / path) != leads_to:
            wrong.append(f"{path} leads elsewhere")
        if not _leads_inside(path, leads_to):
            wrong.append(f"{path} leads out of the folder")
    for path in sorted((found_files | found_links) - {*files, *links}):
        database = path.removesuffix(_SHARED_MEMORY_SUFFIX).removesuffix(LOG_SUFFIX)
        if database != path and database in files:
            if path.endswith(_SHARED_MEMORY_SUFFIX) or not (folder / path).stat().st_size:
                continue
            wrong.append(f"{database} was changed")
        else:
            wrong.append(f"{path} was added")
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return ", ".join(wrong[:_SHOWN]) + more


def _list_all(folder: Path) -> tuple[set[str], set[str]]:
    """All files and all links in a folder, with no link followed; other things count as links."""
    files, links = set(), set()
    waiting = [""]
    while waiting:
        within = waiting.pop()
        with os.scandir(folder / within) as entries:
            for entry in entries:
                path = f"{within}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{path}/")
                elif entry.is_file(follow_symlinks=False):
                    files.add(path)
                else:
                    links.add(path)
    return files, links


def _leads_inside(path: str, leads_to: str) -> bool:
    """Whether a link stays within the folder that its path is relative to."""
    if os.path.isabs(leads_to):
        return False
    place = os.path.normpath(os.path.join(os.path.dirname(path), leads_to))
    return place != ".." and not place.startswith("../") and not os.path.isabs(place)


def _read_pieces(descriptor: int, source: Path) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(descriptor, _PIECE_BYTES)
        except OSError as error:
            raise SessionStoreError(f"{source} cannot be copied: {error}") from error
        if not piece:
            return
        yield piece


def _hash_file(path: Path) -> BackupFile:
    """How long a file is and its hash, from the disk where that can be had."""
    with open(os.open(path, os.O_RDONLY | _NO_LINK), "rb", buffering=0) as file:
        if sys.platform == "linux" and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                # What the memory has of it is not what is to be checked.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return BackupFile(os.fstat(file.fileno()).st_size, digest)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; folders where that can be done."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return  # Windows opens no folder
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FindPlaces = Callable[[str, str], Iterable[str]]
"""Where in a backup the payload of a run and of a hash may lie."""

_OBJECTS = Path(ARTIFACT_STORAGE_LAYOUT["object"]).parent.parent.name
_PARTIAL = Path(ARTIFACT_STORAGE_LAYOUT["partial"]).name
_LEASE = ".lease"
_SHA256_DIGITS = 64
# Where the folders of runs lie.
_PLACES = ("runs", "trash")


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
        raise SessionStoreError(f"{target} is in the store itself. Choose a folder outside of it")
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
    with _open_copy(backup, top) as connection:
        (runs,) = connection.execute("SELECT count(*) FROM run WHERE trashed_us IS NULL").fetchone()
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
    with _open_copy(backup, top) as connection:
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
            note = f"{source / relative} leads out of its folder and was not copied"
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
            backup.lacking.append(f"{path} is damaged: its content does not match its name")
    if backup.lacking and not keep_going:
        more = len(backup.lacking) - _SHOWN
        shown = "; ".join(backup.lacking[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise SessionStoreError(
            f"no backup was made, because the store is damaged: {shown}. --keep-going backs up "
            "the intact part."
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
        raise StoreNotFoundError(f"no Quark store in '{storage_dir}' (no {STORE_FOLDER} folder)")
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
def _open_copy(backup: BackupFolder, top: str) -> Iterator[SqliteConnection]:
    """The database of a copied store, which is left as it is."""
    copy = backup.locate(f"{top}{DATABASE}")
    try:
        with closing(open_database(copy, "mode=ro&immutable=1")) as connection:
            read_version(connection, copy.parent)  # refuses what is not ours
            yield connection
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
