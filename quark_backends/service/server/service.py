"""What the routes of one process share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quark_backends.service.server.config import Principal, Scope, ServiceConfig
from quark_backends.service.server.control import ControlDatabase
from quark_backends.service.server.figures import Figures
from quark_backends.service.server.payload_vault import PayloadVault
from quark_backends.service.server.run_keys import RunKeys
from quark_backends.service.server.stores import WorkspaceStore, WorkspaceStores
from quark_backends.service.server.work import ByteBudget, WorkThreads

__all__ = ["Guard", "Service"]

_STREAMS = 16


class Guard(Protocol):
    """Says whom a request comes from, and how much it may ask for."""

    async def admit(self, authorization: str | None, scope: Scope) -> Principal:
        """Whom the key belongs to.

        Raises:
            ServiceFailure: No key, one that is not valid, one that lacks the
                scope, or one that asks too often.
        """

    def forget(self, key_id: str) -> None:
        """Look a key up again when it comes next."""

    async def note_use(self) -> None:
        """Write down which keys were used."""

    def spend_rows(self, principal: Principal, rows: int) -> None:
        """Count records that a key sends.

        Raises:
            ServiceFailure: It sends more than it may.
        """


class Service:
    """The stores, payloads, keys, threads and figures of one process.

    Attributes:
        config: How the server is set up.
        guard: Lets requests in.
        vault: Keeps the payloads of artifacts.
        stores: The stores of the workspaces.
        run_keys: Counts the different metrics of runs.
        threads: Where whatever blocks is done.
        budget: The memory of requests' bodies.
        figures: What /metrics tells.
        control: The control database.
        streams: Bounds how many replies of rows are made at once: each holds a
            connection to its store for as long as its reader takes.
        is_draining: The server is about to end; it is not ready any more.
        working: Requests that are being worked on.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        guard: Guard,
        vault: PayloadVault,
        open_store: Callable[[str], WorkspaceStore],
        groups: bool,
        figures: Figures,
        threads: WorkThreads,
        control: ControlDatabase,
        on_close: Callable[[], None],
    ) -> None:
        self.config = config
        self.guard = guard
        self.vault = vault
        self.threads = threads
        self.figures = figures
        self.stores = WorkspaceStores(open_store, threads, limit=config.open_stores, groups=groups)
        self.run_keys = RunKeys(config.limits.keys_per_run)
        self.budget = ByteBudget(config.limits.memory_bytes)
        self.is_draining = False
        self.working = 0
        self.control = control
        self._on_close = on_close
        self.streams = asyncio.Semaphore(_STREAMS)

    async def probe(self) -> None:
        """Ask the control database whether it answers.

        Raises:
            QuarkError: It does not.
        """
        await self.threads.key(self.control.probe)

    async def close(self) -> None:
        """Finish what was accepted, and give up stores and threads."""
        await self.guard.note_use()
        await self.stores.close()
        self.threads.close()
        self._on_close()
