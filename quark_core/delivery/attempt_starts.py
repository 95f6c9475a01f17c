"""The starts of attempts in journals: which journal comes first, and what becomes of a late start.

A store takes nothing of a run that was never started there, so the journal that
begins an attempt is delivered before the others. The start of a run that was
begun while the primary was out of reach comes there later than what others have
begun meanwhile. A start that finds its attempt taken is given the next one that
is free, and the store says so by an event of the run. A start that the store
refuses for good, such as that of a run that was removed there, leaves nothing of
its process to be stored: then all of it goes to the quarantine, where nothing is
lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Self

from quark_core.backends.contract import Backend, Batch, SupportsRead
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.delivery.quarantine import Quarantine, QuarantinedBatch
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import EventRecord, LifecycleRecord
from quark_core.records.query import Query

_log = logging.getLogger("quark")

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
            self.refusal = f"its start was refused: {reason}"

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
        _log.debug("run %s: whether its attempt was settled is not known: %s", batch.run_id, error)
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
