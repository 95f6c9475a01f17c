"""One writer's folder in the journal: what it is, its lanes, and whether it is done with."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from glob import escape, iglob
from pathlib import Path
from typing import TypeVar

import msgspec

from quark_core.config import settings
from quark_core.delivery.delivery_state import (
    LEASE_STALE_S,
    LaneMark,
    Lease,
    LedgerLine,
    append_lines,
    lane_folder_name,
)
from quark_core.delivery.segments import END_MARK, SEGMENT_SUFFIX, segment_name
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.system.folders import Place, decode_foreign, describe_link, read_plain_file
from quark_core.system.process import ProcessIdentity, is_alive

_log = logging.getLogger("quark")
_T = TypeVar("_T")
_MANIFEST = "journal.json"
_ASIDE = "journal.aside.json"
_DAMAGE = "damaged.json"
_LANES = "lanes"
_CLOSED = "closed"
_STORED = "stored"


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
        black_box: Where shared memory holds what is not journaled yet, for
            people; it is found by the ids of run and writer, never by what is
            said here. None where there is none.
        awaits_run: Whether another process begins the run; until the store has
            it, the journal waits.
        generation: Number of the analysis whose outputs it holds; 0 for the
            journal of a process.
        journal: Where the journal lies, said by the copy in a black box only.
        places: Where the run's directory and the journal lie, likewise.
        moved_to: Where the earlier part of the journal lies, which was moved with its store
            while the process went on.
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
    journal: str | None = None
    places: tuple[Place, ...] = ()
    moved_to: str | None = None


class LostBatches(msgspec.Struct, frozen=True):
    """Batches that damage to a journal has cost one of its lanes.

    Attributes:
        lane: The lane.
        first, last: Numbers of the first and the last; the last is None where
            nobody knows how many there were.
    """

    lane: str
    first: int
    last: int | None

    def covers(self, number: int) -> bool:
        """Whether a batch is among them."""
        return self.first <= number and (self.last is None or number <= self.last)

    def describe(self) -> str:
        """The numbers, for a person."""
        if self.last is None:
            return f"batches from {self.first} on are missing"
        if self.last == self.first:
            return f"batch {self.first} is missing"
        return f"batches {self.first} to {self.last} are missing"


class DamageNote(msgspec.Struct, frozen=True):
    """What damage to a journal has cost; it stays beside the journal's files.

    Attributes:
        run_id, writer_id, attempt, rank: Whose journal it is.
        found_at: When it was found.
        lost: What is gone.
        damage: What is wrong with which file.
    """

    run_id: str
    writer_id: str
    attempt: int
    rank: int
    found_at: str
    lost: tuple[LostBatches, ...] = ()
    damage: tuple[str, ...] = ()


class JournalFolder:
    """The folder of one writer's journal.

    Args:
        path: The folder.
        storage_dir: The storage root that it belongs to, where that is known.
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
        self._set_aside([path for path in (self.path / _MANIFEST,) if _is_strange(path)])
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
        manifest = self._read_note(_MANIFEST, Manifest, "is left alone")
        if manifest is None:
            return None
        placed = self._place(manifest)
        if placed is None:
            _log.warning(
                "the journal %s is ignored: its header names run %r, writer %r",
                self.path,
                manifest.run_id,
                manifest.writer_id,
            )
        return placed

    def _read_note(self, name: str, kind: type[_T], otherwise: str) -> _T | None:
        """What a file of the journal says; None where it is not there, or says nothing of it."""
        try:
            return decode_foreign(read_plain_file(self.path / name), kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the journal %s %s: %s", self.path, otherwise, error)
            return None

    def read_home(self) -> Path | None:
        """Where the journal was begun, which is elsewhere if its store was moved or copied."""
        manifest = self._read_note(_MANIFEST, Manifest, "is left alone")
        if manifest is None:
            return None
        run_path = Path(manifest.run_path)
        return journal_directory(run_path, manifest.run_id) / self.path.name

    def _place(self, manifest: Manifest) -> Manifest | None:
        """The manifest with the paths that follow from where the folder lies.

        The root may have been moved or copied, or be somebody else's: what counts
        is the place. None where the manifest is of another run or writer.
        """
        storage_dir, run_path = self._storage_dir, Path(manifest.run_path)
        parents = self.path.parents
        if len(parents) > 4 and parents[0].name == "journal" and parents[3].name == ".quark":
            run_path = parents[1]
            storage_dir = storage_dir or parents[4]
            run_id = run_path.name
        elif len(parents) > 1 and parents[1] == _journal_root():
            storage_dir = storage_dir or Path(manifest.storage_dir)
            run_id = parents[0].name
            run_path = storage_dir / ".quark" / "runs" / run_id
        else:
            return manifest
        if (manifest.run_id, lane_folder_name(manifest.writer_id)) != (run_id, self.path.name):
            return None
        return msgspec.structs.replace(
            manifest, storage_dir=str(storage_dir), run_path=str(run_path)
        )

    def lease(self, lane: str) -> Lease:
        """The lease of a lane."""
        return Lease(self.path / _LANES / f"{lane_folder_name(lane)}.lease")

    def mark(self, lane: str) -> LaneMark:
        """How far a lane is."""
        return LaneMark(self.path / _LANES / f"{lane_folder_name(lane)}.mark")

    def close(self) -> None:
        """Note that nothing more will be written here, though the process lives on."""
        self._touch(_CLOSED)

    @property
    def lacks_end(self) -> bool:
        """Whether neither its process has ended the journal, nor another one for it."""
        return not any((self.path / name).exists() for name in (_CLOSED, END_MARK))

    def set_strange_aside(self) -> None:
        """Put away what is of another kind in the place of a file or folder of the journal.

        Links that lead somewhere stay, since they may lead out of the journal, and so does what
        says whose the journal is: without it nobody would deliver the rest.

        Raises:
            OSError: It cannot be renamed.
        """
        lanes = self.path / _LANES
        if os.path.lexists(lanes) and not lanes.is_dir():
            found = [lanes]
        else:
            found = [path for path in lanes.glob("*") if _is_strange(path)]
        found += [path for path in self.path.glob(f"*{SEGMENT_SUFFIX}") if _is_strange(path)]
        marks = (self.path / name for name in (_DAMAGE, _CLOSED, _STORED, END_MARK))
        found += [path for path in marks if _is_strange(path)]
        self._set_aside(found)

    def _set_aside(self, paths: Sequence[Path]) -> None:
        for path in paths:
            # Not in the folders of journal and run, which are looked at before they are used.
            parents = self.path.parents
            is_in_store = len(parents) > 3 and parents[3].name == ".quark"
            place = parents[3] if is_in_store else parents[1]
            name = f"{self.path.name}-{path.name}-{time.time_ns() // 1000}"
            aside = place / "aside" / name
            aside.parent.mkdir(exist_ok=True)
            os.rename(path, aside)
            _log.error(
                "another program replaced a file or folder of the journal by %s; it is kept in %s",
                path,
                aside,
            )

    def note_stored(self) -> None:
        """Note that the primary has all that was ever written here."""
        self._touch(_STORED)

    def _touch(self, name: str) -> None:
        try:
            (self.path / name).touch()
        except OSError as error:
            _log.debug("the journal %s cannot be marked as %s: %s", self.path, name, error)

    @property
    def is_stored(self) -> bool:
        """Whether the primary is known to have all that was ever written here."""
        return (self.path / _STORED).exists()

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

    def note_damage(
        self, manifest: Manifest, lost: Sequence[LostBatches], damage: Sequence[str]
    ) -> None:
        """Keep on disk what was found to be gone, before anything behind it is delivered."""
        note = self.read_damage() or DamageNote(
            manifest.run_id,
            manifest.writer_id,
            manifest.attempt,
            manifest.rank,
            format_time(now_us()),
        )
        note = msgspec.structs.replace(
            note,
            lost=tuple(dict.fromkeys((*note.lost, *lost))),
            damage=tuple(dict.fromkeys((*note.damage, *damage))),
        )
        scratch = self.path / f"{_DAMAGE}.part"
        try:
            scratch.write_bytes(msgspec.json.encode(note))
            os.replace(scratch, self.path / _DAMAGE)
        except OSError as error:
            _log.warning("the damage to the journal %s cannot be saved: %s", self.path, error)

    def read_damage(self) -> DamageNote | None:
        """What damage has cost, or None where nobody has found any."""
        return self._read_note(_DAMAGE, DamageNote, "has damage that cannot be read")

    def set_aside(self, *, unknown: Mapping[str, int] | None = None) -> None:
        """Keep the files of a damaged journal, which every lane has passed, as they are.

        From now on it is no journal that anybody delivers.
        """
        self._note_delivery(unknown or {})
        with suppress(FileNotFoundError):
            os.replace(self.path / _MANIFEST, self.path / _ASIDE)

    def prune(self) -> None:
        """Delete the bare folders that a lease makes again after another process's `remove`."""
        if not (self.path / _MANIFEST).exists():
            path = self.path
            _remove_empty(path / _LANES, path, path.parent, path.parent.parent)


def _is_strange(path: Path) -> bool:
    """Whether something is there that is no file; what a link leads to is not judged here."""
    return (
        os.path.lexists(path) and not path.is_file() and not (path.is_symlink() and path.exists())
    )


def _remove_empty(*paths: Path) -> None:
    """Remove folders, each within the next, up to the first that is not empty."""
    for path in paths:
        try:
            path.rmdir()
        except OSError:
            return


def journal_directory(run_path: Path, run_id: str) -> Path:
    """Where the journals of a run lie: under its directory, or under QUARK_JOURNAL_DIR."""
    root = _journal_root()
    return run_path / "journal" if root is None else root / run_id


def _journal_root() -> Path | None:
    root = os.environ.get(settings.JOURNAL_DIR, "").strip()
    return Path(root).expanduser().resolve() if root else None


def find_paths(root: Path, pattern: str) -> list[Path]:
    """The paths that match, sorted; folders that vanish meanwhile are passed over.

    `Path.glob` raises where a folder is removed while it looks, as whoever has delivered a
    journal removes it.
    """
    found = iglob(pattern, root_dir=root, include_hidden=True)
    return sorted(root / name for name in found)


def find_folders(storage_dir: Path, run_id: str | None = None) -> Iterator[JournalFolder]:
    """Every journal of a storage root, and those under QUARK_JOURNAL_DIR that belong to it.

    Args:
        storage_dir: The storage root.
        run_id: Only those of this run.
    """
    store = storage_dir / ".quark"
    if run_id is not None and Path(run_id).name != run_id:
        return  # no run's: it would lead out of the folder of runs
    run = "*" if run_id is None else escape(run_id)
    for path in find_paths(store / "runs", f"{run}/journal/*/{_MANIFEST}"):
        links = [each for each in (path, *path.parents[:4]) if each.is_symlink()]
        if links:
            _log.warning("the journal %s is ignored: %s", path.parent, describe_link(links[0]))
            continue
        yield JournalFolder(path.parent, storage_dir=storage_dir)
    root = _journal_root()
    if root is None:
        return
    for path in find_paths(root, f"{run}/*/{_MANIFEST}"):
        folder = JournalFolder(path.parent, storage_dir=storage_dir)
        try:
            said = decode_foreign(read_plain_file(path), _Said)
        except (OSError, msgspec.DecodeError):
            continue
        if Path(said.storage_dir) == storage_dir and folder.read_manifest() is not None:
            yield folder


def find_unreadable(storage_dir: Path) -> Iterator[tuple[JournalFolder, str]]:
    """Every journal under a storage root that is left alone, and why: its records wait."""
    for path in find_paths(storage_dir / ".quark" / "runs", f"*/journal/*/{_MANIFEST}"):
        folder = JournalFolder(path.parent, storage_dir=storage_dir)
        links = [each for each in (path, *path.parents[:4]) if each.is_symlink()]
        if links:
            yield folder, describe_link(links[0])
        elif os.path.lexists(path) and folder.read_manifest() is None:
            yield (folder, f"{path} does not name this journal, or names another one")


def find_damaged(
    storage_dir: Path, run_id: str | None = None
) -> Iterator[tuple[JournalFolder, DamageNote]]:
    """Every journal that damage has cost something, those that were set aside too.

    Args:
        storage_dir: The storage root.
        run_id: Only those of this run.
    """
    runs = storage_dir / ".quark" / "runs"
    run = "*" if run_id is None else escape(run_id)
    paths = find_paths(runs, f"{run}/journal/*/{_DAMAGE}")
    root = _journal_root()
    if root is not None:
        elsewhere = find_paths(root, f"{run}/*/{_DAMAGE}")
        # Only a run of this store has its folder here.
        paths += sorted(path for path in elsewhere if (runs / path.parent.parent.name).is_dir())
    for path in paths:
        folder = JournalFolder(path.parent)
        note = folder.read_damage()
        if note is not None:
            yield folder, note


class _Said(msgspec.Struct):
    storage_dir: str


# Joins the two parts of a journal whose store was moved while its process went on.
#
# A process that writes to a path makes its journal anew there when the storage root is renamed. The
# new part says where the old one is, which lies with the store. All of the run is put there once
# the process has ended; nothing is put where the old part is not found.

_JOURNALS = "journal"


def find_other_part(folder: JournalFolder) -> JournalFolder | None:
    """The part of a journal in another store; None where all of it is in one place."""
    manifest = folder.read_manifest()
    if manifest is None:
        return None
    if manifest.moved_to is not None:
        other = JournalFolder(Path(manifest.moved_to))
        said = other.read_manifest()
    else:
        home = folder.read_home()
        if home is None or home == folder.path:
            return None
        other = JournalFolder(home)
        said = other.read_manifest()
        if said is None or said.moved_to is None:
            return None
        if Path(said.moved_to) != folder.path and os.path.lexists(said.moved_to):
            return None  # this is a copy: the store itself is over there
    # Both say so: nobody else's folder can lead into a store, or out of it.
    if said is None or (said.run_id, said.writer_id, said.process) != (
        manifest.run_id,
        manifest.writer_id,
        manifest.process,
    ):
        return None
    # What is mounted over a store makes its path anew, and both parts have the same name. A part
    # that is put to itself is deleted.
    with suppress(OSError):
        return None if os.path.samefile(other.path, folder.path) else other
    return None


def join_parts(folders: Iterable[JournalFolder]) -> Iterator[JournalFolder]:
    """Journals, each whole and where its store is; may be repeated at any time."""
    seen = set()
    for folder in folders:
        other = find_other_part(folder)
        if other is not None:
            manifest = folder.read_manifest()
            is_new = manifest is not None and manifest.moved_to is not None
            source, target = (folder, other) if is_new else (other, folder)
            try:
                if _join(source.path.parent, target.path.parent):
                    folder = target
            except OSError as error:
                _log.warning(
                    "the journal %s cannot be moved to %s: %s", source.path, target.path, error
                )
        if folder.path not in seen and folder.path.is_dir():
            seen.add(folder.path)
            yield folder


def _join(source: Path, target: Path) -> bool:
    """Put a run's journals and files where its store is; whether its processes have ended.

    Args:
        source: The folder of the run's journals that was made anew.
        target: The one that was moved.
    """
    folders = [JournalFolder(path) for path in sorted(source.glob("*/"))]
    for folder in folders:
        manifest = folder.read_manifest()
        if manifest is not None and folder.is_written(manifest):
            return False
    run_path = source.parent
    if source == run_path / _JOURNALS and target.name == _JOURNALS:
        # Payloads come first: no record is delivered without its own.
        _move_files(run_path, target.parent, without=_JOURNALS)
        _move_files(run_path.parents[1] / "sources", target.parents[2] / "sources")
    for folder in folders:
        _move_journal(folder.path, target / folder.path.name)
    _log.info("the journals of %s were moved to its store, in %s", run_path.name, target)
    for path in (source, run_path, run_path.parent, run_path.parents[1] / "sources"):
        with suppress(OSError):
            path.rmdir()
    return True


def _move_files(source: Path, target: Path, *, without: str = "") -> None:
    """Move the files of a tree that are not there yet."""
    for folder, names, files in os.walk(source):
        if folder == str(source) and without in names:
            names.remove(without)
        for name in files:
            path = Path(folder, name)
            place = target / path.relative_to(source)
            if not os.path.lexists(place) and not path.is_symlink():
                _move(path, place)
    for folder, _, _ in os.walk(source, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)


def _move_journal(source: Path, target: Path) -> None:
    """Put the segments of a journal behind those that are there; what they are of goes last."""
    target.mkdir(parents=True, exist_ok=True)
    taken = [int(path.stem) for path in target.glob(f"*{SEGMENT_SUFFIX}") if path.stem.isdecimal()]
    newest = max(taken, default=0)
    for path in sorted(source.glob(f"*{SEGMENT_SUFFIX}")):
        newest = max(newest + 1, int(path.stem) if path.stem.isdecimal() else 0)
        _move(path, target / segment_name(newest))
    _move_files(source, target, without="lanes")
    shutil.rmtree(source, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Move a file, of which another process may be at the same; a crash leaves it whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        try:
            os.rename(source, target)
        except OSError:
            if not source.exists():
                raise FileNotFoundError(source) from None
            scratch = target.with_name(f"{target.name}.part")
            shutil.copyfile(source, scratch)
            with scratch.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(scratch, target)
            source.unlink()
