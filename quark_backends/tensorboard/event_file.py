"""Event files, of which only the acknowledged part counts, and how far that goes.

Of each writer there is one file that says so, and of each folder one that says
whose it is. A writer's lane is driven by one process at a time, so no two write
one file.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.mirroring.saved_state import load_state, make_file_name, save_state
from quark_core.api import split_generation

_FOLDER = "state"
_PLACE = re.compile(r"(?:\.|attempt-[0-9]+)?(?:/writer-[A-Za-z0-9_-]+)?")
_NAME = re.compile(r"events\.out\.tfevents\.[0-9]+\.[A-Za-z0-9_-]*")
_BINARY = getattr(os, "O_BINARY", 0)
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


class EventFile:
    """Appends events after the acknowledged part, and cuts off what lies beyond it.

    A reader that has seen what is cut off loses nothing: the same batch makes
    the same bytes again.

    Args:
        path: The file; made at the first append, with the version that
            TensorBoard expects first.
        checksum: TensorBoard's masked CRC-32C.
        header: The event that an event file begins with, encoded.
    """

    def __init__(self, path: Path, checksum: Any, header: bytes) -> None:
        self.path = path
        self._checksum = checksum
        self._header = header

    def append(self, events: Iterable[bytes], size_bytes: int) -> int:
        """Write events and sync them; returns the new size, which the caller acknowledges.

        Args:
            events: Encoded events.
            size_bytes: What is acknowledged.

        Raises:
            OSError: The file cannot be written; it may be called again.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            # Shorter than that where somebody has emptied it: what was there is gone anyway.
            size_bytes = min(size_bytes, os.fstat(descriptor).st_size)
            head = [] if size_bytes else [self._header]
            data = b"".join(self._frame(event) for event in (*head, *events))
            os.ftruncate(descriptor, size_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size_bytes + len(data)

    def _frame(self, event: bytes) -> bytes:
        length = _LENGTH.pack(len(event))
        return b"".join(
            (
                length,
                _CHECKSUM.pack(self._checksum(length)),
                event,
                _CHECKSUM.pack(self._checksum(event)),
            )
        )


class EventFileState(msgspec.Struct, frozen=True):
    """How far a writer is mirrored, and where.

    Attributes:
        number: Its newest acknowledged batch.
        digest: Hash of that batch.
        place: Folder of its files, relative; "" before it has one.
        name: Name of its files.
        started_us: Time of its first record.
        sizes_bytes: main and media -> acknowledged size of the file.
        counts: Events by the name of their curve.
    """

    number: int = -1
    digest: str = ""
    place: str = ""
    name: str = ""
    started_us: int = 0
    sizes_bytes: dict[str, int] = {}
    counts: dict[str, int] = {}


def load_writer(folder: Path, writer_id: str) -> EventFileState:
    """A writer as it was last saved; a new one where there is none."""
    found = load_state(_path_of(folder, writer_id), EventFileState)
    # The folder may be somebody's who means files elsewhere.
    own = _PLACE.fullmatch(found.place) and (not found.name or _NAME.fullmatch(found.name))
    return found if own else EventFileState()


def save_writer(folder: Path, writer_id: str, writer: EventFileState) -> None:
    """Replace what is saved of a writer whole, and sync it."""
    save_state(_path_of(folder, writer_id), writer, is_synced=True)


def claim_folder(folder: Path, attempt: int, writer_id: str) -> str:
    """The folder for a writer's files: the attempt's own for its first process."""
    place = f"attempt-{attempt}" if attempt else "."
    if split_generation(writer_id) is not None:
        return f"{place}/writer-{make_file_name(writer_id, has_dots=False)}"
    owner = folder / _FOLDER / f"owner-{attempt}"
    owner.parent.mkdir(parents=True, exist_ok=True)
    try:
        with owner.open("x") as file:
            file.write(writer_id)
            return place
    except FileExistsError:
        if owner.read_text() == writer_id:
            return place
    return f"{place}/writer-{make_file_name(writer_id, has_dots=False)}"


def _path_of(folder: Path, writer_id: str) -> Path:
    return folder / _FOLDER / f"writer-{make_file_name(writer_id, has_dots=False)}.json"
