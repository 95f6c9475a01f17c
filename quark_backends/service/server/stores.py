"""The stores of the workspaces: opened when one is needed, closed when too many are open."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.failure import ServiceFailure
from quark_backends.service.server.group_commit import GroupCommit
from quark_backends.service.server.work import WorkThreads

if TYPE_CHECKING:
    from quark_core.backend import Batch, Generation, StoredRun
    from quark_core.columns import Columns
    from quark_core.query import Query
    from quark_core.run_summary import RunSummary
    from quark_core.search.expression import RunSearch
    from quark_core.series import Series

__all__ = ["OpenStore", "WorkspaceStore", "WorkspaceStores"]

_log = logging.getLogger("quark.service")


class WorkspaceStore(Protocol):
    """What the service asks of a store; from any thread, several at once, as the backend's."""

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store batches in one transaction: all of them or, when it raises, none."""

    def write_generation(self, generation: Generation) -> int:
        """Keep the outputs of one analysis; returns its number."""

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order."""

    def read_series(
        self, run_id: str, key: str, *, max_points: int | None, all_attempts: bool = False
    ) -> Series:
        """One metric, in at most `max_points` entries."""

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """What `read` returns, in parts."""

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """A writer's batches from a number on, in order."""

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """Outputs of one kind."""

    def load_run(self, run_id: str) -> StoredRun:
        """One run."""

    def list_runs(
        self,
        *,
        project: str | None = None,
        limit: int | None = None,
        store_name: str | None = None,
        after: tuple[int, str] | None = None,
    ) -> list[StoredRun]:
        """Runs, newest first, after the one of this moment (in microseconds) and id."""

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:
        """The runs that fit."""

    def summarize(self, run_id: str) -> RunSummary:
        """One run with its metrics summed up."""

    def close(self) -> None:
        """Give up connections; called once."""


class OpenStore:
    """An open store, with its writer.

    Attributes:
        store: The store.
        write: Stores batches, as `GroupCommit.write` does.
    """

    def __init__(self, store: WorkspaceStore, threads: WorkThreads, *, groups: bool) -> None:
        self.store = store
        self._threads = threads
        self._commits = GroupCommit(store.write_group, threads) if groups else None
        self.leases = 0

    async def write(self, batches: Sequence[Batch]) -> None:
        """Store batches, all of them or none; returns once they are committed.

        Raises:
            BackendRejected: One of them can never be stored.
            BackendUnavailable: The store is busy or out of reach.
        """
        if self._commits is None:
            await self._threads.write(self.store.write_group, batches)
        else:
            await self._commits.write(batches)

    async def close(self) -> None:
        """Finish what is being written and close the store."""
        if self._commits is not None:
            await self._commits.finish()
        await self._threads.write(self.store.close)


class WorkspaceStores:
    """At most so many open stores; of one event loop.

    Args:
        open_store: Opens the store of a workspace.
        threads: Where stores are opened, used and closed.
        limit: Stores that may be open. Those in use do not count.
        groups: Whether requests share transactions, as a store with one writer wants it.
    """

    def __init__(
        self,
        open_store: Callable[[str], WorkspaceStore],
        threads: WorkThreads,
        *,
        limit: int,
        groups: bool,
    ) -> None:
        self._open_store = open_store
        self._threads = threads
        self._limit = limit
        self._groups = groups
        self._open: OrderedDict[str, OpenStore] = OrderedDict()
        self._changing: dict[str, asyncio.Lock] = {}
        self._closed = False

    @asynccontextmanager
    async def lease(self, workspace: str) -> AsyncIterator[OpenStore]:
        """The store of a workspace, which stays open meanwhile.

        Raises:
            SessionStoreError: It cannot be opened.
            ServiceFailure: The server ends.
        """
        opened = self._open.get(workspace)
        if opened is None:
            opened = await self._find_or_open(workspace)
        else:
            self._open.move_to_end(workspace)
            opened.leases += 1
        try:
            yield opened
        finally:
            opened.leases -= 1

    async def close(self) -> None:
        """Finish what is being written and close all stores."""
        self._closed = True
        while self._open:
            _, opened = self._open.popitem()
            await _close_quietly(opened)

    async def _find_or_open(self, workspace: str) -> OpenStore:
        lock = self._changing.setdefault(workspace, asyncio.Lock())
        async with lock:
            opened = self._open.get(workspace)
            if opened is None:
                if self._closed:
                    raise ServiceFailure(
                        ErrorCode.UNAVAILABLE, "the server ends", retry_after_s=5.0
                    )
                store = await self._threads.read(self._open_store, workspace)
                opened = OpenStore(store, self._threads, groups=self._groups)
                self._open[workspace] = opened
            opened.leases += 1
        await self._close_idle()
        return opened

    async def _close_idle(self) -> None:
        while len(self._open) > self._limit:
            idle = next((name for name, each in self._open.items() if not each.leases), None)
            if idle is None:
                return
            async with self._changing.setdefault(idle, asyncio.Lock()):
                found = self._open.get(idle)
                if found is None or found.leases:
                    continue
                # Out of the list first: nobody may take a lease on what is being closed.
                del self._open[idle]
                await _close_quietly(found)


async def _close_quietly(opened: OpenStore) -> None:
    try:
        await opened.close()
    except Exception:  # noqa: BLE001 - what was acknowledged is stored; the others must be closed
        _log.exception("a store could not be closed")
