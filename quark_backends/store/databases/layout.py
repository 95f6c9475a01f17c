"""Places of files under a storage root, and the file systems that SQLite may use."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from quark_core.artifacts.payload_folder import PayloadFolder, make_file_name
from quark_core.backends.contract import Payload
from quark_core.config.arguments import check_run_id
from quark_core.errors import BackendRejected, BackendUnavailable, SchemaValidationError

if TYPE_CHECKING:
    from quark_core.backends.run_summary import RunSummary, StoredRun

STORE_FOLDER = ".quark"
"""The store's folder under the storage root."""

MARKER = "store.json"
"""Marks the folder as ours."""

DATABASE = "quark.db"
"""The SQLite file."""

LOG_SUFFIX = "-wal"
"""Ends the name of SQLite's write-ahead log."""

OWNER_SUFFIX = "-owner"
"""Ends the name of the note which file the log was written for."""

APPLICATION_ID = 0x51524B31
"""Marks a database file as ours ("QRK1"), kept in SQLite's application_id."""

_DATABASE_ENDS = ("", "-wal", "-shm", "-journal", OWNER_SUFFIX)
_FOLDERS = ("runs", "trash", "launches")


def name_folder(run_id: str) -> str:
    """The name of a run's folder: its id, or what is harmless of one that only a stranger gives."""
    try:
        return check_run_id(run_id)
    except SchemaValidationError:
        return make_file_name(run_id)


class StoreLayout:
    """The paths of one store."""

    __slots__ = ("_runs", "db_path", "marker", "root")

    def __init__(self, storage_dir: Path) -> None:
        self.root = storage_dir / STORE_FOLDER
        self.db_path = self.root / DATABASE
        self.marker = self.root / MARKER
        self._runs = self.root / "runs"

    def run_path(self, run_id: str) -> Path:
        """The run's own directory."""
        return self._runs / name_folder(run_id)

    @property
    def files(self) -> tuple[Path, ...]:
        """The store's own files and folders; none of them may be a link."""
        database = [self.db_path.with_name(f"{DATABASE}{end}") for end in _DATABASE_ENDS]
        return (self.marker, *database, *(self.root / name for name in _FOLDERS))

    def place(self, stored: StoredRun) -> StoredRun:
        """A run with the directory that it has here: the store may have been copied or moved."""
        path = str(self.run_path(stored.run.id or ""))
        if stored.run.run_path == path:
            return stored
        return replace(stored, run=msgspec.structs.replace(stored.run, run_path=path))

    def place_summary(self, summary: RunSummary) -> RunSummary:
        """A summed-up run with the directory that it has here; see `place`."""
        placed = self.place(summary.stored)
        return summary if placed is summary.stored else replace(summary, stored=placed)


JOURNAL_ONLY = "QUARK_JOURNAL_ONLY"

_MOUNTS = Path("/proc/self/mounts")
_NETWORK_TYPES = frozenset(
    """
    9p afs beegfs ceph cifs cvmfs fhgfs fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.goofys
    fuse.juicefs fuse.rclone fuse.s3fs fuse.sshfs glusterfs gpfs lustre nfs nfs4 orangefs
    panfs pvfs2 quobyte smb2 smb3 smbfs virtiofs vboxsf wekafs
    """.split()
)


def find_network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """Type of the network file system that a path lies on, or None for a local one.

    QUARK_JOURNAL_ONLY=1 treats every path as one, QUARK_JOURNAL_ONLY=0 none.

    Args:
        path: The path; it need not exist.
        mounts: Text in the form of /proc/mounts, read from there by default.
            Where there is none (macOS, Windows) every path counts as local.
    """
    forced = os.environ.get(JOURNAL_ONLY, "").strip()
    if forced:
        return None if forced == "0" else f"{JOURNAL_ONLY}={forced}"
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text("utf-8", "surrogateescape")
        except OSError:
            return None
    place = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[1]))
        depth = len(point.parts)
        # The later of two mounts on one point covers the earlier.
        if depth >= best and (place == point or point in place.parents):
            best, kind = depth, fields[2]
    return kind if kind in _NETWORK_TYPES else None


class KeepsPayloads:
    """Implements `SupportsArtifacts` over the directories of runs, and says where those lie."""

    _layout: StoreLayout

    def _place(self, stored: StoredRun) -> StoredRun:
        return self._layout.place(stored)

    def _place_summary(self, summary: RunSummary) -> RunSummary:
        return self._layout.place_summary(summary)

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`."""
        folder = PayloadFolder(self._layout.run_path(payload.run_id))
        if folder.find(payload.sha256) is not None:
            return
        try:
            with payload.path.open("rb") as source:
                put = folder.put_file(source, payload.size_bytes)
        except OSError as error:
            raise BackendUnavailable(f"{payload.path}: {error}", backend="embedded") from error
        if put.failure is not None:
            raise BackendUnavailable(f"{folder.root}: {put.failure}", backend="embedded")
        if put.sha256 != payload.sha256:
            raise BackendRejected(
                f"{payload.path} has changed since it was stored: its SHA-256 differs",
                backend="embedded",
            )

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        return PayloadFolder(self._layout.run_path(run_id)).open(sha256)

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`."""
        return self._layout.run_path(run_id)
