"""Payloads of other tools as artifacts."""

from __future__ import annotations

from pathlib import Path

from quark.importing.columns import encode_named
from quark.importing.foreign import ForeignFile
from quark.importing.losses import Losses
from quark_core.artifacts.payload_folder import PayloadFolder, open_source
from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media
from quark_core.config import settings
from quark_core.config.redaction import redact_record
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import ArtifactRecord
from quark_core.records.base import start_fields
from quark_core.records.json_object import normalize_object
from quark_core.records.names import object_path, split_name
from quark_core.records.schema import validate_record


class FileIntake:
    """Keeps payloads of one run.

    Args:
        folder: Where they go.
        losses: Told of what cannot be kept.
    """

    def __init__(self, folder: PayloadFolder, losses: Losses) -> None:
        self.folder = folder
        self._losses = losses

    def keep(self, item: ForeignFile) -> ArtifactRecord | None:
        """Keep a payload; its record, or None where it cannot be kept, which is told.

        Raises:
            SessionStoreError: There is no room for it.
        """
        try:
            return self._keep(item)
        except (SchemaValidationError, OSError) as error:
            self._losses.add(item.artifact_type, item.name, str(error))
            return None

    def _keep(self, item: ForeignFile) -> ArtifactRecord:
        key = encode_named(item.name.strip("/"))
        limit = settings.artifact_limit_bytes()
        if isinstance(item.content, Path):
            source, size_bytes = open_source(item.content)
            with source:
                _check_size(size_bytes, limit)
                put = self.folder.put_file(source, size_bytes)
            head = put.head
        else:
            _check_size(len(item.content), limit)
            put = self.folder.put_bytes(item.content)
            head = bytes(item.content[:HEAD_BYTES])
        if put.failure is not None:
            raise SessionStoreError(f"{item.name} cannot be kept: {put.failure}; make room")
        metadata = dict(item.metadata)
        if item.payload_format != "json":
            metadata.setdefault("media_type", identify_media(head))
        fields = (*start_fields(None)[:5], item.time_us or start_fields(None)[5])
        record = ArtifactRecord(
            *fields,
            item.artifact_type,
            key,
            *split_name(key),
            item.payload_format,
            put.size_bytes,
            put.sha256,
            item.step,
            None,
            object_path(put.sha256),
            None,
            normalize_object(metadata, "metadata"),
        )
        checked = validate_record(redact_record(record))
        assert isinstance(checked, ArtifactRecord)
        return checked


def _check_size(size_bytes: int, limit: int) -> None:
    if size_bytes > limit:
        raise SchemaValidationError(
            f"it has {size_bytes} bytes; an artifact may have {limit} at most "
            f"({settings.ARTIFACT_MAX_BYTES} sets another limit)"
        )
