"""One offline folder of W&B's for a run, whatever number of processes has mirrored it.

W&B makes a folder for each process, and its server takes the rows of the second one for the first
ones of the run. So a process that ends puts what it has written behind what those before it have.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from quark_backends.wandb.log_file import HISTORY_KEY, LogFile

_BLOCK_BYTES = 32768
_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_PIECE = struct.Struct("<IHB")


def join_folders(root: Path, wandb_id: str, record_type: Any) -> Path | None:
    """Join the offline folders of a run to the oldest one; its file, or None where there is none.

    A damaged file stays as it is, and so do those after it. Whatever is killed meanwhile, each row
    is there once after the next call.

    Args:
        root: The folder `wandb` that they lie in.
        wandb_id: The run's id in W&B.
        record_type: W&B's class of a record.
    """
    found = [
        path for path in root.glob(f"offline-run-*/run-{wandb_id}.wandb") if not path.is_symlink()
    ]
    if not found:
        return None
    first, *later = sorted(found, key=lambda path: (path.stat().st_mtime_ns, str(path)))
    for path in later:
        if not _join(first, path, record_type):
            return first
        _move_files(path.parent / "files", first.parent / "files")
        shutil.rmtree(path.parent, ignore_errors=True)
    if later:
        _mend_links(root, first.parent)
    return first


def _join(first: Path, later: Path, record_type: Any) -> bool:
    """Put the records of a file behind those of another one; False where one is damaged."""
    joined = first.with_suffix(".joining")
    with joined.open("wb") as file:
        with first.open("rb") as source:
            file.write(source.read(_HEADER_BYTES))
        joiner = _Joiner(file)
        for path in (first, later):
            log = LogFile(path, record_type)
            for data in log.read_records():
                record = record_type.FromString(data)
                joiner.add(record, is_later=path is later)
            if log.damage is not None:
                joined.unlink()
                return False
        joiner.end()
    # Its age says that it is the oldest one, also where the other one cannot be removed now.
    age = first.stat()
    os.utime(joined, ns=(age.st_atime_ns, age.st_mtime_ns))
    os.replace(joined, first)
    # To W&B it is sent already, and it is not.
    first.with_name(f"{first.name}.synced").unlink(missing_ok=True)
    return True


class _Joiner:
    """Writes records of several files as those of one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = _HEADER_BYTES
        self._marks: set[str] = set()
        self._step = -1
        self._shift = 0
        self._count = 0
        self._tables: list[Any] = []
        self._preempting: Any = None
        self._end: list[Any] = []

    def add(self, record: Any, *, is_later: bool) -> None:
        """Add a record, in its order."""
        form = record.WhichOneof("record_type")
        if form == "preempting":
            self._preempting = record
        elif form == "exit":  # the run was preempted where the process that ended it last was
            self._end, self._preempting = [self._preempting, record], None
        elif form == "history":
            self._add_row(record)
        elif form != "final" and not (is_later and form == "header"):
            self._write(record)

    def end(self) -> None:
        """Write what stands at the end: tables, and how the run has ended."""
        for record in self._tables:
            self._number(record)
            self._write(record)
        for record in filter(None, self._end):
            self._write(record)

    def _add_row(self, record: Any) -> None:
        marks = _read_marks(record.history)
        if not marks:
            self._tables.append(record)
        elif not self._marks.issuperset(marks):
            self._marks.update(marks)
            self._number(record)
            self._write(record)

    def _number(self, record: Any) -> None:
        """Give a row a step beyond those before it, where it has none such."""
        history = record.history
        step = history.step.num + self._shift
        if step <= self._step:
            self._shift += self._step + 1 - step
            step = self._step + 1
        self._step = step
        if step == history.step.num:
            return
        history.step.num = step
        for item in history.item:
            if "_step" in (item.key, *item.nested_key):
                item.value_json = str(step)

    def _write(self, record: Any) -> None:
        self._count += 1
        record.num = self._count
        for piece in self._cut(record.SerializeToString()):
            self._file.write(piece)
            self._offset += len(piece)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        """The pieces of a record, as LevelDB's log has them; see `log_file`."""
        kind_of_first = _FULL
        while True:
            room = _BLOCK_BYTES - self._offset % _BLOCK_BYTES
            if room < _PIECE.size:
                yield bytes(room)
                continue
            part, data = data[: room - _PIECE.size], data[room - _PIECE.size :]
            if kind_of_first == _FULL:
                kind = _FIRST if data else _FULL
            else:
                kind = _MIDDLE if data else _LAST
            checksum = zlib.crc32(part, zlib.crc32(bytes([kind])))
            yield _PIECE.pack(checksum, len(part), kind) + part
            if not data:
                return
            kind_of_first = _FIRST


def _read_marks(history: Any) -> list[str]:
    for item in history.item:
        if HISTORY_KEY in (item.key, "/".join(item.nested_key)):
            return str(json.loads(item.value_json)).split(" ")
    return []


def _move_files(source: Path, target: Path) -> None:
    """Move files; one of the same name is replaced, since it is a newer one."""
    for folder, _, names in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.replace(Path(folder) / name, place / name)


def _mend_links(root: Path, first: Path) -> None:
    """W&B's links to its newest folder, which is gone."""
    for link in root.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
            if link.name == "latest-run":
                link.symlink_to(first.name)
