"""Threads for what blocks, and bounds on what one workspace may have of what all share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.http.replies import ServiceFailure

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 8
_WRITERS = 8
_FILES = 8
_KEYS = 2
_UPKEEP = 2
_BUDGET_WAIT_S = 10.0
_BUDGET_RETRY_S = 2.0
# Of what is left by others, one may have so much: there is always some for the next.
_MOST = 0.75
_PLACE_RETRY_S = 1.0


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
                ("upkeep", _UPKEEP),
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

    async def upkeep(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that measures or removes runs, and takes its time."""
        return await self._run("upkeep", partial(call, *args, **kwargs))

    def close(self) -> None:
        """Wait for what is running, and end the threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, name: str, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[name], call)


class FairBudget:
    """Lends out so much of something, no owner more than a share of it; of one event loop.

    First come, first served, but for owners who have their share: those wait for
    themselves only.

    Args:
        size: All that there is.
        share: What one owner may have at once. What needs more gets all of it.
        busy: What whoever waits too long is told.
    """

    def __init__(self, size: int, share: int, busy: str) -> None:
        self._free = size
        self._share = share
        self._busy = busy
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @asynccontextmanager
    async def hold(self, owner: str, amount: int) -> AsyncIterator[None]:
        """Hold some of it, once it is free.

        Raises:
            ServiceFailure: It does not become free in time.
        """
        await self.take(owner, amount)
        try:
            yield
        finally:
            self.give_back(owner, amount)

    async def take(self, owner: str, amount: int) -> None:
        """Have some of it, once it is free, until it is given back.

        Raises:
            ServiceFailure: It does not become free in time.
        """
        wanted = min(amount, self._share)
        if not self._waiting and wanted <= min(self._free, self._share - self._held[owner]):
            self._lend(owner, wanted)
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = owner, wanted
        self._let_in()
        if not future.done():
            await self._wait(future, owner, wanted)

    def give_back(self, owner: str, amount: int) -> None:
        """Give back what was taken."""
        wanted = min(amount, self._share)
        self._free += wanted
        self._held[owner] -= wanted
        if not self._held[owner]:
            del self._held[owner]
        self._let_in()

    def _lend(self, owner: str, amount: int) -> None:
        self._free -= amount
        self._held[owner] += amount

    async def _wait(self, future: asyncio.Future[None], owner: str, wanted: int) -> None:
        try:
            async with asyncio.timeout(_BUDGET_WAIT_S):
                await future
        except BaseException as error:
            if self._waiting.pop(future, None) is None:
                self.give_back(owner, wanted)
            else:
                self._let_in()
            if isinstance(error, TimeoutError):
                raise ServiceFailure(
                    ErrorCode.UNAVAILABLE, self._busy, retry_after_s=_BUDGET_RETRY_S
                ) from None
            raise

    def _let_in(self) -> None:
        if not self._waiting:
            return
        served = set()
        for future, (owner, wanted) in list(self._waiting.items()):
            if owner in served or self._held[owner] + wanted > self._share:
                # Whoever came after it waits behind it, but for its own things only.
                served.add(owner)
                continue
            if wanted > self._free:
                return
            del self._waiting[future]
            self._lend(owner, wanted)
            if not future.done():
                future.set_result(None)


class FairPlaces:
    """Counts what each of many has at once, and leaves some for others; of one event loop.

    Args:
        count: All that there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[str] = Counter()

    @contextmanager
    def take(self, owner: str, in_use: int) -> Iterator[None]:
        """Have one.

        Args:
            owner: Who has it.
            in_use: How many are in use, this one and those that nobody counts among them.

        Raises:
            ServiceFailure: The owner has three quarters of what others leave.
        """
        mine = self._taken[owner] + 1
        others = in_use - mine
        if mine > math.ceil(_MOST * (self._count - others)):
            raise ServiceFailure(
                ErrorCode.RATE_LIMITED,
                "the workspace has as many requests at work as this server gives to one",
                retry_after_s=_PLACE_RETRY_S,
            )
        self._taken[owner] = mine
        try:
            yield
        finally:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]
