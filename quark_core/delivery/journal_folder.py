"""One writer's folder in the journal: what it is, its lanes, and whether it is done with."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from quark_core import settings
from quark_core.delivery.lane_files import LEASE_STALE_S, LaneMark, Lease, lane_folder_name
from quark_core.delivery.ledger import LedgerLine, append_lines
from quark_core.delivery.segments import SEGMENT_SUFFIX
from quark_core.process import ProcessIdentity, is_alive

__all__ = ["JournalFolder", "LaneEntry", "Manifest", "find_folders", "journal_directory"]

_log = logging.getLogger("quark")
_MANIFEST = "journal.json"
_LANES = "lanes"
_CLOSED = "closed"


class LaneEntry(msgspec.Struct, frozen=True):
    """A lane of a journal.

    Attributes:
        name: Its name.
        specification: How to ask for its backend, without secrets.
        primary: Whether it is the run's primary.
    """

    name: str
    specification: str
    primary: bool = False


class Manifest(msgspec.Struct, frozen=True):
    """What another process needs to deliver a journal.

    Attributes:
        run_id, writer_id, attempt, rank: Whose journal it is.
        project: Name of the run's project.
        storage_dir: The user's storage root.
        run_path: The run's own directory.
        lanes: Where it goes.
        process: The process that writes it.
        black_box: File in shared memory that holds what is not journaled yet.
        awaits_run: Whether another process begins the run; until the store has
            it, the journal waits.
        generation: Number of the analysis whose outputs it holds; 0 for the
            journal of a process.
    """

    run_id: str
    writer_id: str
    attempt: int
    rank: int
    project: str
    storage_dir: str
    run_path: str
    lanes: tuple[LaneEntry, ...]
    process: ProcessIdentity
    black_box: str | None = None
    awaits_run: bool = False
    generation: int = 0


class JournalFolder:
    """The folder of one writer's journal.

    Args:
        path: The folder.
        storage_dir: The storage root that it lies under now, where that is known.
    """

    def __init__(self, path: Path, *, storage_dir: Path | None = None) -> None:
        self.path = path
        self._storage_dir = storage_dir

    def write_manifest(self, manifest: Manifest) -> None:
        """Say what the journal is; before its first segment is begun.

        Raises:
            OSError: The folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        scratch = self.path / f"{_MANIFEST}.part"
        scratch.write_bytes(msgspec.json.encode(manifest))
        os.replace(scratch, self.path / _MANIFEST)

    def keep_manifest(self, manifest: Manifest) -> None:
        """Write the manifest again where somebody has deleted it.

        Raises:
            OSError: The folder cannot be written.
        """
        if not (self.path / _MANIFEST).exists():
            self.write_manifest(manifest)

    def read_manifest(self) -> Manifest | None:
        """What the journal is, or None where that cannot be read."""
        try:
            manifest = msgspec.json.decode((self.path / _MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the journal %s is left alone: %s", self.path, error)
            return None
        if self._storage_dir is None:
            return manifest
        return msgspec.structs.replace(
            manifest, storage_dir=str(self._storage_dir), run_path=str(self.path.parent.parent)
        )

    def lease(self, lane: str) -> Lease:
        """The lease of a lane."""
        return Lease(self.path / _LANES / f"{lane_folder_name(lane)}.lease")

    def mark(self, lane: str) -> LaneMark:
        """How far a lane is."""
        return LaneMark(self.path / _LANES / f"{lane_folder_name(lane)}.mark")

    def close(self) -> None:
        """Note that nothing more will be written here, though the process lives on."""
        try:
            (self.path / _CLOSED).touch()
        except OSError as error:
            _log.debug("closing the journal %s: %s", self.path, error)

    def is_written(self, manifest: Manifest) -> bool:
        """Whether more may still be written here."""
        if (self.path / _CLOSED).exists():
            return False
        alive = is_alive(manifest.process)
        return alive if alive is not None else self._age_s() < LEASE_STALE_S

    def _note_delivery(self, unknown: Mapping[str, int]) -> None:
        manifest = self.read_manifest()
        if manifest is None or all(entry.primary for entry in manifest.lanes):
            return
        lines = [
            LedgerLine(
                writer_id=manifest.writer_id,
                attempt=manifest.attempt,
                rank=manifest.rank,
                lane=entry.name,
                specification=entry.specification,
                primary=entry.primary,
                batches=self.mark(entry.name).done,
                unknown=unknown.get(entry.name, 0),
            )
            for entry in manifest.lanes
        ]
        append_lines(Path(manifest.run_path), lines)

    def _age_s(self) -> float:
        """How long ago anything changed in here."""
        try:
            # Not the lanes' files: whoever delivers changes those.
            written = (self.path / _MANIFEST, *self.path.glob(f"*{SEGMENT_SUFFIX}"))
            newest = max(path.stat().st_mtime for path in written)
        except OSError:
            return 0.0
        return time.time() - newest

    def remove(self, *, unknown: Mapping[str, int] | None = None, note: bool = True) -> None:
        """Delete the journal, which every lane has passed, and the folders it leaves empty.

        Args:
            unknown: Lane -> records that its backend may or may not have.
            note: Whether to note in the run's ledger that its mirrors are served.
        """
        if note:
            self._note_delivery(unknown or {})
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self.path.parent, self.path.parent.parent)

    def prune(self) -> None:
        """Delete the bare folders that a lease makes again after another process's `remove`."""
        if not (self.path / _MANIFEST).exists():
            path = self.path
            _remove_empty(path / _LANES, path, path.parent, path.parent.parent)


def _remove_empty(*paths: Path) -> None:
    """Remove folders, each within the next, up to the first that is not empty."""
    for path in paths:
        try:
            path.rmdir()
        except OSError:
            return


def journal_directory(run_path: Path, run_id: str) -> Path:
    """Where the journals of a run lie: under its directory, or under QUARK_JOURNAL_DIR."""
    root = os.environ.get(settings.JOURNAL_DIR, "").strip()
    if root:
        return Path(root).expanduser().resolve() / run_id
    return run_path / "journal"


def find_folders(storage_dir: Path) -> Iterator[JournalFolder]:
    """Every journal of a storage root, and those under QUARK_JOURNAL_DIR that belong to it."""
    for path in sorted((storage_dir / ".quark" / "runs").glob(f"*/journal/*/{_MANIFEST}")):
        # Where it lies is what counts: the root may have been moved or copied since.
        yield JournalFolder(path.parent, storage_dir=storage_dir)
    root = os.environ.get(settings.JOURNAL_DIR, "").strip()
    if not root:
        return
    for path in sorted(Path(root).expanduser().resolve().glob(f"*/*/{_MANIFEST}")):
        folder = JournalFolder(path.parent)
        manifest = folder.read_manifest()
        if manifest is not None and Path(manifest.storage_dir) == storage_dir:
            yield folder
