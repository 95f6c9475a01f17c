"""Joins the two parts of a journal whose store was moved while its process went on.

A process that writes to a path makes its journal anew there when the storage root is renamed. The
new part says where the old one is, which lies with the store. All of the run is put there once the
process has ended; nothing is put where the old part is not found.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from quark_core.delivery.journal_folder import JournalFolder
from quark_core.delivery.segments import SEGMENT_SUFFIX, segment_name

_log = logging.getLogger("quark")

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
                    "the journal %s cannot be put to %s: %s", source.path, target.path, error
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
    _log.info("the journals of %s were put to its store, in %s", run_path.name, target)
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
