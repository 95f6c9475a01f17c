"""Sending of batches to a backend: starts first, in groups, with payloads; rejected ones apart."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import msgspec

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import (
    Backend,
    Batch,
    Payload,
    SupportsArtifacts,
    SupportsPrimary,
    SupportsRead,
)
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import ArtifactRecord, EventRecord, LifecycleRecord
from quark_core.records.names import KEPT_SOURCES, SOURCE_TEXTS
from quark_core.records.query import Query

_log = logging.getLogger("quark")


class QuarantinedBatch(msgspec.Struct, frozen=True):
    """A refused batch as its file holds it.

    Attributes:
        backend: Name of the lane's backend.
        reason: Why it was refused.
        batch: The batch.
        specification: How to ask for the backend, without secrets.
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
                "rejected records of backend %s are kept in memory only: %s", self._backend, error
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
            _log.warning("the rejected records in %s cannot be read: %s", path, error)


def _name_file(batch: Batch) -> str:
    return f"{_make_name(f'{batch.writer_id}-{batch.number}')}.batch"


def _make_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


# The starts of attempts in journals: which journal comes first, and what becomes of a late start.
#
# A store takes nothing of a run that was never started there, so the journal that
# begins an attempt is delivered before the others. The start of a run that was
# begun while the primary was out of reach comes there later than what others have
# begun meanwhile. A start that finds its attempt taken is given the next one that
# is free, and the store says so by an event of the run. A start that the store
# refuses for good, such as that of a run that was removed there, leaves nothing of
# its process to be stored: then all of it goes to the quarantine, where nothing is
# lost.

# The start is in the first tick, whose lifecycle comes after its other kinds.
_FIRST_BATCHES = 16

SETTLED = "attempt_settled"
"""Type of the event by which a store tells of an attempt that it gave another number."""


def has_start(batch: Batch) -> bool:
    """Whether a batch begins an attempt."""
    return _find_start(batch) is not None


class StartWatch:
    """Follows what becomes of one writer's start at the primary, for whoever delivers it.

    Args:
        refused: What the primary has refused of the writer before, its first batches first.

    Attributes:
        refusal: Why the primary has refused it, or None.
    """

    def __init__(self, refused: Iterable[QuarantinedBatch] = ()) -> None:
        self.refusal: str | None = None
        self._is_seen = False
        for item in refused:
            self.note_refused(item.batch, item.reason)

    @classmethod
    def of_journal(cls, quarantine: Quarantine, writer_id: str) -> Self:
        """Follow a writer that another process may have begun to deliver."""
        return cls(quarantine.load_first(writer_id, _FIRST_BATCHES))

    def note_refused(self, batch: Batch, reason: str) -> None:
        """A batch was refused."""
        if not self._is_seen and has_start(batch):
            self._is_seen = True
            self.refusal = f"its start was rejected: {reason}"

    def note_stored(self, backend: Backend, batches: list[Batch]) -> None:
        """Batches were stored; says on the log what the store has made of a start among them."""
        for batch in batches:
            data = None if self._is_seen else _find_start(batch)
            if data is not None:
                self._is_seen = True
                if data.get("offline") is not None:
                    _say_what_was_settled(backend, batch)


def _find_start(batch: Batch) -> dict[str, Any] | None:
    if batch.kind != LifecycleRecord.KIND:
        return None
    try:
        actions = batch.decoded.to_list("action")
        if "start" not in actions:
            return None
        return dict(batch.decoded.to_list("data")[actions.index("start")] or {})
    except (SchemaValidationError, TypeError, ValueError):
        return None  # damaged, or of a newer version: whoever is given it will say so


def _say_what_was_settled(backend: Backend, batch: Batch) -> None:
    reader: object = backend
    if not isinstance(reader, SupportsRead):
        return
    try:
        query = Query(equals={"event_type": SETTLED}, all_attempts=True)
        records = reader.read(batch.run_id, EventRecord.KIND, query).to_records()
    except QuarkError as error:
        _log.debug("run %s: it is unknown if its attempt was settled: %s", batch.run_id, error)
        return
    for record in records:
        payload = record.payload if isinstance(record, EventRecord) else None
        if payload is not None and payload.get("writer_id") == batch.writer_id:
            _log.warning("run %s: %s", batch.run_id, payload.get("message"))


def begins_attempt(folder: JournalFolder) -> bool:
    """Whether the start of an attempt is among the first batches of a journal."""
    # What is damaged is told by who delivers it.
    reader = JournalReader(folder.path, on_damage=lambda *_: None)
    return any(map(has_start, islice(reader.read(), _FIRST_BATCHES)))


def order_journals(
    folders: Iterable[JournalFolder], begins: Callable[[JournalFolder], bool] = begins_attempt
) -> list[tuple[JournalFolder, Manifest]]:
    """Journals with what they say of themselves: of each attempt first the one that begins it.

    A store takes nothing of a run that was never started there, and where the
    journals are all that there is, one of them holds the start. Outputs of
    analyzers come after the run's records, the newest last.

    Args:
        folders: The journals.
        begins: Says whether one of several of an attempt begins it.
    """
    found = [
        (folder, manifest) for folder in folders if (manifest := folder.read_manifest()) is not None
    ]
    writers = Counter(
        (manifest.run_id, manifest.attempt) for _, manifest in found if not manifest.generation
    )

    def place(entry: tuple[JournalFolder, Manifest]) -> tuple[str, int, int, bool, int, str]:
        folder, manifest = entry
        run_id, attempt, generation = manifest.run_id, manifest.attempt, manifest.generation
        alone = writers[run_id, attempt] == 1
        later = not alone and not generation and not begins(folder)
        return run_id, generation, attempt, later, manifest.rank, str(folder.path)

    return sorted(found, key=place)


GROUP_BATCHES = 64
"""No group has more batches."""

GROUP_RECORDS = 65_536
"""A group has no more records, unless its only batch has: it is in flight as a whole."""


def cut_groups(batches: Iterable[Batch], most: int = GROUP_BATCHES) -> Iterator[list[Batch]]:
    """The batches in groups, in order.

    Args:
        batches: Read no further than the group that is asked for needs.
        most: How many batches a group may have.
    """
    group: list[Batch] = []
    records = 0
    for batch in batches:
        if group and records + batch.count > GROUP_RECORDS:
            yield group
            group, records = [], 0
        group.append(batch)
        records += batch.count
        if len(group) >= most:
            yield group
            group, records = [], 0
    if group:
        yield group


FindPayload = Callable[[str], Path | None]
"""Where the payload of a hash lies, or None."""


def send_payloads(backend: Backend, batches: Sequence[Batch], find: Sequence[FindPayload]) -> None:
    """Give a backend the payloads that batches name, where it takes any.

    A payload that is nowhere any more (somebody has deleted it) is left out
    with a warning: its record still says what it was.

    Args:
        backend: The backend; one that takes no artifacts is left alone.
        batches: What is about to be written.
        find: Where payloads may lie, in the order to look.

    Raises:
        Exception: Whatever the backend raises.
    """
    if not isinstance(backend, SupportsArtifacts):
        return
    for run_id, record in list_payloads(batches):
        if not _is_welcome(backend, record):
            continue
        path = next((path for look in find if (path := look(record.sha256)) is not None), None)
        if path is None:
            _log.warning(
                "run %s: the payload of artifact %s is missing; its record is kept without it",
                run_id,
                record.artifact_key,
            )
            continue
        payload = Payload(
            run_id=run_id, sha256=record.sha256, size_bytes=record.size_bytes, path=path
        )
        backend.put_payload(payload)


def _is_welcome(backend: Backend, record: ArtifactRecord) -> bool:
    """Whether a backend is given a payload: a mirror may be anybody's, as a service may.

    What wants the code that runs are made of says so by an attribute `keeps_sources`; without it
    a primary is taken for the user's own.

    Raises:
        BackendUnavailable: It cannot be asked now.
    """
    if record.artifact_type != KEPT_SOURCES:
        return True
    is_primary = isinstance(backend, SupportsPrimary)
    if getattr(backend, "keeps_sources", is_primary):
        return True
    return is_primary and record.artifact_key not in SOURCE_TEXTS


def list_payloads(batches: Sequence[Batch]) -> Iterator[tuple[str, ArtifactRecord]]:
    """The artifacts in batches whose payloads are kept, with their runs."""
    for batch in batches:
        if batch.kind == ArtifactRecord.KIND:
            for record in batch.to_records():
                if isinstance(record, ArtifactRecord) and record.payload_relative_path is not None:
                    yield batch.run_id, record


def set_payloads_aside(batches: Sequence[Batch], find: FindPayload, directory: Path | None) -> None:
    """Keep the payloads of refused batches beside them, where their own place will go.

    Args:
        batches: The refused batches.
        find: Where the journal has payloads; what lies elsewhere stays there anyway.
        directory: Where the batches are kept; None where only memory has them.
    """
    if directory is None:
        return
    for _, record in list_payloads(batches):
        path = find(record.sha256)
        if path is None:
            continue
        try:
            with path.open("rb") as source:
                put = PayloadFolder(directory).put_file(source, record.size_bytes)
            reason = put.failure
        except OSError as error:
            reason = str(error)
        if reason is not None:
            _log.warning("the payload of artifact %s is lost: %s", record.artifact_key, reason)
