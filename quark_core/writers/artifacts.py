"""ArtifactStore: keeps what is no scalar: histograms, snapshots, images, tables, files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Unpack

from quark_core.artifacts.payloads import EXTENSIONS, choose_format, encode_payload
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.records.artifact_layout import (
    KEPT_SOURCES,
    check_artifact_type,
    encode_artifact_key,
)
from quark_core.records.names import MAX_NAME_LENGTH
from quark_core.records.query import Query, ReadBounds, check_index, spell_out
from quark_core.writers import artifact_reading as reading
from quark_core.writers.artifact_collections import CollectionArtifacts
from quark_core.writers.artifact_evaluations import EvaluationArtifacts
from quark_core.writers.artifact_intake import RetentionHook
from quark_core.writers.artifact_links import check_aliases
from quark_core.writers.artifact_media import MediaArtifacts
from quark_core.writers.artifact_recordings import RecordingArtifacts

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

__all__ = ["ArtifactStore", "RetentionHook"]


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
        aliases: Sequence[str] = (),
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
        aliases: Sequence[str] = (),
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

    @spell_out(ReadBounds, before="limit")
    def read(
        self,
        *,
        artifact_id: str | None = None,
        artifact_type: str | None = None,
        artifact_types: Iterable[str] | None = None,
        namespace: str | None = None,
        artifact_name: str | None = None,
        artifact_key: str | None = None,
        payload_format: str | None = None,
        limit: int | None = None,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[ArtifactRecord, ...]:
        """Flush, then return the run's artifacts that fit, in persistence order.

        Args:
            artifact_id: Only this one.
            artifact_type: Only this type.
            artifact_types: Only these types.
            namespace: Only keys of exactly this namespace.
            artifact_name: Only keys with this last segment.
            artifact_key: Only this key, as it was given or as it is stored.
            payload_format: Only this format.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: The newest N.
            all_attempts: Also those that a later attempt, resumed from an
                earlier step, has hidden.

        Raises:
            SchemaValidationError: A bound is no non-negative integer, or
                another bad argument.
            SessionStoreError: The store cannot be read.
        """
        if artifact_types is not None and (
            isinstance(artifact_types, str) or not isinstance(artifact_types, Iterable)
        ):
            raise SchemaValidationError(
                f"artifact_types must be an iterable of str, not {type(artifact_types).__name__}"
            )
        if payload_format is not None:
            choose_format(None, payload_format)
        newest = check_index(limit, "limit")
        query = Query.build(
            equals={
                "artifact_type": artifact_type,
                "payload_format": payload_format,
            },
            any_of={
                "artifact_type": None if artifact_types is None else tuple(artifact_types),
                "namespace": encode_artifact_key(namespace, "namespace"),
                "artifact_name": encode_artifact_key(artifact_name, "artifact_name"),
                "artifact_key": encode_artifact_key(artifact_key, "artifact_key"),
            },
            **bounds,
            limit=newest if artifact_id is None else None,
            all_attempts=all_attempts,
        )
        columns = self._run.read(self.KIND, query)
        if artifact_type is None and artifact_types is None and artifact_id is None:
            columns = self._without_sources(columns, query)
        if artifact_id is not None:
            # An id is made of these two, and is no column of its own.
            writer, _, sequence = str(artifact_id).rpartition(f"-{self.KIND}-")
            known = sequence.isascii() and sequence.isdigit() and len(sequence) < 19
            number = int(sequence) if known else -1
            mask = (columns["writer_id"] == writer) & (columns["sequence"] == number)
            columns = columns.take(mask.astype(bool)).keep_newest(newest)
        return columns.to_records()  # type: ignore[return-value]

    def _without_sources(self, columns: Columns, query: Query) -> Columns:
        """What people have stored: the run's own code is read by `quark.read_sources`."""
        import numpy as np

        types = columns["artifact_type"].tolist()
        shown = np.asarray([name != KEPT_SOURCES for name in types], dtype=bool)
        if shown.all():
            return columns
        if query.limit is None or columns.count < query.limit:
            return columns.take(shown)
        # The newest of all are not those that are shown.
        whole = replace(query, limit=None)
        return self._without_sources(self._run.read(self.KIND, whole), whole).keep_newest(
            query.limit
        )

    def load(self, artifact: str | ArtifactRecord) -> Any:
        """The payload of an artifact, as it was stored; its hash is checked.

        JSON comes back as plain dicts, lists and scalars, text as str, bytes
        as bytes. For what is too large for memory there are `open` and `load_file`.

        Args:
            artifact: A record, or its id.

        Raises:
            ArtifactNotFoundError: No such artifact, or its payload is not
                kept; the message says why.
            ArtifactDamagedError: The payload is not what was stored.
            SessionStoreError: The store cannot be read.
        """
        return reading.load_payload(self._run, self._find(artifact))

    def open(self, artifact: str | ArtifactRecord) -> BinaryIO:
        """The payload, checked, as a file that can be read from any place (`torch.load` takes it).

        Raises:
            As `load`.
        """
        return reading.open_payload(self._run, self._find(artifact))

    def load_file(self, artifact: str | ArtifactRecord, path: str | Path) -> Path:
        """Copy the payload into a file, a piece at a time; returns its path.

        The file is there as a whole or not at all; one that exists is replaced.

        Raises:
            SchemaValidationError: `path` is no path, or a directory.
            OSError: The file cannot be written.
            SessionStoreError: As `load`.
        """
        return reading.copy_payload(self._run, self._find(artifact), path)

    def _find(self, artifact: object) -> ArtifactRecord:
        if isinstance(artifact, ArtifactRecord):
            return artifact
        if not isinstance(artifact, str):
            raise SchemaValidationError(
                "artifact must be an ArtifactRecord or the id of one, "
                f"not {type(artifact).__name__}"
            )
        found = self.read(artifact_id=artifact, all_attempts=True)
        if not found:
            keyed = len(self.read(artifact_key=artifact[:MAX_NAME_LENGTH] or None))
            hint = f"; {keyed} have it as their key: read(artifact_key=…)" if keyed else ""
            raise ArtifactNotFoundError(f"this run has no artifact of id {artifact!r:.200}{hint}")
        return found[0]
