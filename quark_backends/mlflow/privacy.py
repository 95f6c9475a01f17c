"""Ids of samples, which may name people, before they leave this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from quark_core.backend import Batch
from quark_core.codec import encode_records
from quark_core.records import BatchDiagnosticRecord

__all__ = ["hash_sample_ids"]

_LENGTH = 16


def hash_sample_ids(
    batch: Batch, records: Sequence[BatchDiagnosticRecord], project: str
) -> tuple[Batch, list[BatchDiagnosticRecord]]:
    """The batch and its records with hashes in place of ids.

    The same id gives the same hash in every run of a project, so that hard
    samples are found again. Small ids can be guessed from their hashes.
    """
    hashed = [
        record
        if record.sample_ids is None
        else msgspec.structs.replace(
            record, sample_ids=tuple(_hash(project, one) for one in record.sample_ids)
        )
        for record in records
    ]
    return msgspec.structs.replace(batch, body=encode_records(hashed)), hashed


def _hash(project: str, sample_id: int | str) -> str:
    text = f"{project}\0{type(sample_id).__name__}\0{sample_id}"
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_LENGTH]
