"""Folders of payloads: those that are stored by content, and those that are written out."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import xxhash

from quark_core.artifacts.payload_formats import HEAD_BYTES
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.records.names import ARTIFACT_STORAGE_LAYOUT, is_sha256, object_path

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
            raise ArtifactNotFoundError(f"{sha256!r:.80} is not the hash of a payload")
        path = self.root / object_path(sha256)
        try:
            # A pipe in its place would be waited for.
            if os.path.lexists(path) and not is_plain_file(path):
                raise SessionStoreError(f"payload {sha256} cannot be read: {path} is not a file")
            return path.open("rb")
        except FileNotFoundError:
            raise ArtifactNotFoundError(f"payload {sha256} does not exist: {path}") from None
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


def read_path(path: Any, argument: str = "path") -> Path:
    """A path of the user's, given as a str, bytes or anything path-like.

    Raises:
        SchemaValidationError: It is none.
    """
    try:
        return Path(os.fsdecode(os.fspath(path))).expanduser()
    except (TypeError, ValueError, RuntimeError):
        raise SchemaValidationError(
            f"{argument} must be a path, not {type(path).__name__}"
        ) from None


def open_source(path: object, argument: str = "path") -> tuple[BinaryIO, int]:
    """Open a file of the user's; returns it and its size as it is now.

    Raises:
        SchemaValidationError: No path, or not a regular file that can be read.
    """
    place = read_path(path, argument)
    try:
        if place.is_dir():
            raise SchemaValidationError(
                f"{argument} {place} is a directory. Pack it into one file first, for example "
                "with shutil.make_archive"
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


_REFUSED = re.compile(r'[<>:"/\\|?*]')
# What Windows takes for a device, whatever comes after a dot.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
_MAX_BYTES = 200
_DIRECTORY = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_HAS_DESCRIPTORS = {os.open, os.mkdir, os.stat, os.unlink, os.link} <= os.supports_dir_fd


def make_file_name(text: str) -> str:
    """A text as one file name on any system, which hides nothing and leads nowhere.

    Itself, wherever that will do; else with a few digits by which names stay apart.
    """
    kept = "".join(c if c.isprintable() else "_" for c in text)
    kept = _REFUSED.sub("_", kept).rstrip(". ")
    if kept.startswith((".", " ", "-", "~")) or not kept:
        kept = f"_{kept[1:]}"
    if _DEVICES.fullmatch(kept):
        kept = f"_{kept}"
    encoded = kept.encode("utf-8", "replace")
    if kept == text and len(encoded) <= _MAX_BYTES:
        return kept
    digest = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))[:8]
    stem, dot, suffix = encoded[:_MAX_BYTES].decode("utf-8", "ignore").rpartition(".")
    return f"{stem}-{digest}.{suffix}" if dot and stem else f"{stem}{suffix}-{digest}"


class OutputFolder:
    """A folder that files are put into, under folders in it; no link in it is followed.

    Args:
        root: The folder; made with the first file. It may be reached by links: the user
            has named it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, parts: Sequence[str]) -> IO[bytes] | None:
        """A file that is there, open for reading; None where there is none.

        Args:
            parts: Its folders and its name, each as `make_file_name` makes them.

        Raises:
            OSError: A link or something else that is no plain file is in the way.
        """
        try:
            with self._enter(parts[:-1], make=False) as folder:
                descriptor = _open_in(folder, parts[-1], os.O_RDONLY | _PLAIN)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"{self.root.joinpath(*parts)} is not a regular file")
        return os.fdopen(descriptor, "rb")

    @contextmanager
    def write(self, parts: Sequence[str]) -> Iterator[IO[bytes]]:
        """A new file, which gets its name when it is whole.

        Raises:
            FileExistsError: There is one of that name; it is left alone.
            OSError: It cannot be written, or a link is in the way.
        """
        scratch = f".quark-{os.urandom(6).hex()}.part"
        with self._enter(parts[:-1], make=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN
            descriptor = _open_in(folder, scratch, flags)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    yield file
                _name(folder, scratch, parts[-1])
            finally:
                _unlink(folder, scratch)

    @contextmanager
    def _enter(self, names: Sequence[str], *, make: bool) -> Iterator[int | Path]:
        """A folder below the root, as a descriptor where the system has that for everything."""
        if make:
            self.root.mkdir(parents=True, exist_ok=True)
        if not _HAS_DESCRIPTORS:
            yield _walk(self.root, names, make=make)
            return
        descriptor = os.open(self.root, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                following = os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = following
            yield descriptor
        finally:
            os.close(descriptor)


def _walk(folder: Path, names: Sequence[str], *, make: bool) -> Path:
    for name in names:
        folder = folder / name
        if make:
            folder.mkdir(exist_ok=True)
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
    return folder


def _open_in(folder: int | Path, name: str, flags: int) -> int:
    if isinstance(folder, int):
        return os.open(name, flags, 0o666, dir_fd=folder)
    path = folder / name
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.ELOOP, f"{path} is not a regular file")
    return os.open(path, flags, 0o666)


def _name(folder: int | Path, scratch: str, name: str) -> None:
    """Give a file its name; one that is there already stays."""
    if isinstance(folder, Path):
        if os.path.lexists(folder / name):
            raise FileExistsError(errno.EEXIST, f"{folder / name} exists")
        os.rename(folder / scratch, folder / name)
        return
    try:
        os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links.
        if _exists(folder, name):
            raise FileExistsError(errno.EEXIST, f"{name} exists") from None
        os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _unlink(folder: int | Path, name: str) -> None:
    try:
        if isinstance(folder, Path):
            os.unlink(folder / name)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
