"""Recognises batches that were sent again by someone who does not say when things were."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quark_backends.service.server.stores import WorkspaceStore
from quark_core.backend import Batch
from quark_core.errors import RunNotFoundError

__all__ = ["is_repeat"]


def is_repeat(store: WorkspaceStore, batches: Sequence[Batch]) -> bool:
    """Whether each batch is stored already, with the same records but for their time.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    return all(_is_stored(store, batch) for batch in batches)


def _is_stored(store: WorkspaceStore, batch: Batch) -> bool:
    try:
        found = store.read_batches(batch.run_id, batch.writer_id, batch.number, 1)
    except RunNotFoundError:
        return False
    if not found or (found[0].number, found[0].kind) != (batch.number, batch.kind):
        return False
    ours, theirs = batch.to_records(), found[0].to_records()
    return len(ours) == len(theirs) and all(
        msgspec.structs.replace(one, time_us=other.time_us) == other
        for one, other in zip(ours, theirs, strict=True)
    )
