"""Payloads of artifacts, stored by workspace, run and content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.requests import WorkThreads
from quark_backends.service.server.responses import ServiceFailure
from quark_core.errors import SessionStoreError

T = TypeVar("T")

_PIECE_BYTES = 2**20
_ARRIVING = ".partial"
# What nothing was written to for so long is on its way no more.
_ARRIVING_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Windows has none of these, and `quark serve` refuses to run there.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_ONLY_FOLDERS = getattr(os, "O_DIRECTORY", 0)
_CLOSED_BY_EXEC = getattr(os, "O_CLOEXEC", 0)


class PayloadVault:
    """A folder of payloads: `workspace/run_id/ab/abcd…`; any number of processes may use it.

    A payload is written beside, brought to the disk and renamed. No link is
    followed on the way below the root.

    Args:
        root: The folder; made when something is put there.
        threads: Where files are read and written.
    """

    def __init__(self, root: Path, threads: WorkThreads) -> None:
        self._root = root
        self._threads = threads

    async def put(
        self, workspace: str, run_id: str, sha256: str, pieces: AsyncIterator[bytes]
    ) -> tuple[int, bool]:
        """Keep a payload; returns its size and whether it is new. It is there whole or not at all.

        Raises:
            ServiceFailure: It has another hash.
            SessionStoreError: It cannot be kept now.
        """
        digest = hashlib.sha256()
        size_bytes = 0
        if await self.measure(workspace, run_id, sha256) is not None:
            async for piece in _gather(pieces):
                size_bytes += len(piece)
                await self._call(partial(digest.update, piece))
            _check_hash(digest.hexdigest(), sha256)
            return size_bytes, False
        incoming = await self._call(lambda: _Partial(self._root))
        try:
            async for piece in _gather(pieces):
                size_bytes += len(piece)
                await self._call(partial(digest.update, piece))
                await self._call(partial(incoming.write, piece))
            _check_hash(digest.hexdigest(), sha256)
            await self._call(lambda: incoming.commit(_folders(workspace, run_id, sha256), sha256))
        finally:
            await self._call(incoming.close)
        return size_bytes, True

    async def measure(self, workspace: str, run_id: str, sha256: str) -> int | None:
        """The size of a payload in bytes, or None where there is none.

        Raises:
            SessionStoreError: It cannot be found out now.
        """

        def find() -> int | None:
            descriptor = self._open(workspace, run_id, sha256)
            if descriptor is None:
                return None
            try:
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)

        return await self._call(find)

    async def read(
        self, workspace: str, run_id: str, sha256: str, start: int, size_bytes: int
    ) -> AsyncIterator[bytes]:
        """So many bytes of a payload that is there, in pieces.

        Raises:
            SessionStoreError: It cannot be read.
        """
        descriptor = await self._call(lambda: self._open(workspace, run_id, sha256))
        if descriptor is None:
            raise SessionStoreError(f"payload {sha256} is missing")
        try:
            end = start + size_bytes
            while start < end:
                wanted = min(_PIECE_BYTES, end - start)
                piece = await self._call(partial(_read_at, descriptor, wanted, start))
                if not piece:
                    raise SessionStoreError(f"payload {sha256} is shorter than before")
                start += len(piece)
                yield piece
        finally:
            os.close(descriptor)

    async def measure_runs(self, workspace: str) -> dict[str, int]:
        """Measure the payloads of each run in bytes, for every run that has any.

        Raises:
            SessionStoreError: It cannot be found out now.
        """
        from quark_backends.store.upkeep.usage import measure_tree

        def measure() -> dict[str, int]:
            folder = self._root / workspace
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                return {
                    entry.name: measure_tree(folder / entry.name)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                }
            return {}

        return await self._call(measure)

    async def forget_run(self, workspace: str, run_id: str) -> None:
        """Let all payloads of a run go; where there are none, there is none to let go.

        Raises:
            SessionStoreError: Some of them cannot be deleted now.
        """

        def forget() -> None:
            folder = _descend(self._root, (workspace,), make=False)
            if folder is not None:
                try:
                    with contextlib.suppress(FileNotFoundError):
                        shutil.rmtree(run_id, dir_fd=folder)
                finally:
                    os.close(folder)

        await self._call(forget)

    async def sweep(self) -> None:
        """Let go what was on its way in when a server was killed."""

        def sweep() -> None:
            folder = _descend(self._root, (_ARRIVING,), make=False)
            if folder is None:
                return
            try:
                oldest_s = time.time() - _ARRIVING_S
                for name in os.listdir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if found.st_mtime < oldest_s:
                            os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

        await self._call(sweep)

    def open(self, workspace: str, run_id: str, sha256: str) -> BinaryIO | None:
        """A payload, open for reading by whoever has a thread of its own; None where it is not.

        Raises:
            SessionStoreError: It cannot be read.
        """
        try:
            descriptor = self._open(workspace, run_id, sha256)
        except OSError as error:
            raise SessionStoreError(f"a payload: {error}") from error
        return None if descriptor is None else os.fdopen(descriptor, "rb")

    def _open(self, workspace: str, run_id: str, sha256: str) -> int | None:
        folder = _descend(self._root, _folders(workspace, run_id, sha256), make=False)
        if folder is None:
            return None
        try:
            return os.open(sha256, os.O_RDONLY | _NO_LINK | _CLOSED_BY_EXEC, dir_fd=folder)
        except FileNotFoundError:
            return None
        finally:
            os.close(folder)

    async def _call(self, call: Callable[[], T]) -> T:
        try:
            return await self._threads.file(call)
        except OSError as error:
            what = "the disk of the payloads is full" if error.errno in _FULL else "a payload"
            raise SessionStoreError(f"{what}: {error}") from error


class _Partial:
    """A payload on its way in; removed unless it was given its name."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root = root
        folder = _descend(root, (_ARRIVING,), make=True)
        assert folder is not None
        self._folder = folder
        self._name: str | None = f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            self._file = os.open(
                self._name,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | _CLOSED_BY_EXEC,
                0o400,
                dir_fd=folder,
            )
        except BaseException:
            os.close(folder)
            raise

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            view = view[os.write(self._file, view) :]

    def commit(self, folders: tuple[str, ...], sha256: str) -> None:
        """Bring it to the disk and give it its name."""
        os.fsync(self._file)
        target = _descend(self._root, folders, make=True)
        assert target is not None
        assert self._name is not None
        try:
            os.rename(self._name, sha256, src_dir_fd=self._folder, dst_dir_fd=target)
            self._name = None
            os.fsync(target)
        finally:
            os.close(target)

    def close(self) -> None:
        try:
            os.close(self._file)
            if self._name is not None:
                os.unlink(self._name, dir_fd=self._folder)
        finally:
            os.close(self._folder)


def _read_at(descriptor: int, size_bytes: int, start: int) -> bytes:
    if sys.platform == "win32":
        raise SessionStoreError("the Quark server does not run on Windows")
    return os.pread(descriptor, size_bytes, start)


def _folders(workspace: str, run_id: str, sha256: str) -> tuple[str, ...]:
    return workspace, run_id, sha256[:2]


def _descend(root: Path, folders: tuple[str, ...], *, make: bool) -> int | None:
    """A descriptor of a folder under the root, reached without following a link."""
    flags = os.O_RDONLY | _ONLY_FOLDERS | _CLOSED_BY_EXEC
    try:
        found = os.open(root, flags)
    except FileNotFoundError:
        return None
    for name in folders:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=found)
                    os.fsync(found)
            following = os.open(name, flags | _NO_LINK, dir_fd=found)
        except FileNotFoundError:
            return None
        finally:
            os.close(found)
        found = following
    return found


async def _gather(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in larger pieces, so that a thread is worth its while."""
    waiting: list[bytes] = []
    size_bytes = 0
    async for piece in pieces:
        waiting.append(piece)
        size_bytes += len(piece)
        if size_bytes >= _PIECE_BYTES:
            yield b"".join(waiting)
            waiting, size_bytes = [], 0
    if waiting:
        yield b"".join(waiting)


def _check_hash(found: str, sha256: str) -> None:
    if found != sha256:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the body has the SHA-256 {found}, not the one in the path. Nothing was stored",
            field="sha256",
        )
