"""What this machine knows of a project's sources: hashes by what `stat` says, and who has them.

One note for each project and store, in `storage_dir/.quark/sources`. Nobody must keep it:
without one the files are read, and kept anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from pathlib import Path

import msgspec

from quark_core.version import __version__

_log = logging.getLogger("quark")

# A file that was written to as late as this before it was read may change without `stat`
# telling: clocks of file systems are coarse.
_RACY_NS = 2_000_000_000
_MOST_BYTES = 16 * 1024 * 1024


class KnownFile(msgspec.Struct, array_like=True, frozen=True):
    """A file as it was when it was read.

    Attributes:
        size_bytes, mtime_ns, inode: What `stat` said.
        read_ns: When it was read, by the same clock as `mtime_ns`.
        sha256: Its hash.
    """

    size_bytes: int
    mtime_ns: int
    inode: int
    read_ns: int
    sha256: str

    def fits(self, found: os.stat_result) -> bool:
        """Whether a file is surely still the one that was read."""
        return (
            self.size_bytes == found.st_size
            and self.mtime_ns == found.st_mtime_ns
            and self.inode == found.st_ino
            and self.mtime_ns + _RACY_NS < self.read_ns
        )


class KnownPack(msgspec.Struct, array_like=True, frozen=True):
    """A pack that runs have.

    Attributes:
        sha256, size_bytes: Of its payload.
        members: Hash of a file -> hash of what the pack holds of it, or nothing where that is
            the file itself.
    """

    sha256: str
    size_bytes: int
    members: dict[str, str]


class SourceNote(msgspec.Struct, frozen=True):
    """What is known of one project.

    Attributes:
        version: Of Quark; what counts as a secret may differ in another.
        files: Path -> the file.
        packs: The packs of the last run.
        texts: Hash of another payload that the last run has -> its size.
        folders: Directories of the last runs, under the storage root, the newest first.
    """

    version: str = __version__
    files: dict[str, KnownFile] = {}
    packs: list[KnownPack] = []
    texts: dict[str, int] = {}
    folders: list[str] = []


def load_note(storage_dir: Path, root: str) -> SourceNote:
    """What is known; an empty note where that cannot be read."""
    try:
        path = _find_place(storage_dir, root)
        if path.stat().st_size > _MOST_BYTES:
            return SourceNote()
        note = msgspec.json.decode(path.read_bytes(), type=SourceNote)
    except FileNotFoundError:
        return SourceNote()
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        _log.debug("what is noted of the sources under %s cannot be read: %s", root, error)
        return SourceNote()
    if note.version != __version__:
        return SourceNote(files=note.files)
    return note


def save_note(storage_dir: Path, root: str, note: SourceNote) -> None:
    """Keep what is known; a disk that fails is no error."""
    path = _find_place(storage_dir, root)
    scratch = path.with_name(f".{os.urandom(6).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_bytes(msgspec.json.encode(note))
            os.replace(scratch, path)
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("the sources under %s are not noted on this machine: %s", root, error)


def know_file(found: os.stat_result, sha256: str) -> KnownFile:
    """A file that was read now."""
    return KnownFile(found.st_size, found.st_mtime_ns, found.st_ino, time.time_ns(), sha256)


def _find_place(storage_dir: Path, root: str) -> Path:
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return storage_dir / ".quark" / "sources" / f"{name}.json"
