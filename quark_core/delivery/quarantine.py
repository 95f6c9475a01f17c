"""Where batches go that a backend will never take: a file each, with the reason."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import msgspec

from quark_core.backends.contract import Batch

__all__ = ["Quarantine", "QuarantinedBatch"]

_log = logging.getLogger("quark")


class QuarantinedBatch(msgspec.Struct, frozen=True):
    """A refused batch as its file holds it."""

    backend: str
    reason: str
    batch: Batch


class Quarantine:
    """The refused batches of one backend, as files in a directory of the run.

    The directory is made when the first batch comes. Where it cannot be
    written, the batch stays in memory, and one warning says so.
    """

    def __init__(self, directory: Path | None, backend: str) -> None:
        self.directory = self._directory = directory
        self._backend = backend
        self._in_memory: list[QuarantinedBatch] = []

    def put(self, batch: Batch, reason: str) -> None:
        """Keep a batch and why it was refused."""
        item = QuarantinedBatch(self._backend, reason, batch)
        if self._directory is None:
            self._in_memory.append(item)
            return
        name = _make_name(f"{batch.writer_id}-{batch.number}")
        target = self._directory / f"{name}.batch"
        scratch = target.with_suffix(".part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(msgspec.msgpack.encode(item))
            os.replace(scratch, target)
        except OSError as error:
            self._in_memory.append(item)
            _log.warning(
                "refused records of backend %s are kept in memory only: %s", self._backend, error
            )

    def load_first(self, writer_id: str, limit: int) -> list[QuarantinedBatch]:
        """The first batches of a writer that are kept here, in order, at most `limit`."""
        if self._directory is None or not self._directory.is_dir():
            return []
        numbers = []
        for path in self._directory.glob(f"{_make_name(writer_id)}-*.batch"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal():
                numbers.append((int(number), path))
        first = [path for _, path in sorted(numbers)[:limit]]
        return [msgspec.msgpack.decode(path.read_bytes(), type=QuarantinedBatch) for path in first]

    def load(self) -> list[QuarantinedBatch]:
        """Every batch kept here, those of earlier processes included."""
        found: list[QuarantinedBatch] = []
        if self._directory is not None and self._directory.is_dir():
            found = [
                msgspec.msgpack.decode(path.read_bytes(), type=QuarantinedBatch)
                for path in sorted(self._directory.glob("*.batch"))
            ]
        return found + self._in_memory


def _make_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)
