"""Reads payloads back, and sees that they are what was stored."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from quark_core.artifacts.payload_folder import CHUNK_BYTES
from quark_core.artifacts.payloads import decode_payload
from quark_core.backends.contract import SupportsArtifacts
from quark_core.errors import (
    ArtifactDamagedError,
    ArtifactNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import ArtifactRecord
from quark_core.records.artifact_layout import is_sha256

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

__all__ = ["NOT_KEPT", "copy_payload", "load_payload", "open_payload"]

NOT_KEPT = "not_kept"
"""Key in an artifact's metadata under which it says why its payload could not be kept."""


def load_payload(run: OpenRun, record: ArtifactRecord) -> Any:
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


def open_payload(run: OpenRun, record: ArtifactRecord) -> BinaryIO:
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


def copy_payload(run: OpenRun, record: ArtifactRecord, path: object) -> Path:
    """Copy a payload into a file, which is there as a whole or not at all.

    Raises:
        SchemaValidationError: `path` is no path, or a directory.
        OSError: The file cannot be written.
        SessionStoreError: As `load_payload`.
    """
    given: Any = path
    try:
        target = Path(os.fsdecode(os.fspath(given)))
    except TypeError:
        raise SchemaValidationError(f"path must be a path, not {type(path).__name__}") from None
    if "\0" in str(target):
        raise SchemaValidationError("path must not hold a NUL")
    if target.is_dir():
        raise SchemaValidationError(f"path {target} is a directory: give the file's name too")
    if not target.parent.is_dir():
        raise SchemaValidationError(f"path {target}: there is no folder {target.parent}")
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


def _open(run: OpenRun, record: ArtifactRecord) -> BinaryIO:
    if record.payload_relative_path is None:
        reason = "nothing of this run is kept"
        if record.metadata is not None:
            reason = str(record.metadata.get(NOT_KEPT, reason))
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r} ({record.size_bytes} bytes) was not kept: {reason}"
        )
    if not is_sha256(record.sha256):
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r}: {record.sha256!r:.80} is the hash of no payload"
        )
    own = record.run_id == run.context.run_id
    payloads = run.stream.payloads if own else None
    path = None if payloads is None else payloads.find(record.sha256)
    if path is not None:
        try:
            return path.open("rb")
        except FileNotFoundError:
            pass  # every backend has it by now, so it is read from there
        except OSError as error:
            raise _unreadable(record, error) from error
    if run.forked:
        raise SessionStoreError(
            f"artifact {record.artifact_key!r}: a forked process can read only what it has stored "
            "itself: read in the parent, or in a process that was spawned"
        )
    reader: object = run.reader
    if not isinstance(reader, SupportsArtifacts) or record.run_id is None:
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r}: this run's primary store keeps no payloads"
        )
    return reader.open_payload(record.run_id, record.sha256)


def _check(record: ArtifactRecord, sha256: str, size_bytes: int) -> None:
    if sha256 != record.sha256:
        raise ArtifactDamagedError(
            f"artifact {record.artifact_key!r} is damaged: {size_bytes} bytes with the SHA-256 "
            f"{sha256} are where {record.size_bytes} bytes with {record.sha256} were stored"
        )


def _unreadable(record: ArtifactRecord, error: OSError) -> SessionStoreError:
    return SessionStoreError(
        f"artifact {record.artifact_key!r} cannot be read: {error.strerror or error}"
    )
