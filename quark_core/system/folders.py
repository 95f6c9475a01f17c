"""Folders that may be foreign, moved or gone, and the private folder of this user."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

_T = TypeVar("_T")

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
    kind = "a link that leads out of its folder" if link.is_symlink() else "not a regular file"
    return f"{link} is {kind}, which may be an attack. Remove it, or move that folder away"


class NotPlainFile(OSError):
    """Something of another kind is in the place of a file."""


def read_plain_file(path: Path) -> bytes:
    """All of a regular file; a link is not followed, and a pipe not waited for.

    Raises:
        NotPlainFile: It is something else, such as a folder.
        OSError: It is not there, or cannot be read.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainFile(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def decode_foreign(data: bytes, kind: type[_T]) -> _T:
    """What JSON says that may be somebody else's.

    Raises:
        msgspec.DecodeError: It is something else, is no text, or is nested without an end.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None


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


def find_moved(place: Place) -> Path | None:
    """Where a folder lies that was renamed, or one above it; None where it is not beside."""
    missing: list[Level] = []
    for level in place.levels:
        if _find_device(level.path) is None:
            missing.append(level)
        elif missing:
            with suppress(OSError):
                return _find_renamed(level.path, missing)
            return None
        else:
            return None
    return None


def _has_moved(folder: str, missing: Sequence[Level]) -> bool:
    """Whether what is missing lies in a folder under another name; so where nobody can see."""
    try:
        return _find_renamed(folder, missing) is not None
    except OSError:
        return True


def _find_renamed(folder: str, missing: Sequence[Level]) -> Path | None:
    """What is missing, in a folder under another name.

    Numbers are given again to new folders, so that what was in them is looked for, too.

    Raises:
        OSError: Nobody can see.
    """
    wanted = {each.inode: each.path for each in missing if each.inode}
    with os.scandir(folder) as entries:
        found = [each for each in islice(entries, _MAX_NEIGHBOURS) if each.inode() in wanted]
    for entry in found:
        path = Path(entry.path, os.path.relpath(missing[0].path, wanted[entry.inode()]))
        if _find_device(str(path)) is not None:
            return path
    return None


def _climb(path: str) -> Iterator[str]:
    yield path
    while (above := os.path.dirname(path)) != path:
        path = above
        yield path


_MAX_BYTES = 64 * 1024


def find_private_folder(name: str) -> Path | None:
    """Where files of one purpose are; None where there is no home directory."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    # As the specification has it; one that counts from the working directory may be anybody's.
    if not os.path.isabs(given):
        given = os.path.expanduser("~/.config")
    return Path(given) / "quark" / name if os.path.isabs(given) else None


def write_private(path: Path, content: bytes) -> None:
    """Write a file whole, or leave the old one.

    Raises:
        OSError: It cannot be written.
    """
    scratch = path.with_name(f".{path.stem}-{os.urandom(4).hex()}")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    os.replace(scratch, path)


def read_private(path: Path) -> bytes | None:
    """What a file holds; None where there is none, or where another user can have put it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        return os.read(descriptor, _MAX_BYTES) if own and stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
