"""ArtifactStore: keeps what is no scalar: histograms, snapshots, images, tables, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark_core.artifacts.payloads import EXTENSIONS, choose_format, encode_payload
from quark_core.records import ArtifactRecord
from quark_core.records.artifact_layout import (
    check_artifact_type,
)
from quark_core.writers.artifact_collections import CollectionArtifacts
from quark_core.writers.artifact_evaluations import EvaluationArtifacts
from quark_core.writers.artifact_links import check_aliases
from quark_core.writers.artifact_media import MediaArtifacts
from quark_core.writers.artifact_recordings import RecordingArtifacts


class ArtifactStore(MediaArtifacts, RecordingArtifacts, EvaluationArtifacts, CollectionArtifacts):
    """Stores artifacts of a run and reads them back. Every method may be called from any thread.

    A payload is taken, hashed and brought to the disk before the call
    returns, so what the caller changes later changes nothing; equal payloads
    of a run lie on the disk once (`ARTIFACT_STORAGE_LAYOUT` says where). One
    may have QUARK_ARTIFACT_MAX_BYTES (50 GB) at most. `log_video` of a file and
    `log_directory` return before that, with a `PendingArtifact`; the end of the
    run, and `close()`, wait for these as long as they get on.

    What is logged under one key is a version of it (`v0`, `v1`, ...) in the
    project, over all its runs; `session.use_artifact` finds one by its number or
    by an alias.

    On a disk that takes no more, the call raises in strict mode. Otherwise an
    `artifact_not_kept` event counts it, and the record that is returned and
    stored has the payload's size and hash but no path.

    Args:
        session: A TrainingSession, or the RunContext of one.
        retention_hooks: Called with this store and each record after it was
            stored, in order. What a hook stores itself calls no hooks.
        raise_on_retention_error: Whether a hook that raises makes the call
            raise RetentionHookError; as the run's `strict_mode` by default.
            Otherwise a `retention_hook_failed` event says so.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """

    def store(
        self,
        artifact_type: str,
        name: str,
        payload: Any,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        payload_format: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        aliases: Sequence[str] | None = (),
    ) -> ArtifactRecord:
        """Store one artifact.

        Args:
            artifact_type: Such as `tensor_summary`: letters, digits, `.`, `_`, `-`.
            name: Its name, or its whole key (`layers/encoder/weights`).
            payload: JSON values, a str, or anything bytes-like.
            step: Step counter; by default what `session.step` has set, or None.
            epoch: Epoch counter, or None.
            namespace: What stands before the name, or None.
            payload_format: json, text or bytes; by default text for a str,
                bytes for what is bytes-like, json for the rest.
            metadata: JSON values, taken as they are now.
            timestamp: ISO 8601 text; now by default.
            aliases: Names for this version, such as `best`; see `set_alias`.

        Raises:
            SchemaValidationError: A bad argument, a payload that does not fit
                its format, or one that is too large; the message names it.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be kept.
            RetentionHookError: A hook raised, where that is to be told.
        """
        named = check_aliases(aliases)
        intake = self._check(
            "store", artifact_type, name, namespace, step, epoch, metadata, timestamp
        )
        chosen = choose_format(payload, payload_format)
        data = encode_payload(payload, chosen)
        return self._name(self._keep_bytes(intake, chosen, EXTENSIONS[chosen], data), named)

    def store_file(
        self,
        artifact_type: str,
        name: str,
        path: str | Path,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        aliases: Sequence[str] | None = (),
    ) -> ArtifactRecord:
        """Store a file as it is now, however large, a piece at a time.

        A file that grows meanwhile is stored as long as it was at the call;
        one that was altered has `changed_while_read` in its metadata.

        Args:
            path: A regular file that can be read.
            artifact_type, name, step, epoch, namespace, metadata, timestamp, aliases:
                As in `store`. The payload's format is bytes.

        Raises:
            SchemaValidationError: A bad argument, or no such file.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        named = check_aliases(aliases)
        intake = self._check(
            "store_file", artifact_type, name, namespace, step, epoch, metadata, timestamp
        )
        return self._name(self._keep_file(intake, path), named)

    def log_snapshot(
        self,
        name: str,
        payload: Any,
        *,
        snapshot_type: str = "batch_diagnostics_snapshot",
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        payload_format: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a snapshot: `store` with `snapshot_type` as the type.

        Raises:
            As `store`.
        """
        check_artifact_type(snapshot_type, "snapshot_type")
        return self.store(
            snapshot_type,
            name,
            payload,
            step=step,
            epoch=epoch,
            namespace=namespace,
            payload_format=payload_format,
            metadata=metadata,
            timestamp=timestamp,
        )
