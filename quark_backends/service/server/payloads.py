"""Payloads of artifacts: stored by workspace, run and content, and their routes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quark_backends.service.protocol import ErrorCode, PayloadReply
from quark_backends.service.server.requests import Call, WorkThreads
from quark_backends.service.server.responses import ServiceFailure, make_reply
from quark_core.errors import RunNotFoundError, SessionStoreError

# Keeps the payloads of artifacts, by workspace, run and content.
#
# `PayloadVault` is all that the service asks for; a folder is one that has it,
# and an object store can take its place.

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


class PayloadVault(Protocol):
    """Payloads by workspace, run and SHA-256, all three checked by whoever calls."""

    async def put(
        self, workspace: str, run_id: str, sha256: str, pieces: AsyncIterator[bytes]
    ) -> tuple[int, bool]:
        """Keep a payload; returns its size and whether it is new. It is there whole or not at all.

        Raises:
            ServiceFailure: It has another hash.
            SessionStoreError: It cannot be kept now.
        """

    async def measure(self, workspace: str, run_id: str, sha256: str) -> int | None:
        """The size of a payload in bytes, or None where there is none.

        Raises:
            SessionStoreError: It cannot be found out now.
        """

    def read(
        self, workspace: str, run_id: str, sha256: str, start: int, size_bytes: int
    ) -> AsyncIterator[bytes]:
        """So many bytes of a payload that is there, in pieces.

        Raises:
            SessionStoreError: It cannot be read.
        """

    async def measure_runs(self, workspace: str) -> dict[str, int]:
        """What the payloads of each run take up in bytes, for every run that has any.

        Raises:
            SessionStoreError: It cannot be found out now.
        """

    async def forget_run(self, workspace: str, run_id: str) -> None:
        """Let all payloads of a run go; where there are none, there is none to let go.

        Raises:
            SessionStoreError: Some of them cannot be deleted now.
        """

    async def sweep(self) -> None:
        """Let go what was on its way in when a server was killed."""

    def open(self, workspace: str, run_id: str, sha256: str) -> BinaryIO | None:
        """A payload, open for reading by whoever has a thread of its own; None where it is not.

        Raises:
            SessionStoreError: It cannot be read.
        """


class FolderVault:
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
        """See `PayloadVault`."""
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
        """See `PayloadVault`."""

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
        """See `PayloadVault`."""
        descriptor = await self._call(lambda: self._open(workspace, run_id, sha256))
        if descriptor is None:
            raise SessionStoreError(f"payload {sha256} is gone")
        try:
            end = start + size_bytes
            while start < end:
                wanted = min(_PIECE_BYTES, end - start)
                piece = await self._call(partial(_read_at, descriptor, wanted, start))
                if not piece:
                    raise SessionStoreError(f"payload {sha256} is shorter than it was")
                start += len(piece)
                yield piece
        finally:
            os.close(descriptor)

    async def measure_runs(self, workspace: str) -> dict[str, int]:
        """See `PayloadVault`."""
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
        """See `PayloadVault`."""

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
        """See `PayloadVault`."""

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
        """See `PayloadVault`."""
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
        raise SessionStoreError("the service does not run on Windows")
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
            f"the body has the SHA-256 {found}, not the one that the path names; nothing was kept",
            field="sha256",
        )


_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


async def put_payload(call: Call) -> ASGIApp:
    """Keep a payload."""
    run_id, sha256 = call.run_id, call.sha256
    limit = call.service.config.limits.artifact_bytes
    declared = call.request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    if call.request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServiceFailure(
            ErrorCode.UNSUPPORTED,
            "a payload is sent as it is, without Content-Encoding",
            field="Content-Encoding",
        )
    await _check_kept(call)
    with call.service.bodies.arrive(call.principal.key_id):
        size_bytes, is_new = await call.service.vault.put(
            call.principal.workspace, run_id, sha256, _read_pieces(call, limit)
        )
    try:
        await _check_kept(call)
    except RunNotFoundError:
        # The run was removed while this came, and nobody would ever take it away.
        await call.service.vault.forget_run(call.principal.workspace, run_id)
        raise
    return make_reply(PayloadReply(sha256, size_bytes), call.media, status=201 if is_new else 200)


async def head_payload(call: Call) -> ASGIApp:
    """The size of a payload."""
    size_bytes = await _measure(call)
    return Response(headers=_describe(call.sha256, size_bytes))


async def get_payload(call: Call) -> ASGIApp:
    """A payload, or one range of it."""
    size_bytes = await _measure(call)
    headers = _describe(call.sha256, size_bytes)
    start, end, status = 0, size_bytes, 200
    asked = call.request.headers.get("range")
    condition = call.request.headers.get("if-range")
    if asked is not None and condition in (None, headers["ETag"]):
        found = _parse_range(asked, size_bytes)
        if found is not None:
            start, end = found
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size_bytes}"
    headers["Content-Length"] = str(end - start)
    return _PayloadReply(call, status, headers, start, end - start)


class _PayloadReply:
    """Streams a part of a payload; whoever takes nothing of it for a while is let go."""

    def __init__(
        self, call: Call, status: int, headers: dict[str, str], start: int, size_bytes: int
    ) -> None:
        self._call = call
        self._status = status
        self._headers = headers
        self._start = start
        self._size_bytes = size_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        call = self._call
        stall_s = call.service.config.limits.reader_stall_s
        pieces = call.service.vault.read(
            call.principal.workspace, call.run_id, call.sha256, self._start, self._size_bytes
        )
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self._headers.items()
        ]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        async for piece in pieces:
            async with asyncio.timeout(stall_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _check_kept(call: Call) -> None:
    """See that the run is there, in the trash or not: out of it, it comes back with its payloads.

    Raises:
        RunNotFoundError: It never was, or is removed for good.
    """
    async with call.store() as opened:
        await call.service.threads.read(opened.store.trash.check_kept, call.run_id)


async def _measure(call: Call) -> int:
    await call.ask("load_run", call.run_id)
    found = await call.service.vault.measure(call.principal.workspace, call.run_id, call.sha256)
    if found is None:
        raise ServiceFailure(
            ErrorCode.PAYLOAD_NOT_FOUND,
            f"run {call.run_id} has no payload {call.sha256}",
            field="sha256",
        )
    return found


def _describe(sha256: str, size_bytes: int) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(size_bytes),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
        "Accept-Ranges": "bytes",
        "ETag": f'"{sha256}"',
    }


def _parse_range(text: str, size_bytes: int) -> tuple[int, int] | None:
    """First byte and the one after the last; None where the whole is sent, as for several ranges.

    Raises:
        ServiceFailure: The payload has no such range.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start = int(first)
        end = min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= size_bytes or start == end:
        raise ServiceFailure(
            ErrorCode.RANGE, f"the payload has {size_bytes} bytes, not {text[:60]!r}", field="Range"
        )
    return start, end


async def _read_pieces(call: Call, limit: int) -> AsyncIterator[bytes]:
    """The body as it arrives, counted; each piece has its own time."""
    size_bytes = 0
    pieces = call.request.stream()
    timeout_s = call.service.config.limits.body_timeout_s
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise ServiceFailure(
                ErrorCode.TIMEOUT,
                f"nothing of the payload arrived for {timeout_s:g} s "
                "(limit body_timeout_s of this server)",
            ) from None
        if piece is None:
            return
        size_bytes += len(piece)
        if size_bytes > limit:
            raise _too_large(limit)
        yield piece


def _too_large(limit: int) -> ServiceFailure:
    return ServiceFailure(
        ErrorCode.TOO_LARGE,
        f"the payload has more than {limit} bytes (limit artifact_bytes of this server)",
    )
