"""Which files an open connection writes to: those at its path, or some that took their place.

SQLite writes to numbers of descriptors and believes its index of the write-ahead log. Other code
of this process may close the numbers and open files of its own under them; another program may
delete the files, replace them, or cut the log. All of that is found before the next write.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quark_backends.store.databases.layout import LOG_SUFFIX, StoreLayout

_INDEX_SUFFIX = "-shm"
_WITH_DATABASE = ("", LOG_SUFFIX, _INDEX_SUFFIX)
_DELETED = (-1, -1)

# Of the index: two equal heads, then how many frames are in the database already.
_HEAD = struct.Struct("=IIIBBHIIII8s8x")
_INDEX_BYTES = 2 * _HEAD.size + 4
_LOG_HEAD_BYTES = 32
_FRAME_HEAD = struct.Struct(">8x8sII")


class FilesChanged(sqlite3.OperationalError):
    """A connection's files are not what it believes, so that nothing was written."""


class PutBack(FilesChanged):
    """The store is an older copy of itself, log included: it lacks what was committed in it."""


def identify(path: str) -> tuple[int, int] | None:
    """Which file a path leads to; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _identify_open(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _list_descriptors() -> list[int]:
    """The numbers that are open in this process; empty where the system does not say."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    return []


class LogIndex(NamedTuple):
    """SQLite's index of a write-ahead log, which all processes share.

    Attributes:
        frames: How many frames the log holds.
        settled: How many of them are in the database file.
        page_bytes: Size of a page.
        checksum: Of the last frame, which is one of all before it, too.
        salt: Tells this log from the one before.
    """

    frames: int
    settled: int
    page_bytes: int
    checksum: tuple[int, int]
    salt: bytes

    @classmethod
    def parse(cls, data: bytes) -> LogIndex | None:
        """Read an index; None where it is just being changed, or none is there."""
        size = _HEAD.size
        if len(data) < _INDEX_BYTES or data[:size] != data[size : 2 * size]:
            return None
        _, _, _, is_made, _, page_bytes, frames, _, first, second, salt = _HEAD.unpack_from(data)
        if not is_made:
            return None
        (settled,) = struct.unpack_from("=I", data, 2 * size)
        # 65,536 does not fit.
        page_bytes = (page_bytes & 0xFE00) + ((page_bytes & 1) << 16)
        return cls(frames, settled, page_bytes, (first, second), salt)


class Descriptors:
    """The numbers by which one connection has its files open.

    Opening and closing one of the files would give up the locks that SQLite has on it in this
    process, so all is read through SQLite's own descriptors.

    Args:
        path: The database file.
        before: Which numbers were open before the connection was.
    """

    opening = threading.Lock()
    """Held while a connection is opened, so that what is new is that connection's."""

    def __init__(self, path: str, before: set[int]) -> None:
        self.path = path
        self._index_bytes = 0
        self._files: dict[str, tuple[tuple[int, int], list[int]]] = {}
        wanted = {suffix: identify(path + suffix) for suffix in _WITH_DATABASE}
        found: dict[str, list[int]] = {suffix: [] for suffix in _WITH_DATABASE}
        for number in _list_descriptors():
            identity = _identify_open(number)
            for suffix, known in wanted.items():
                if identity is not None and identity == known:
                    found[suffix].append(number)
        for suffix, numbers in found.items():
            known = wanted[suffix]
            if known is not None and numbers:
                # A connection shares the index with others, and may be given a number again.
                own = [number for number in numbers if number not in before]
                self._files[suffix] = known, own or numbers
        self.mend_index()

    @staticmethod
    def list_open() -> set[int]:
        """The numbers that are open now."""
        return set(_list_descriptors())

    def check(self) -> None:
        """See that what is written comes to the database at the path.

        Raises:
            FilesChanged: It does not.
        """
        self.check_open()
        if "" in self._files and identify(self.path) != self._files[""][0]:
            raise FilesChanged(f"{self.path} was deleted, or is another file now")

    def mend_index(self) -> None:
        """Give the index of the log its length again where another program has cut it.

        SQLite reads it as memory: behind the end of the file the process would end by signal 7.
        With an empty head SQLite makes it anew out of the log.
        """
        if _INDEX_SUFFIX in self._files:
            self._find_taken((_INDEX_SUFFIX,))

    def _mend(self, number: int, size: int) -> None:
        # Where a file that is mapped cannot be cut its descriptor is no number of ours either.
        if size < self._index_bytes and sys.platform != "win32":
            with suppress(OSError):
                os.ftruncate(number, self._index_bytes)
                os.pwrite(number, bytes(_INDEX_BYTES), 0)
        self._index_bytes = max(self._index_bytes, size)

    @property
    def is_moved(self) -> bool:
        """Whether the database lies somewhere else now, and nothing is at its path."""
        identity, numbers = self._files.get("", (_DELETED, []))
        if identify(self.path) is not None:
            return False
        return any(
            _identify_open(number) == identity and os.fstat(number).st_nlink for number in numbers
        )

    def find_taken(self) -> list[str]:
        """The files that none of the numbers leads to any more: other code has closed them."""
        return [self.path + suffix for suffix in self._find_taken(self._files)]

    def _find_taken(self, suffixes: Iterable[str]) -> list[str]:
        # This is done before each transaction, so that it costs little more than to ask the system.
        taken, fstat = [], os.fstat
        for suffix in suffixes:
            (device, inode), numbers = self._files[suffix]
            for number in numbers:
                try:
                    found = fstat(number)
                except OSError:
                    continue
                if found.st_ino == inode and found.st_dev == device:
                    if suffix == _INDEX_SUFFIX and found.st_size != self._index_bytes:
                        self._mend(number, found.st_size)
                    break
            else:
                taken.append(suffix)
        return taken

    def check_open(self) -> None:
        """See that SQLite's descriptors are its own, and the index as long as it was.

        Costs about 3 us.

        Raises:
            FilesChanged: They are not.
        """
        if self._find_taken(self._files):
            taken = ", ".join(self.find_taken())
            raise FilesChanged(f"other code has closed {taken}, which SQLite writes to")

    def read_index(self) -> LogIndex | None:
        """The index of the log; None where it cannot be read."""
        return LogIndex.parse(self._read(_INDEX_SUFFIX, _INDEX_BYTES, 0))

    @property
    def is_settled(self) -> bool:
        """Whether the database file has all that is in the log, as far as the system can tell."""
        # Where a system cannot say, a journal that waited for an answer would stay for ever.
        if _INDEX_SUFFIX not in self._files or not hasattr(os, "pread"):
            return True
        index = self.read_index()
        # Most often it has not: then nothing need be known of whose the descriptors are.
        return index is not None and index.settled >= index.frames and not self.find_taken()

    def find_damage(self) -> str | None:
        """What is wrong with the log, while nobody else writes; None where it is as it was left.

        The last frame's checksum is one of all frames before it, so that a log that was cut,
        replaced or put back differs there.
        """
        index = self.read_index()
        if index is None or not index.frames or LOG_SUFFIX not in self._files:
            return None
        place = _LOG_HEAD_BYTES + (index.frames - 1) * (index.page_bytes + 24)
        frame = self._read(LOG_SUFFIX, _FRAME_HEAD.size, place)
        if len(frame) < _FRAME_HEAD.size:
            return f"it holds fewer than the {index.frames} frames that were written"
        salt, first, second = _FRAME_HEAD.unpack(frame)
        head = self._read(LOG_SUFFIX, _LOG_HEAD_BYTES, 0)
        if head[16:24] != index.salt or salt != index.salt:
            return "it is another log than the one that was written"
        if (first, second) != index.checksum:
            return "its last frame is not the one that was written"
        return None

    def _read(self, suffix: str, size: int, place: int) -> bytes:
        # Windows has no such call, and its descriptors are no numbers.
        if sys.platform == "win32" or not hasattr(os, "pread"):
            return b""
        identity, numbers = self._files.get(suffix, (_DELETED, []))
        for number in numbers:
            # Of several it is not known which are still its own; of one that was just seen.
            if len(numbers) == 1 or _identify_open(number) == identity:
                try:
                    return os.pread(number, size, place)
                except OSError:
                    continue
        return b""


class OpenFiles:
    """Which files an open connection writes to, as their paths were then.

    A file that was deleted stays open, and takes every write: only its path
    tells that nobody else will ever see them. A look costs a few microseconds.

    Args:
        layout: The store, right after it was opened.

    Attributes:
        main_look: Differs from before where the database file was written to; as `find_lost`
            has seen it last.
    """

    def __init__(self, layout: StoreLayout) -> None:
        path = str(layout.db_path)
        self.main_look: tuple[int, int, int] | None = None
        self._known = {path + suffix: identify(path + suffix) for suffix in _WITH_DATABASE}
        if self._known[path] is None:
            self._known[path] = _DELETED  # since it was opened
        self._layout = layout

    def note(self) -> None:
        """Know the files that SQLite makes at the first write."""
        for path, known in self._known.items():
            if known is None:
                self._known[path] = identify(path)

    def find_lost(self) -> list[Path]:
        """Those that are gone, or of which another one has taken the place."""
        lost = []
        self.main_look = None
        for path, known in self._known.items():
            if known is None:
                continue
            try:
                found = os.stat(path)
            except OSError:
                lost.append(Path(path))
                continue
            if (found.st_dev, found.st_ino) != known:
                lost.append(Path(path))
            if self.main_look is None:  # the database comes first
                self.main_look = found.st_ino, found.st_size, found.st_mtime_ns
        return lost

    @property
    def has_log(self) -> bool:
        """Whether there is a log at the path, be it the one that was opened or not."""
        return identify(f"{self._layout.db_path}{LOG_SUFFIX}") is not None

    @property
    def has_own_log(self) -> bool:
        """Whether the log is the one that was opened, and so goes with the database that was."""
        path = f"{self._layout.db_path}{LOG_SUFFIX}"
        return self._known[path] is not None and identify(path) == self._known[path]

    @property
    def has_database(self) -> bool:
        """Whether the database itself is the one that was opened."""
        path = str(self._layout.db_path)
        return identify(path) == self._known[path]
