"""The stores of the workspaces: opened when one is needed, and written for many at once."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, TypeVar

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.payloads import PayloadVault
from quark_backends.service.server.requests import WorkThreads
from quark_backends.service.server.responses import ServiceFailure
from quark_core.backends.contract import Batch
from quark_core.errors import ArtifactNotFoundError, BackendRejected, BackendUnavailable

if TYPE_CHECKING:
    from quark_backends.store.run_store import RunStore
    from quark_core.backends.contract import Generation, Payload

_log = logging.getLogger("quark.service")

T = TypeVar("T")

_GROUP_BATCHES = 256
_GROUP_CALLS = 64
_GROUP_BYTES = 16 * 2**20
_WAITING_BYTES = 128 * 2**20
_RETRY_AFTER_S = 1.0


class _Request(NamedTuple):
    asked: Any
    amount: int
    size_bytes: int
    done: asyncio.Future[Any]


class _Groups:
    """Serves what many requests ask for on one thread, group after group; of one event loop.

    What comes while a group is served is taken up by the next. In SQLite, where one writes at a
    time anyway, each group takes one hand-over to a thread, and one sync of the disk, which takes
    as long for many requests as for one.

    Args:
        serve: Does what is asked, and returns for each what came of it, or its error.
        threads: Where it is called, one call at a time.
        most: What a group amounts to at most, unless its first request is more by itself.
    """

    def __init__(
        self, serve: Callable[[Sequence[Any]], list[Any]], threads: WorkThreads, most: int
    ) -> None:
        self._serve = serve
        self._threads = threads
        self._most = most
        self._waiting: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._server: asyncio.Task[None] | None = None

    async def ask(self, asked: Any, *, amount: int = 1, size_bytes: int = 0) -> Any:
        """Return the result, once all of its group is on the disk.

        Raises:
            BackendUnavailable: Too much waits.
            Exception: Its error.
        """
        if self._waiting and self._waiting_bytes + size_bytes > _WAITING_BYTES:
            raise BackendUnavailable(
                "more batches wait than the store can write", retry_after_s=_RETRY_AFTER_S
            )
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(asked, amount, size_bytes, done))
        self._waiting_bytes += size_bytes
        if self._server is None:
            self._server = asyncio.create_task(self._serve_waiting())
        # A request that is given up must not take the others of its group along.
        return await asyncio.shield(done)

    async def finish(self) -> None:
        """Wait until all that was accepted is served."""
        if self._server is not None:
            await self._server

    async def _serve_waiting(self) -> None:
        try:
            while self._waiting:
                group = self._take_group()
                try:
                    found = await self._threads.write(self._serve, [each.asked for each in group])
                except Exception as error:  # noqa: BLE001 - handed to whoever waits
                    found = [error] * len(group)
                for request, outcome in zip(group, found, strict=True):
                    if request.done.done():
                        continue
                    if isinstance(outcome, Exception):
                        request.done.set_exception(outcome)
                        # Whoever waited may be gone; nobody else need hear of it.
                        request.done.exception()
                    else:
                        request.done.set_result(outcome)
        finally:
            self._server = None

    def _take_group(self) -> list[_Request]:
        group: list[_Request] = []
        amount = size_bytes = 0
        while self._waiting:
            first = self._waiting[0]
            is_full = amount + first.amount > self._most or (
                size_bytes + first.size_bytes > _GROUP_BYTES
            )
            if group and is_full:
                break
            group.append(self._waiting.popleft())
            amount += first.amount
            size_bytes += first.size_bytes
        self._waiting_bytes -= size_bytes
        return group


class OpenStore:
    """An open store, with its writer.

    Attributes:
        store: The store.
    """

    def __init__(self, store: RunStore, threads: WorkThreads, *, groups: bool) -> None:
        self.store = store
        self._threads = threads
        self._commits = _Groups(self._store, threads, _GROUP_BATCHES) if groups else None
        self._calls = _Groups(store.coordinate_together, threads, _GROUP_CALLS) if groups else None
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
            size_bytes = sum(len(batch.body) for batch in batches)
            await self._commits.ask(batches, amount=len(batches), size_bytes=size_bytes)

    async def coordinate(self, call: Callable[[], T]) -> T:
        """What a call of a method of `SupportsCoordination` that changes something returns."""
        if self._calls is None:
            return await self._threads.write(call)
        found: T = await self._calls.ask(call)
        return found

    async def close(self) -> None:
        """Finish what is being written and close the store."""
        for groups in (self._commits, self._calls):
            if groups is not None:
                await groups.finish()
        await self._threads.write(self.store.close)

    def _store(self, group: Sequence[Sequence[Batch]]) -> list[Exception | None]:
        """Store a group in one transaction; where one is refused, each request by itself."""
        try:
            self.store.write_group([batch for batches in group for batch in batches])
        except BackendRejected as error:
            if len(group) == 1:
                return [error]
        else:
            return [None] * len(group)
        outcomes: list[Exception | None] = []
        for batches in group:
            try:
                self.store.write_group(batches)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes


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
        open_store: Callable[[str], RunStore],
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
                        ErrorCode.UNAVAILABLE, "the server is stopping", retry_after_s=5.0
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


class WorkspaceReader:
    """Reads the store and the payloads of one workspace; every method from any thread.

    It has what `SupportsRead`, `SupportsSeries`, `SupportsChanges`, `SupportsSearch`,
    `SupportsPages`, `SupportsGrid`, `SupportsGenerations`, `SupportsArtifacts` and
    `SupportsCoordination` read with, and refuses to write.

    Args:
        store: The store, which stays open as long as this is used; not closed by it.
        vault: Where payloads are; None where none are asked for.
        workspace: The workspace's name.
    """

    def __init__(self, store: RunStore, vault: PayloadVault | None, workspace: str) -> None:
        self._vault = vault
        self._workspace = workspace
        self.load_run = store.load_run
        self.list_runs = store.list_runs
        self.read = store.read
        self.iterate = store.iterate
        self.read_series = store.read_series
        self.read_series_many = store.read_series_many
        self.read_heads = store.read_heads
        self.read_changes = store.read_changes
        self.read_mark = store.read_mark
        self.read_grid = store.read_grid
        self.read_outputs = store.read_outputs
        self.search = store.search
        self.search_page = store.search_page
        self.list_names = store.list_names
        self.summarize = store.summarize
        self.list_sweeps = store.list_sweeps
        self.load_sweep = store.load_sweep
        self.list_trials = store.list_trials

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        found = None
        if self._vault is not None:
            found = self._vault.open(self._workspace, run_id, sha256)
        if found is None:
            raise ArtifactNotFoundError(f"payload {sha256} of run {run_id} is not stored here")
        return found

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`: there is none to put anything into."""
        del run_id
        return None

    def put_payload(self, payload: Payload) -> None:
        """Refuses."""
        del payload
        _refuse()

    def write(self, batch: Batch) -> None:
        """Refuses."""
        del batch
        _refuse()

    def write_generation(self, generation: Generation) -> int:
        """Refuses."""
        del generation
        _refuse()

    def close(self) -> None:
        """Leaves the store to whoever has opened it."""


def _refuse() -> NoReturn:
    raise BackendUnavailable("the workspace is read-only")
