"""In which order the journals of a storage root are delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from quark_core.backend import Batch
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.errors import SchemaValidationError
from quark_core.records import LifecycleRecord

__all__ = ["order_journals"]

# The start is in the first tick, whose lifecycle comes after its other kinds.
_FIRST_BATCHES = 16


def order_journals(folders: Iterable[JournalFolder]) -> list[tuple[JournalFolder, Manifest]]:
    """Journals with what they say of themselves: of each attempt first the one that begins it.

    A store takes nothing of a run that was never started there, and where the
    journals are all that there is, one of them holds the start. Outputs of
    analyzers come after the run's records, the newest last.
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
        later = not alone and not generation and not _begins_attempt(folder)
        return run_id, generation, attempt, later, manifest.rank, str(folder.path)

    return sorted(found, key=place)


def _begins_attempt(folder: JournalFolder) -> bool:
    return any(map(_has_start, islice(JournalReader(folder.path).read(), _FIRST_BATCHES)))


def _has_start(batch: Batch) -> bool:
    if batch.kind != LifecycleRecord.KIND:
        return False
    try:
        return "start" in batch.decoded.to_list("action")
    except SchemaValidationError:
        return False  # damaged, or of a newer version: whoever is given it will say so
