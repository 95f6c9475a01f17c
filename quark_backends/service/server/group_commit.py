"""Puts ingest requests of one workspace that wait together into one transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quark_backends.service.server.work import WorkThreads
from quark_core.backend import Batch
from quark_core.errors import BackendRejected, BackendUnavailable

__all__ = ["GroupCommit"]

_GROUP_BATCHES = 256
_GROUP_BYTES = 16 * 2**20
_WAITING_BYTES = 128 * 2**20
_RETRY_AFTER_S = 1.0


class _Request(NamedTuple):
    batches: Sequence[Batch]
    size_bytes: int
    done: asyncio.Future[None]


class GroupCommit:
    """One writer of one store; belongs to one event loop.

    A sync of the disk takes as long for many requests as for one. What comes
    while a transaction runs is taken up by the next.

    Args:
        write_group: Stores batches in one transaction.
        threads: Where it is called, one call at a time.
    """

    def __init__(
        self, write_group: Callable[[Sequence[Batch]], None], threads: WorkThreads
    ) -> None:
        self._write_group = write_group
        self._threads = threads
        self._waiting: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._writer: asyncio.Task[None] | None = None

    async def write(self, batches: Sequence[Batch]) -> None:
        """Store batches, all of them or none; returns once they are committed and synced.

        Raises:
            BackendRejected: One of them can never be stored.
            BackendUnavailable: The store is busy, or too much waits for it.
        """
        size_bytes = sum(len(batch.body) for batch in batches)
        if self._waiting and self._waiting_bytes + size_bytes > _WAITING_BYTES:
            raise BackendUnavailable(
                "more batches wait for the store than it can write", retry_after_s=_RETRY_AFTER_S
            )
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(batches, size_bytes, done))
        self._waiting_bytes += size_bytes
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting())
        # A request that is given up must not take the others of its group along.
        await asyncio.shield(done)

    async def finish(self) -> None:
        """Wait until all that was accepted is committed."""
        if self._writer is not None:
            await self._writer

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                group = self._take_group()
                outcomes = await self._threads.write(self._store, group)
                for request, outcome in zip(group, outcomes, strict=True):
                    if request.done.cancelled():
                        continue
                    if outcome is None:
                        request.done.set_result(None)
                    else:
                        request.done.set_exception(outcome)
                        # Whoever waited may be gone; nobody else need hear of it.
                        request.done.exception()
        finally:
            self._writer = None

    def _take_group(self) -> list[_Request]:
        group: list[_Request] = []
        batches = size_bytes = 0
        while self._waiting:
            first = self._waiting[0]
            if group and (
                batches + len(first.batches) > _GROUP_BATCHES
                or size_bytes + first.size_bytes > _GROUP_BYTES
            ):
                break
            group.append(self._waiting.popleft())
            batches += len(first.batches)
            size_bytes += first.size_bytes
        self._waiting_bytes -= size_bytes
        return group

    def _store(self, group: Sequence[_Request]) -> list[Exception | None]:
        """Store a group in one transaction; where one is refused, each request by itself."""
        try:
            self._write_group([batch for request in group for batch in request.batches])
        except BackendRejected as error:
            if len(group) == 1:
                return [error]
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            return [error] * len(group)
        else:
            return [None] * len(group)
        outcomes: list[Exception | None] = []
        for request in group:
            try:
                self._write_group(request.batches)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes
