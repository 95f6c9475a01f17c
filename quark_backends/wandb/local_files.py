"""Files of the W&B mirror on this machine: its state, offline folders and log files."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

# What the mirror remembers on this machine: one file, `state.json` in its folder.
#
# It is not synced: what a power cut takes is found in W&B's own file again.

STATE_NAME = "state.json"


class WriterHead(msgspec.Struct):
    """How far a writer is mirrored: its newest batch, and a hash of that."""

    number: int = -1
    digest: str = ""


class WandbFile(msgspec.Struct):
    """W&B's file of one process of the mirror.

    Attributes:
        path: The file.
        offset: Where what is not acknowledged begins.
        synced: Whether W&B's server had all of it in the end, as far as is known.
    """

    path: str
    offset: int = 0
    synced: bool = False


class WandbState(msgspec.Struct):
    """All that a later process of the mirror must know.

    Attributes:
        wandb_id: Id of the W&B run, or "" before there was one.
        url: Address of its page, or "" where W&B has only been offline.
        entity: W&B's user or team, or "" likewise.
        attempt: Newest attempt that was seen.
        start: Data of that attempt's start.
        config: Values of the newest configuration.
        tags: Tags that came later.
        status: Newest attempt's status; running until it has another one.
        signal: Signal that ended it, such as SIGTERM, or "".
        exit_code: Status with which its process ended, where that is known.
        ending: Why it broke off, or "".
        writers: Writers by their ids.
        file: The newest process's file, or None.
        names: Name -> key in W&B, where that is another.
        counts: Events by the name of their curve.
        levels: Alert's rule -> highest severity that W&B was told of.
        layers: Layers that have curves, in the order they were chosen.
        parameters: Likewise parameters.
        left_out: Kind -> records that have no curve.
        steps: What W&B's own `_step` is: `own`, the run's steps; `kept`, those until they
            no longer ascended.
        sent_step: The newest `_step` of a row that W&B has.
        has_steps: Whether a metric has come with a step.
        newest_steps: The lowest step of each of the newest two batches of metrics.
        metric_keys: Keys of metrics whose axis is W&B's own.
        held: What `StepRows` holds.
        used: Artifacts of others that the run has used.
        started_us: When the run began, or 0 where that is not known.
        best: Value and step of the objective's points that were better than all before them,
            the newest ones.
        best_of: The objective that they are of, and its direction.
        best_attempt: The newest attempt that they are of.
    """

    wandb_id: str = ""
    url: str = ""
    entity: str = ""
    attempt: int = -1
    start: dict[str, Any] = {}
    config: dict[str, Any] = {}
    tags: list[str] = []
    status: str = "running"
    signal: str = ""
    exit_code: int | None = None
    ending: str = ""
    writers: dict[str, WriterHead] = {}
    file: WandbFile | None = None
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    levels: dict[str, int] = {}
    layers: list[str] = []
    parameters: list[str] = []
    left_out: dict[str, int] = {}
    steps: str = "own"
    sent_step: int = -1
    has_steps: bool = False
    newest_steps: list[int] = []
    metric_keys: list[str] = []
    held: bytes = b""
    used: list[str] = []
    started_us: int = 0
    best: list[tuple[float, int | None]] = []
    best_of: str = ""
    best_attempt: int = 0


# Reads what has been sent out of W&B's own file of a run, while it is written.
#
# The file begins with seven bytes and goes on as a log in LevelDB's format:
# blocks of 32 KiB, each record in one or more pieces of checksum, length and
# type. What is in the file stays there whoever is killed.

HISTORY_KEY = "quark/seq"
"""Key of the marks of a row's parts, `<writer>.<batch>.<part>`, with spaces between."""

_BLOCK_BYTES = 32768
_PIECE = struct.Struct("<IHB")
_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def mark_artifact(artifact: Any) -> str:
    """What tells an artifact in the file from those before it."""
    return f"{artifact.name}:{artifact.digest}"


class LogFile:
    """One file, read on from where the last call ended.

    Args:
        path: The file; it need not be there yet.
        record_type: W&B's class of a record.
        offset: Where a record begins: a former `offset`, or 0.

    Attributes:
        offset: After the last whole record that was read.
        damage: Why the last call could not read on, where that is no record half written.
    """

    def __init__(self, path: Path, record_type: Any, offset: int = 0) -> None:
        self.path = path
        self._record_type = record_type
        self.offset = max(offset, _HEADER_BYTES)
        self.damage: str | None = None

    def read_marks(self) -> Iterator[str]:
        """The marks of what has come to the file since the last call: rows' parts and artifacts."""
        for data in self.read_records():
            record = self._record_type()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "artifact":
                yield mark_artifact(record.artifact)
            if record.WhichOneof("record_type") != "history":
                continue
            for item in record.history.item:
                if HISTORY_KEY in (item.key, "/".join(item.nested_key)):
                    yield from json.loads(item.value_json).split(" ")

    def read_records(self) -> Iterator[bytes]:
        """What has come to the file since the last call, as W&B's records, not decoded yet."""
        self.damage = None
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        start, position = self.offset, 0
        parts: list[bytes] = []
        while position + _PIECE.size <= len(data):
            left = _BLOCK_BYTES - (start + position) % _BLOCK_BYTES
            if left < _PIECE.size:
                # The rest of a block that holds no piece is padding.
                position += left
                continue
            checksum, size_bytes, kind = _PIECE.unpack_from(data, position)
            end = position + _PIECE.size + size_bytes
            if size_bytes > left - _PIECE.size or (kind == 0 and (checksum or size_bytes)):
                self.damage = f"the record at byte {start + position} is damaged"
                return
            if end > len(data) or kind == 0:
                return
            piece = data[position + _PIECE.size : end]
            if zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
                self.damage = f"the record at byte {start + position} is damaged"
                return
            if kind in (_FULL, _FIRST):
                parts = []
            parts.append(piece)
            position = end
            if kind in (_FULL, _LAST):
                self.offset = start + position
                yield b"".join(parts)
                parts = []


# One offline folder of W&B's for a run, whatever number of processes has mirrored it.
#
# W&B makes a folder for each process, and its server takes the rows of the second one for the first
# ones of the run. So a process that ends puts what it has written behind what those before it have.


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
