"""Reads artifacts and their payloads back, and sees that they are what was stored."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Unpack, cast

from quark_core.artifacts.payload_folder import CHUNK_BYTES, read_path
from quark_core.artifacts.payload_formats import choose_format, decode_payload
from quark_core.backends.contract import SupportsArtifacts
from quark_core.errors import (
    ArtifactDamagedError,
    ArtifactNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import ArtifactRecord
from quark_core.records.names import KEPT_SOURCES, MAX_NAME_LENGTH, encode_artifact_key, is_sha256
from quark_core.records.query import Query, ReadBounds, check_index, spell_out

if TYPE_CHECKING:
    from quark_core.records.columns import Columns
    from quark_core.runs.open_run import OpenRun
    from quark_core.runs.run_reader import RunReader

NOT_KEPT = "not_kept"
"""Key in an artifact's metadata under which it says why its payload could not be kept."""


class ArtifactReading:
    """The part of `ArtifactStore` that reads.

    Args:
        run: The run.
    """

    def __init__(self, run: OpenRun | RunReader) -> None:
        # A writer has an OpenRun here; what reads needs no more than both can do.
        self._run: Any = run

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
        """Flush, then list the run's artifacts in order of storage.

        Args:
            artifact_id, artifact_type, payload_format: Exact values to match.
            artifact_types: Types to include.
            namespace: Namespace of the key.
            artifact_name: Last segment of the key.
            artifact_key: Full key, as logged or as stored.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of artifacts; the newest are kept. Defaults to all.
            all_attempts: If True, include artifacts that a later attempt replaced. Defaults to
                False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
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
        columns: Columns = self._run.read(ArtifactRecord.KIND, query)
        if artifact_type is None and artifact_types is None and artifact_id is None:
            columns = self._without_sources(columns, query)
        if artifact_id is not None:
            # An id is made of these two, and is no column of its own.
            writer, _, sequence = str(artifact_id).rpartition(f"-{ArtifactRecord.KIND}-")
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
        return self._without_sources(self._run.read(ArtifactRecord.KIND, whole), whole).keep_newest(
            query.limit
        )

    def load(self, artifact: str | ArtifactRecord) -> Any:
        """Return the stored value of an artifact, after a check of its hash.

        JSON is returned as dicts, lists and scalars, text as str, and bytes as bytes. Use `open` or
        `load_file` for large payloads.

        Args:
            artifact: Record of the artifact, or its ID.

        Raises:
            ArtifactNotFoundError: The artifact does not exist, or its payload is not stored. The
                message gives the reason.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
        """
        return load_payload(self._run, self._find(artifact))

    def open(self, artifact: str | ArtifactRecord) -> BinaryIO:
        """Open the payload as a seekable binary file, after a check of its hash.

        `torch.load` accepts the file.

        Args:
            artifact: Record of the artifact, or its ID.

        Raises:
            ArtifactNotFoundError: The artifact does not exist, or its payload is not stored.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
        """
        return open_payload(self._run, self._find(artifact))

    def load_file(self, artifact: str | ArtifactRecord, path: str | Path) -> Path:
        """Copy the payload into a file, and return its path.

        The copy is atomic and uses little memory. An existing file is replaced.

        Args:
            artifact: Record of the artifact, or its ID.
            path: Path of the file.

        Raises:
            SchemaValidationError: `path` is not a path, or is a folder.
            ArtifactNotFoundError: The artifact does not exist, or its payload is not stored.
            ArtifactDamagedError: The payload does not match its stored hash.
            OSError: The file cannot be written.
            SessionStoreError: The store cannot be read.
        """
        return copy_payload(self._run, self._find(artifact), path)

    def _find(self, artifact: object) -> ArtifactRecord:
        if isinstance(artifact, ArtifactRecord):
            return artifact
        if not isinstance(artifact, str):
            raise SchemaValidationError(
                "artifact must be an ArtifactRecord or an artifact ID, not "
                f"{type(artifact).__name__}"
            )
        found = self.read(artifact_id=artifact, all_attempts=True)
        if not found:
            keyed = len(self.read(artifact_key=artifact[:MAX_NAME_LENGTH] or None))
            hint = f"; {keyed} have it as their key: call read(artifact_key=…)" if keyed else ""
            raise ArtifactNotFoundError(f"this run has no artifact with ID {artifact!r:.200}{hint}")
        return found[0]


def load_payload(run: OpenRun | RunReader, record: ArtifactRecord) -> Any:
    """The value that was stored, held in memory once.

    Raises:
        ArtifactNotFoundError: Its payload is not kept; the message says why.
        ArtifactDamagedError: Its payload is not what was stored.
        SessionStoreError: The store cannot be read.
    """
    with _open(run, record) as file:
        try:
            data = file.read()
        except OSError as error:
            raise _unreadable(record, error) from error
    _check(record, hashlib.sha256(data).hexdigest(), len(data))
    return decode_payload(data, record.payload_format)


def open_payload(run: OpenRun | RunReader, record: ArtifactRecord) -> BinaryIO:
    """A payload, checked, as a file that can be read from any place.

    Raises:
        As `load_payload`.
    """
    file = _open(run, record)
    try:
        if file.seekable():
            _pump(file, record, None)
            file.seek(0)
            return file
        # What comes over a network is checked on its way into a file without a name.
        local = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        _pump(file, record, local)
        file.close()
        local.seek(0)
        return cast(BinaryIO, local)
    except BaseException:
        file.close()
        raise


def copy_payload(run: OpenRun | RunReader, record: ArtifactRecord, path: object) -> Path:
    """Copy a payload into a file, which is there as a whole or not at all.

    Raises:
        SchemaValidationError: `path` is no path, or a directory.
        OSError: The file cannot be written.
        SessionStoreError: As `load_payload`.
    """
    target = read_path(path)
    if "\0" in str(target):
        raise SchemaValidationError("path must not contain a NUL")
    if target.is_dir():
        raise SchemaValidationError(f"path {target} is a directory. Add a file name")
    if not target.parent.is_dir():
        raise SchemaValidationError(f"path {target}: the folder {target.parent} does not exist")
    scratch = target.with_name(f".{target.name[:50]}.{os.urandom(4).hex()}.part")
    try:
        with _open(run, record) as source, scratch.open("xb") as copy:
            _pump(source, record, copy)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return target


def _pump(source: BinaryIO, record: ArtifactRecord, target: IO[bytes] | None) -> None:
    """Read a payload through, a piece at a time, check it, and write it where that is wanted."""
    digest = hashlib.sha256()
    size_bytes = 0
    while True:
        try:
            piece = source.read(CHUNK_BYTES)
        except OSError as error:
            raise _unreadable(record, error) from error
        if not piece:
            break
        digest.update(piece)
        size_bytes += len(piece)
        if target is not None:
            target.write(piece)
    _check(record, digest.hexdigest(), size_bytes)


def _open(run: OpenRun | RunReader, record: ArtifactRecord) -> BinaryIO:
    if record.payload_relative_path is None:
        reason = "this run stores nothing"
        if record.metadata is not None:
            reason = str(record.metadata.get(NOT_KEPT, reason))
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r} ({record.size_bytes} bytes) was not stored: {reason}"
        )
    if not is_sha256(record.sha256):
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r}: {record.sha256!r:.80} is not the hash of a payload"
        )
    own = record.run_id == run.context.run_id
    path = run.find_payload(record.sha256) if own else None
    if path is not None:
        try:
            return path.open("rb")
        except FileNotFoundError:
            pass  # every backend has it by now, so it is read from there
        except OSError as error:
            raise _unreadable(record, error) from error
    if run.forked:
        raise SessionStoreError(
            f"artifact {record.artifact_key!r}: a forked process can read only its own "
            "artifacts. Read it in the parent, or in a spawned process"
        )
    reader: object = run.reader
    if not isinstance(reader, SupportsArtifacts) or record.run_id is None:
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r}: this run's primary store stores no payloads"
        )
    return reader.open_payload(record.run_id, record.sha256)


def _check(record: ArtifactRecord, sha256: str, size_bytes: int) -> None:
    if sha256 != record.sha256:
        raise ArtifactDamagedError(
            f"artifact {record.artifact_key!r} is damaged: expected {record.size_bytes} bytes "
            f"with the SHA-256 {record.sha256}, found {size_bytes} bytes with {sha256}"
        )


def _unreadable(record: ArtifactRecord, error: OSError) -> SessionStoreError:
    return SessionStoreError(
        f"artifact {record.artifact_key!r} cannot be read: {error.strerror or error}"
    )
