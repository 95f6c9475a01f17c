"""Keeps payloads by their content: equal ones once, none ever half."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quark_core.artifacts.media_types import HEAD_BYTES
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.records.artifact_layout import ARTIFACT_STORAGE_LAYOUT, is_sha256, object_path

CHUNK_BYTES = 1024 * 1024
"""How much of a streamed payload is in memory at a time."""

_BINARY = getattr(os, "O_BINARY", 0)


class PutPayload(msgspec.Struct, frozen=True):
    """What became of a payload.

    Attributes:
        sha256: Its hash, in hexadecimal.
        size_bytes: Its length.
        changed: It was altered while it was read; what was there at first is
            kept, as far as it still was.
        failure: Why it could not be kept, or None.
        head: Of a file its first bytes, as they were kept.
    """

    sha256: str
    size_bytes: int
    changed: bool = False
    failure: str | None = None
    head: bytes = b""


class PayloadFolder:
    """A directory of payloads, named by their hashes; any number of processes may use it.

    A payload is written beside, brought to the disk and renamed, so that
    whatever has a name is whole. No locks, no mmap.

    Args:
        root: The directory of the run that paths are relative to; made when
            something is put there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def put_bytes(self, data: bytes | memoryview) -> PutPayload:
        """Keep a payload that is in memory. Never raises for the disk: see `failure`."""
        sha256 = hashlib.sha256(data).hexdigest()
        put = PutPayload(sha256, len(data))
        try:
            if self._commit(put, None):
                return put
            with _Partial(self.root) as partial:
                if isinstance(data, bytes) or isinstance(data.obj, bytes):
                    partial.write(data)
                else:
                    # Another thread may write into it: what has come to the disk is what is named.
                    put = msgspec.structs.replace(put, sha256=_copy(data, partial.write))
                partial.sync()
                self._commit(put, partial)
        except OSError as error:
            return msgspec.structs.replace(put, failure=_describe(error))
        return put

    def put_file(self, source: BinaryIO, size_bytes: int) -> PutPayload:
        """Keep the first `size_bytes` of an open file, a piece at a time.

        Never raises for this disk (see `failure`): the hash is right even
        where the payload cannot be kept.

        Raises:
            OSError: The source cannot be read.
        """
        with _Partial(self.root) as partial:
            put = _digest(source, size_bytes, partial.write)
            if put.failure is not None:
                return put
            try:
                partial.sync()
                self._commit(put, partial)
            except OSError as error:
                return msgspec.structs.replace(put, failure=_describe(error))
            return put

    def adopt(self, other: Path, sha256: str, size_bytes: int) -> bool:
        """Have a payload that another run's folder has, as one file with two names.

        Args:
            other: The directory of that run.
            sha256, size_bytes: Of the payload; what lies there is read and must be that.

        Returns:
            Whether it is here now. False too where the file system has no second names: the
            payload is to be put here then.
        """
        if self.find(sha256) is not None:
            return _measure(self.root / object_path(sha256)) == size_bytes
        source = other / object_path(sha256)
        if _measure(source) != size_bytes:
            return False
        try:
            with source.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return False
            path = self.root / object_path(sha256)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, path, follow_symlinks=False)
            _sync_directory(path.parent)
        except FileExistsError:
            pass  # another thread was quicker
        except (OSError, NotImplementedError):
            return False
        return self.find(sha256) is not None

    def find(self, sha256: str) -> Path | None:
        """Where a payload lies, or None; a link is none, whatever it leads to."""
        if not is_sha256(sha256):
            return None
        path = self.root / object_path(sha256)
        return path if is_plain_file(path) else None

    def open(self, sha256: str) -> BinaryIO:
        """A payload, open for reading.

        Raises:
            ArtifactNotFoundError: It is not here.
            SessionStoreError: It cannot be read.
        """
        if not is_sha256(sha256):
            raise ArtifactNotFoundError(f"{sha256!r:.80} is the hash of no payload")
        path = self.root / object_path(sha256)
        try:
            # A pipe in its place would be waited for.
            if os.path.lexists(path) and not is_plain_file(path):
                raise SessionStoreError(f"payload {sha256} cannot be read: {path} is no plain file")
            return path.open("rb")
        except FileNotFoundError:
            raise ArtifactNotFoundError(f"payload {sha256} is not there: {path}") from None
        except OSError as error:
            raise SessionStoreError(f"payload {sha256} cannot be read: {error}") from error

    def pass_by(self, sha256: str) -> None:
        """One lane is done with one record of this payload; here it stays all the same."""

    def _commit(self, put: PutPayload, partial: _Partial | None) -> bool:
        """Give a payload its name; without a partial file, only if one is there already."""
        path = self.root / object_path(put.sha256)
        if _measure(path) == put.size_bytes:
            return True
        if partial is None:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial.path, path)
        _sync_directory(path.parent)
        return True


class PayloadSpool(PayloadFolder):
    """Payloads that wait for backends elsewhere; each goes when all of its lanes have it.

    Args:
        root: As of `PayloadFolder`.
        lanes: How many lanes take artifacts.
    """

    def __init__(self, root: Path, lanes: int) -> None:
        super().__init__(root)
        self._lanes = lanes
        self._lock = threading.Lock()
        self._wanted: Counter[str] = Counter()

    def pass_by(self, sha256: str) -> None:
        """One lane is done with one record of this payload; the last one lets it go."""
        with self._lock:
            self._wanted[sha256] -= 1
            if self._wanted[sha256] <= 0:
                del self._wanted[sha256]
                if is_sha256(sha256):
                    (self.root / object_path(sha256)).unlink(missing_ok=True)

    def _commit(self, put: PutPayload, partial: _Partial | None) -> bool:
        # Under the lock, so that a lane cannot let go of what is being counted on.
        with self._lock:
            kept = super()._commit(put, partial)
            if kept:
                self._wanted[put.sha256] += self._lanes
            return kept


class NoPayloadFolder(PayloadFolder):
    """Keeps nothing, and says why.

    Args:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(Path())
        self._reason = reason

    def put_bytes(self, data: bytes | memoryview) -> PutPayload:
        """The hash and the size of a payload, with the reason as its failure."""
        return PutPayload(hashlib.sha256(data).hexdigest(), len(data), failure=self._reason)

    def put_file(self, source: BinaryIO, size_bytes: int) -> PutPayload:
        """As `put_bytes`, of a file.

        Raises:
            OSError: The source cannot be read.
        """
        put = _digest(source, size_bytes, lambda _piece: None)
        return msgspec.structs.replace(put, failure=self._reason)

    def find(self, _sha256: str) -> Path | None:
        """Nowhere."""
        return None


class _Partial:
    """A file on its way in; removed unless it was renamed."""

    def __init__(self, root: Path) -> None:
        self._directory = root / ARTIFACT_STORAGE_LAYOUT["partial"]
        self.path = self._directory / f"{os.getpid()}-{os.urandom(8).hex()}"
        self._descriptor: int | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._descriptor is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Nobody changes it any more: what has a hash for its name must keep its content.
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o444
            )
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        """Bring it to the disk, and give up its descriptor."""
        if self._descriptor is None:
            self.write(b"")
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        self._close_descriptor()

    def close(self) -> None:
        try:
            try:
                self._close_descriptor()
            finally:
                self.path.unlink(missing_ok=True)
        except OSError:
            # Left for `quark gc`; the payload itself has its name or was refused.
            return

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def is_plain_file(path: Path) -> bool:
    """Whether a regular file lies there itself: no link to one, which might be any file."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def open_source(path: object, argument: str = "path") -> tuple[BinaryIO, int]:
    """Open a file of the user's; returns it and its size as it is now.

    Raises:
        SchemaValidationError: No path, or not a regular file that can be read.
    """
    given: Any = path
    try:
        place = Path(os.fsdecode(os.fspath(given))).expanduser()
    except (TypeError, ValueError, RuntimeError):
        raise SchemaValidationError(
            f"{argument} must be a path, not {type(path).__name__}"
        ) from None
    try:
        if place.is_dir():
            raise SchemaValidationError(
                f"{argument} {place} is a directory: make one file of it first, "
                "such as by shutil.make_archive"
            )
        # Opening a pipe would wait for whoever writes it.
        if place.exists() and not place.is_file():
            raise SchemaValidationError(f"{argument} {place} is not a regular file")
        source = place.open("rb")
    except SchemaValidationError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SchemaValidationError(f"{argument} {place} cannot be read: {reason}") from error
    return source, os.fstat(source.fileno()).st_size


def _digest(source: BinaryIO, size_bytes: int, write: Callable[[bytes], None]) -> PutPayload:
    """Hash the beginning of a file, and write it as far as that goes."""
    digest = hashlib.sha256()
    failure: str | None = None
    remaining = size_bytes
    head = b""
    written_ns = _find_write_time(source)
    while remaining > 0:
        piece = source.read(min(CHUNK_BYTES, remaining))
        if not piece:
            break
        digest.update(piece)
        head = head or piece[:HEAD_BYTES]
        remaining -= len(piece)
        if failure is None:
            try:
                write(piece)
            except OSError as error:
                failure = _describe(error)
    changed = remaining > 0 or bool(source.read(1)) or _find_write_time(source) != written_ns
    return PutPayload(digest.hexdigest(), size_bytes - remaining, changed, failure, head)


def _copy(data: memoryview, write: Callable[[bytes], None]) -> str:
    """Write what may be altered meanwhile; returns the hash of what was written, in hexadecimal."""
    digest = hashlib.sha256()
    for start in range(0, len(data), CHUNK_BYTES):
        piece = bytes(data[start : start + CHUNK_BYTES])
        digest.update(piece)
        write(piece)
    return digest.hexdigest()


def _find_write_time(source: BinaryIO) -> int | None:
    """When a file was last written to, in nanoseconds; None where nobody can say."""
    try:
        return os.fstat(source.fileno()).st_mtime_ns
    except OSError:
        return None


def _measure(path: Path) -> int | None:
    return path.stat().st_size if is_plain_file(path) else None


def _describe(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _sync_directory(path: Path) -> None:
    """Bring a new name to the disk; where directories cannot be synced (Windows), nothing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
