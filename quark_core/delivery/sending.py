"""How batches go to a backend: in groups, and each payload before the record that names it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import (
    Backend,
    Batch,
    Payload,
    SupportsArtifacts,
    SupportsPrimary,
)
from quark_core.records import ArtifactRecord
from quark_core.records.artifact_layout import KEPT_SOURCES, SOURCE_TEXTS

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


_log = logging.getLogger("quark")

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
                "run %s: the payload of artifact %s is gone; its record is kept without it",
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
