"""Threads for what blocks, and a bound on the memory of requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.failure import ServiceFailure

__all__ = ["ByteBudget", "WorkThreads"]

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 8
_WRITERS = 8
_FILES = 8
_KEYS = 2
_BUDGET_WAIT_S = 10.0


class WorkThreads:
    """The threads of one process: each kind of work has its own, so that none starves another."""

    def __init__(self) -> None:
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"quark-{name}")
            for name, count in (
                ("read", _READERS),
                ("write", _WRITERS),
                ("file", _FILES),
                ("key", _KEYS),
            )
        }

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that reads a store."""
        return await self._run("read", partial(call, *args, **kwargs))

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that writes to a store, or decodes what will be written."""
        return await self._run("write", partial(call, *args, **kwargs))

    async def file(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that reads or writes a payload."""
        return await self._run("file", partial(call, *args, **kwargs))

    async def key(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that looks up a key."""
        return await self._run("key", partial(call, *args, **kwargs))

    def close(self) -> None:
        """Wait for what is running, and end the threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, name: str, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[name], call)


class ByteBudget:
    """Lets in so many bytes at a time, first come, first served; of one event loop.

    Args:
        size_bytes: All that there is. What needs more gets all of it.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._free = size_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold some bytes, once they are free.

        Raises:
            ServiceFailure: They do not become free in time.
        """
        wanted = min(size_bytes, self._size)
        if self._waiting or self._free < wanted:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, future))
            try:
                async with asyncio.timeout(_BUDGET_WAIT_S):
                    await future
            except BaseException as error:
                self._give_up(wanted, future)
                if isinstance(error, TimeoutError):
                    raise ServiceFailure(
                        ErrorCode.UNAVAILABLE,
                        "the server works on as many large requests as it has memory for",
                        retry_after_s=2.0,
                    ) from None
                raise
        else:
            self._free -= wanted
        try:
            yield
        finally:
            self._free += wanted
            self._let_in()

    def _give_up(self, wanted: int, future: asyncio.Future[None]) -> None:
        if future.done() and not future.cancelled():
            self._free += wanted
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not future)
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, future = self._waiting.popleft()
            if not future.done():
                self._free -= wanted
                future.set_result(None)
