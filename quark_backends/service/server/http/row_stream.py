"""Sends the rows of a read as frames, made part by part while they are sent."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from quark_backends.service.protocol import ROWS
from quark_backends.service.rows import End, Failure, encode_columns, encode_frame
from quark_backends.service.server.http.replies import to_failure
from quark_backends.store.encoding.bodies import weigh_rows

if TYPE_CHECKING:
    from quark_backends.service.server.http.call import Call
    from quark_backends.service.server.workspaces.stores import WorkspaceStore
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query

_log = logging.getLogger("quark.service")

# Number of rows, and the frames that they are.
_Part = tuple[int, list[bytes]]

# Rows of metrics are narrow; those of other kinds may hold texts and JSON values.
_PART_ROWS = {"metric": 262_144}
_OTHER_PART_ROWS = 16_384
# The newest rows are kept in memory up to here, and their JSON values; for more of them the rows
# are read twice.
_KEPT_ROWS = 131_072
_KEPT_BYTES = 32 * 2**20


def iterate_newest(
    store: WorkspaceStore, run_id: str, kind: str, query: Query
) -> Iterator[Columns]:
    """What `read` returns, in parts, in memory that does not grow with the run.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
    """
    every = replace(query, limit=None)
    rows = _PART_ROWS.get(kind, _OTHER_PART_ROWS)
    parts = store.iterate(run_id, kind, every, rows=rows)
    limit = query.limit
    if limit is None:
        yield from parts
    elif limit <= _KEPT_ROWS and (newest := _keep_newest(parts, limit)) is not None:
        yield from newest
    else:
        parts = store.iterate(run_id, kind, every, rows=rows)
        before = sum(part.count for part in parts) - limit
        left = limit
        for part in store.iterate(run_id, kind, every, rows=rows):
            first = min(max(before, 0), part.count)
            before -= part.count
            # What came in between the two readings is left out.
            taken = part.take(slice(first, first + left))
            left -= taken.count
            if taken.count:
                yield taken
            if not left:
                return


class RowStream:
    """A reply of frames; its errors come before it begins, or as its last frame.

    While a part is sent the next one is read, so that at most two are in memory.

    Args:
        call: The request.
        read: Gives what is read of a store, in parts.
    """

    def __init__(self, call: Call, read: Callable[[WorkspaceStore], Iterator[Columns]]) -> None:
        self._call = call
        self._read = read
        self._stack = AsyncExitStack()
        self._parts: Iterator[Columns] = iter(())
        self._first: _Part | None = None
        # A reading that its request no longer waits for must end before what it reads from.
        self._lock = threading.Lock()

    async def begin(self) -> None:
        """Read the first part, so that what goes wrong at once is a plain error.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read.
        """
        owner = self._call.principal.workspace
        await self._stack.enter_async_context(self._call.service.streams.hold(owner, 1))
        opened = await self._stack.enter_async_context(self._call.store())
        self._parts = self._read(opened.store)
        try:
            self._first = await self._call.service.threads.read(self._make_part)
        except BaseException:
            await self._end()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        limits = self._call.service.config.limits
        try:
            async with asyncio.timeout(limits.reader_total_s):
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [(b"content-type", ROWS.encode())],
                    }
                )
                await self._send_parts(send, limits.reader_stall_s)
        except TimeoutError:
            # Nobody takes it; without an end the client notices that it was cut off.
            _log.warning("request %s: the reader is too slow", self._call.request_id)
        finally:
            await self._end()

    async def _send_parts(self, send: Send, stall_s: float) -> None:
        read = self._call.service.threads.read
        rows = 0
        part = self._first
        self._first = None
        try:
            while part is not None:
                count, frames = part
                rows += count
                following = asyncio.ensure_future(read(self._make_part))
                try:
                    for frame in frames:
                        async with asyncio.timeout(stall_s):
                            await send(_to_body(frame, more=True))
                except BaseException:
                    following.add_done_callback(_forget)
                    raise
                part = await following
            last = encode_frame(End(rows))
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - the reply has begun: this is how it is told
            failure = to_failure(error, self._call.request_id)
            last = encode_frame(Failure(str(failure.code), failure.message))
        async with asyncio.timeout(stall_s):
            await send(_to_body(last, more=False))

    async def _end(self) -> None:
        await self._call.service.threads.read(self._close_parts)
        await self._stack.aclose()

    def _make_part(self) -> _Part | None:
        with self._lock:
            part = next(self._parts, None)
            return None if part is None else (part.count, list(encode_columns(part)))

    def _close_parts(self) -> None:
        with self._lock:
            close = getattr(self._parts, "close", None)
            if close is not None:
                close()
            self._parts = iter(())


def _forget(following: asyncio.Future[_Part | None]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not following.cancelled():
        following.exception()


def _to_body(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _keep_newest(parts: Iterator[Columns], limit: int) -> list[Columns] | None:
    """The last rows of parts; None where they take too much memory to be kept."""
    kept: deque[tuple[Columns, int]] = deque()
    rows = weight = 0
    with closing(parts):  # type: ignore[type-var]
        for part in parts:
            kept.append((part.keep_newest(limit), weigh_rows(part)))
            rows += kept[-1][0].count
            weight += kept[-1][1]
            while rows - kept[0][0].count >= limit > 0:
                dropped, its_weight = kept.popleft()
                rows -= dropped.count
                weight -= its_weight
            if weight > _KEPT_BYTES:
                return None
    newest = [part for part, _ in kept]
    if newest and rows > limit:
        newest[0] = newest[0].keep_newest(newest[0].count - (rows - limit))
    return [part for part in newest if part.count]
