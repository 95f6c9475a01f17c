"""The mirror's append-only CSV files and the state that says how far they are acknowledged."""

from __future__ import annotations

import csv
import io
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from quark_backends.mirroring.saved_state import load_state, replace_file
from quark_core.api import ProcessIdentity, current_process, is_alive

_OWNER = "owner.json"
# Windows would translate line ends without it.
_BINARY = getattr(os, "O_BINARY", 0)


class CsvWriter(msgspec.Struct):
    """A writer that has sent batches, and the newest that is acknowledged."""

    attempt: int
    rank: int
    started_us: int
    head: int = -1
    digest: str = ""


class CsvState(msgspec.Struct):
    """What is acknowledged: one entry per writer; length and number of columns of each file."""

    writers: dict[str, CsvWriter] = {}
    sizes_bytes: dict[str, int] = {}
    widths: dict[str, int] = {}


def load_csv_state(path: Path) -> CsvState:
    """What was last acknowledged; a damaged file must not cost the rows that it speaks of.

    Raises:
        OSError: The file cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    return load_state(path, CsvState, forgives=False)


class AppendOnlyTable:
    """One CSV file with a header. What lies beyond the acknowledged size is cut off.

    Args:
        path: The file; it is made with its header when the first rows come.
        header: Names of the columns.

    Attributes:
        size_bytes: How much of it is acknowledged.
        width: How many columns the file has as far as that is acknowledged, or 0.
    """

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self.path = path
        self.size_bytes = 0
        self.width = 0
        self._header = list(header)
        self._written = list(header)

    def widen(self) -> bool:
        """Take one step towards a file that has all columns, which another version's may lack.

        The file is replaced whole. Returns whether `size_bytes` or `width`
        has changed; they count only when the caller has saved them, and then
        it calls again.
        """
        self._written = self._header
        if self.size_bytes == 0:
            return False
        try:
            with self.path.open("rb") as file:
                first = file.readline().decode("utf-8", "replace")
        except FileNotFoundError:
            return False
        there = next(csv.reader([first]), [])
        if not first.endswith("\n") or there[-1:] != self._header[-1:]:
            # Nothing of ours, or nothing whole.
            return False
        if self.width == 0:
            # Saved before the file is replaced: it tells afterwards whether that was done.
            self.width = len(there)
            return True
        if self.width != len(there):
            # It was replaced, and the process died before that was saved.
            self.size_bytes, self.width = self.path.stat().st_size, len(there)
            return True
        known = set(there)
        blanks = [name for name in self._header if name not in known]
        self._written = [*there[:-1], *blanks, there[-1]]
        if not blanks:
            return False
        acknowledged = self.path.read_bytes()[: self.size_bytes].decode("utf-8", "replace")
        rows = csv.reader(io.StringIO(acknowledged, newline="\n"))
        next(rows)
        wider = ([*row[:-1], *("" for _ in blanks), row[-1]] for row in rows)
        data = encode_rows([self._written, *wider])
        replace_file(self.path, data, is_synced=True)
        self.size_bytes, self.width = len(data), len(self._written)
        return True

    def append(self, rows: Iterable[Sequence[Any]]) -> int:
        """Write rows after the acknowledged part and sync them; returns the new size.

        The new size counts only when the caller has saved it and sets `size_bytes`.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            size_bytes = self._find_end(descriptor)
            if size_bytes == 0:
                self._written = self._header
                data = encode_rows([self._header, *rows])
            else:
                data = encode_rows(self._arrange(rows))
            # An attempt that failed half way has left rows that nobody acknowledged.
            os.ftruncate(descriptor, size_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.width = len(self._written)
        return size_bytes + len(data)

    def _arrange(self, rows: Iterable[Sequence[Any]]) -> Iterable[Sequence[Any]]:
        """Rows in the order of the file's columns, empty where it has one that is not ours."""
        if self._written == self._header:
            return rows
        places = {name: place for place, name in enumerate(self._header)}
        order = [places.get(name) for name in self._written]
        return (["" if place is None else row[place] for place in order] for row in rows)

    def _find_end(self, descriptor: int) -> int:
        """Where to go on: after what is acknowledged, or what somebody has left of it."""
        there = os.fstat(descriptor).st_size
        if there >= self.size_bytes:
            return self.size_bytes
        os.lseek(descriptor, 0, os.SEEK_SET)
        left = b""
        while len(left) < there and (piece := os.read(descriptor, there - len(left))):
            left += piece
        return left.rfind(b"\n") + 1


def encode_rows(rows: Iterable[Sequence[Any]]) -> bytes:
    """Rows as CSV in UTF-8, each ended by a line feed; cells of line breaks are quoted."""
    kept = rows if isinstance(rows, list) else list(rows)
    plain = _join_plain(kept)
    if plain is not None:
        return plain
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(kept)
    text = buffer.getvalue()
    if "\r" in text:
        lines: list[str] = []
        csv.writer(_Lines(lines)).writerows(kept)
        text = "".join(lines)
    return text.encode("utf-8", "replace")


def _join_plain(rows: list[Sequence[Any]]) -> bytes | None:
    """What csv.writer would write, in a quarter of its time; None where a cell must be quoted."""
    try:
        text = "\n".join(map(",".join, rows)) + "\n"
    except TypeError:
        return None  # numbers
    separators = sum(map(len, rows)) - len(rows)
    if '"' in text or "\r" in text or text.count("\n") != len(rows):
        return None
    if text.count(",") != separators or (rows and min(map(len, rows)) < 2):
        return None
    return text.encode("utf-8", "replace")


class _Lines:
    """Takes what csv.writer writes, and ends each row by a line feed alone.

    The writer quotes a carriage return only where that is part of its line
    end, and a row at a time takes it longer.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, row: str) -> None:
        self._lines.append(f"{row[:-2]}\n")


class FolderClaim:
    """A process's hold on a run's folder in the mirror.

    The first process has the files of plain names. Another one, while that
    lives, gets files of its own beside them. Mirrors of one process share
    what it has, one write at a time.

    Args:
        folder: The run's folder; made if it is not there.

    Attributes:
        suffix: What the files' names end in; "" for the first process.
        lock: Held while the files are changed.
    """

    _counts: ClassVar[Counter[Path]] = Counter()
    _locks: ClassVar[dict[Path, threading.Lock]] = {}
    _guard = threading.Lock()

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        own = current_process()
        path = folder / _OWNER
        with self._guard:
            self.suffix = "" if _take_folder(path, own) else f"-{own.pid}-{own.started}"
            self._counts[folder] += 1
            self.lock = self._locks.setdefault(folder, threading.Lock())

    def release(self) -> None:
        """Give it up; with the last one of this process the next process may have the folder."""
        with self._guard:
            self._counts[self._folder] -= 1
            if self._counts[self._folder] <= 0 and self.suffix == "":
                (self._folder / _OWNER).unlink(missing_ok=True)


def _take_folder(path: Path, own: ProcessIdentity) -> bool:
    """Make a process the owner that a file names, if nobody else is it; whether it is now."""
    for _ in range(3):  # several processes of a launch may begin at the same moment
        if _add(path, msgspec.json.encode(own)):
            return True
        owner = _load_owner(path)
        if owner == own:
            return True
        if owner is not None and is_alive(owner) is not False:
            return False
        aside = path.with_name(f"{_OWNER}.gone{os.getpid()}-{os.urandom(3).hex()}")
        try:
            # Of several that find the owner gone, one moves its file away.
            os.rename(path, aside)
        except OSError:
            continue
        moved = _load_owner(aside)
        if moved != owner and moved is not None:
            _add(path, msgspec.json.encode(moved))  # somebody was quicker: put it back
        aside.unlink(missing_ok=True)
    return False


def _load_owner(path: Path) -> ProcessIdentity | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _add(path: Path, data: bytes) -> bool:
    """Make a file whole if there is none; whether it was made."""
    scratch = path.with_name(f"{path.name}.part{os.getpid()}-{os.urandom(3).hex()}")
    try:
        scratch.write_bytes(data)
        os.link(scratch, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without links.
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
    finally:
        scratch.unlink(missing_ok=True)
    return True
