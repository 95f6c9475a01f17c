"""Folders that may be somebody else's, or gone: what leads out of them, and whether they moved."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

__all__ = [
    "Place",
    "describe_link",
    "find_foreign_link",
    "is_surely_gone",
    "note_place",
    "read_plain_file",
]

# W&B links its own log, which it keeps in the user's cache, and writes a new link each time.
_KNOWN = "debug-core.log"


def find_foreign_link(folder: Path, *, without: Collection[str] = ()) -> Path | None:
    """A link in a folder that leads out of it, or a pipe or device in it; None where there is none.

    The folder itself must be none either. What is not there holds nothing.

    Args:
        folder: The folder, which is gone through whole.
        without: Names of folders directly in it that are left out.
    """
    if folder.is_symlink():
        return folder
    root = os.path.realpath(folder)
    for entry in _walk(folder, without):
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath((root, target)) != root and entry.name != _KNOWN:
                return Path(entry.path)
        elif not entry.is_dir() and not entry.is_file():
            mode = entry.stat(follow_symlinks=False).st_mode
            if not stat.S_ISSOCK(mode):
                return Path(entry.path)
    return None


def describe_link(link: Path) -> str:
    """What to say of what `find_foreign_link` has found."""
    kind = "a link that leads out of its folder" if link.is_symlink() else "no plain file"
    return f"{link} is {kind}, and may be somebody's trap: remove it, or move that folder away"


def read_plain_file(path: Path) -> bytes:
    """All of a regular file; a link is not followed, and a pipe not waited for.

    Raises:
        OSError: It is not there, is something else, or cannot be read.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, os.O_RDONLY | flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no plain file")
        return file.read()


def _walk(folder: Path, without: Collection[str]) -> Iterator[os.DirEntry[str]]:
    left = [os.fspath(folder)]
    while left:
        place = left.pop()
        try:
            with os.scandir(place) as entries:
                found = list(entries)
        except OSError:
            continue
        for entry in found:
            if place == os.fspath(folder) and entry.name in without:
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)


_MAX_NEIGHBOURS = 100_000


class Level(msgspec.Struct, frozen=True, array_like=True):
    """One folder on the way from a place to the root of the file system.

    Attributes:
        path: Its path, without links.
        device: Of its file system; of the next one above where it was not there.
        inode: Its own number; 0 where it was not there.
    """

    path: str
    device: int
    inode: int


class Place(msgspec.Struct, frozen=True):
    """A folder, and what is above it.

    Attributes:
        path: As it was given.
        levels: It without links, the one above, and so on.
    """

    path: str
    levels: tuple[Level, ...]


def note_place(path: Path) -> Place:
    """Note where a folder lies that is there, or is about to be made.

    Raises:
        OSError: That cannot be seen.
    """
    resolved = os.path.realpath(path)
    found: list[tuple[str, os.stat_result | None]] = []
    for folder in _climb(resolved):
        try:
            found.append((folder, os.lstat(folder)))
        except FileNotFoundError:
            found.append((folder, None))
    levels: list[Level] = []
    device = -1
    for folder, status in reversed(found):
        device = device if status is None else status.st_dev
        levels.append(Level(folder, device, 0 if status is None else status.st_ino))
    return Place(str(path), tuple(reversed(levels)))


def is_surely_gone(place: Place) -> bool:
    """Whether a folder was deleted, rather than moved a little or out of reach.

    It is where neither it nor what it led to by links is there, the nearest
    folder above that is still there lies on the device of before, and so did
    everything below it. A disk or share that is not mounted leaves a folder of
    another device. A folder that was only renamed, or one above it, is found beside
    its old name.
    """
    if _find_device(place.path) is not None:
        return False
    missing: list[Level] = []
    for level in place.levels:
        device = _find_device(level.path)
        if device is None:
            missing.append(level)
            continue
        is_same = {device, *(each.device for each in missing)} == {level.device}
        if not (missing and is_same):
            return False
        return not _has_moved(level.path, missing)
    return False


def _find_device(path: str) -> int | None:
    """The device that something lies on; None where there is nothing, -1 where nobody can see."""
    try:
        return os.lstat(path).st_dev
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return -1


def _has_moved(folder: str, missing: Sequence[Level]) -> bool:
    """Whether what is missing lies in a folder under another name; so where nobody can see.

    Numbers are given again to new folders, so that what was in them is looked for, too.
    """
    wanted = {each.inode: each.path for each in missing if each.inode}
    try:
        with os.scandir(folder) as entries:
            found = [each for each in islice(entries, _MAX_NEIGHBOURS) if each.inode() in wanted]
    except OSError:
        return True
    for entry in found:
        rest = os.path.relpath(missing[0].path, wanted[entry.inode()])
        if _find_device(os.path.join(entry.path, rest)) is not None:
            return True
    return False


def _climb(path: str) -> Iterator[str]:
    yield path
    while (above := os.path.dirname(path)) != path:
        path = above
        yield path
