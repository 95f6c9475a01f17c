"""What the mirror remembers: one file per writer, and whose each folder is.

A writer's lane is driven by one process at a time, so no two write one file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from quark_core.delivery.generation_journal import split_generation

__all__ = ["WriterState", "claim_folder", "load_writer", "save_writer"]

_FOLDER = "state"


class WriterState(msgspec.Struct, frozen=True):
    """How far a writer is mirrored, and where.

    Attributes:
        number: Its newest acknowledged batch.
        digest: Hash of that batch.
        place: Folder of its files, relative; "" before it has one.
        name: Name of its files.
        started_us: Time of its first record.
        sizes_bytes: main and media -> acknowledged size of the file.
        counts: Events by the name of their series.
    """

    number: int = -1
    digest: str = ""
    place: str = ""
    name: str = ""
    started_us: int = 0
    sizes_bytes: dict[str, int] = {}
    counts: dict[str, int] = {}


def load_writer(folder: Path, writer_id: str) -> WriterState:
    """A writer as it was last saved; a new one where there is none."""
    try:
        return msgspec.json.decode(_path_of(folder, writer_id).read_bytes(), type=WriterState)
    except (FileNotFoundError, msgspec.DecodeError):
        return WriterState()


def save_writer(folder: Path, writer_id: str, writer: WriterState) -> None:
    """Replace what is saved of a writer whole, and sync it."""
    path = _path_of(folder, writer_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part{os.getpid()}")
    with scratch.open("wb") as file:
        file.write(msgspec.json.encode(writer))
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def claim_folder(folder: Path, attempt: int, writer_id: str) -> str:
    """The folder for a writer's files: the attempt's own for its first process."""
    place = f"attempt-{attempt}" if attempt else "."
    if split_generation(writer_id) is not None:
        return f"{place}/writer-{_keep(writer_id)}"
    owner = folder / _FOLDER / f"owner-{attempt}"
    owner.parent.mkdir(parents=True, exist_ok=True)
    try:
        with owner.open("x") as file:
            file.write(writer_id)
            return place
    except FileExistsError:
        if owner.read_text() == writer_id:
            return place
    return f"{place}/writer-{_keep(writer_id)}"


def _path_of(folder: Path, writer_id: str) -> Path:
    return folder / _FOLDER / f"writer-{_keep(writer_id)}.json"


def _keep(writer_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", writer_id)
