"""Where batches go that a backend will never take: a file each, with the reason."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from quark_core.backends.contract import Batch

_log = logging.getLogger("quark")


class QuarantinedBatch(msgspec.Struct, frozen=True):
    """A refused batch as its file holds it.

    Attributes:
        backend: Name of the lane's backend.
        reason: Why it was refused.
        batch: The batch.
        specification: How to ask for the backend, without secrets; older versions left it out.
        project: Name of the run's project, likewise.
    """

    backend: str
    reason: str
    batch: Batch
    specification: str = ""
    project: str = ""


class Quarantine:
    """The refused batches of one backend, as files in a directory of the run.

    The directory is made when the first batch comes. Where it cannot be
    written, the batch stays in memory, and one warning says so.

    Args:
        directory: The directory; None where batches are kept in memory alone.
        backend: Name of the lane's backend.
        specification: How to ask for it, without secrets.
        project: Name of the run's project.
    """

    def __init__(
        self, directory: Path | None, backend: str, *, specification: str = "", project: str = ""
    ) -> None:
        self.directory = self._directory = directory
        self._backend = backend
        self._specification = specification
        self._project = project
        self._in_memory: list[QuarantinedBatch] = []

    def put(self, batch: Batch, reason: str) -> None:
        """Keep a batch and why it was refused."""
        item = QuarantinedBatch(self._backend, reason, batch, self._specification, self._project)
        if self._directory is None:
            self._in_memory.append(item)
            return
        target = self._directory / _name_file(batch)
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

    def remove(self, batch: Batch) -> None:
        """Forget a batch that the backend has taken after all."""
        if self._directory is not None:
            (self._directory / _name_file(batch)).unlink(missing_ok=True)

    def load_first(self, writer_id: str, limit: int) -> list[QuarantinedBatch]:
        """The first batches of a writer that are kept here, in order, at most `limit`."""
        found = self._find(writer_id)
        return list(islice(_load_each(found[number] for number in sorted(found)), limit))

    def list_numbers(self, writer_id: str) -> set[int]:
        """The numbers of a writer's batches that are kept here."""
        return set(self._find(writer_id))

    def _find(self, writer_id: str) -> dict[int, Path]:
        if self._directory is None or not self._directory.is_dir():
            return {}
        found = {}
        for path in self._directory.glob(f"{_make_name(writer_id)}-*.batch"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal():
                found[int(number)] = path
        return found

    def load(self) -> list[QuarantinedBatch]:
        """Every batch kept here, those of earlier processes included."""
        found: list[QuarantinedBatch] = []
        if self._directory is not None and self._directory.is_dir():
            found = list(_load_each(sorted(self._directory.glob("*.batch"))))
        return found + self._in_memory


def _load_each(paths: Iterable[Path]) -> Iterator[QuarantinedBatch]:
    """The batches in files; one that cannot be read stays where it is, and holds up no other."""
    for path in paths:
        try:
            yield msgspec.msgpack.decode(path.read_bytes(), type=QuarantinedBatch)
        except FileNotFoundError:
            continue  # delivered by another process at this moment
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _log.warning("the refused records in %s cannot be read: %s", path, error)


def _name_file(batch: Batch) -> str:
    return f"{_make_name(f'{batch.writer_id}-{batch.number}')}.batch"


def _make_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)
