"""`quark serve --ui`: the page over the service, which know nothing of each other.

What they ask of each other is joined here: the service's keys, logins and stores, as the page's
`TeamHost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quark.page.routes.page_source import PageSource, Reopening
from quark.page.team import LoginRefused, TeamPage, TeamSession
from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import Deployment
from quark_backends.service.server.keys import PageSessions
from quark_backends.service.server.responses import ServiceFailure
from quark_backends.service.server.stores import WorkspaceReader
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.runs.run_reader import ForeignStore

if TYPE_CHECKING:
    from quark.page.routes.edits import PageEditor
    from quark_backends.service.server.application import Service
    from quark_backends.service.server.deployment import PageSession

_WRITES = frozenset(("write", "admin"))
_MICROSECONDS = 1_000_000
_STATUSES = {"unauthorized": 401, "forbidden": 403, "rate_limited": 429}


class _Place(msgspec.Struct, frozen=True):
    """How another process finds a workspace."""

    store_url: str
    artifact_url: str
    workspace: str


def make_team_page(service: Service) -> TeamPage:
    """The page over what the routes of a service share; called in each process of a server."""
    return TeamPage(_ServiceHost(service), allow_edit=service.config.allow_edit)


def open_workspace_source(argument: str) -> PageSource:
    """Open a workspace once more, in a process of its own that analyzes; see `Reopening`."""
    place = msgspec.json.decode(argument, type=_Place)
    config = ServiceConfig(store_url=place.store_url, artifact_url=place.artifact_url)
    store = Deployment(config).open_store(place.workspace, read_only=True)
    return _make_source(WorkspaceReader(store, None, place.workspace), place)


def _make_source(reader: WorkspaceReader, place: _Place) -> PageSource:
    name = f"workspace {place.workspace}"
    # Where the server keeps it is nobody's affair.
    store = ForeignStore(reader, "service", name, Path("/"))
    return PageSource(
        reader,
        place=name,
        backend="service",
        storage_dir=Path("/"),
        open_run=store.open_run,
        reopening=Reopening(
            f"{__name__}:{open_workspace_source.__name__}", msgspec.json.encode(place).decode()
        ),
    )


class _OpenWorkspace:
    """A workspace's store, leased until it is closed."""

    def __init__(self, source: PageSource, editor: PageEditor, leases: AsyncExitStack) -> None:
        self.source = source
        self.editor = editor
        self._leases = leases

    async def close(self) -> None:
        """See `OpenWorkspace`."""
        await self._leases.aclose()


class _ServiceHost:
    """A service as the page asks it; see `TeamHost`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sessions = PageSessions(service)

    async def log_in(self, key: str, secret: str) -> TeamSession:
        """See `TeamHost`."""
        try:
            return _describe(await self._sessions.begin(key, secret))
        except ServiceFailure as failure:
            status = _STATUSES.get(str(failure.code), 503)
            said = "this key lets nobody in" if status == 401 else failure.message
            raise LoginRefused(said, status, failure.retry_after_s) from failure

    async def find_session(self, secret: str) -> TeamSession | None:
        """See `TeamHost`."""
        found = await self._sessions.find(secret)
        return None if found is None else _describe(found)

    async def log_out(self, secret: str) -> None:
        """See `TeamHost`."""
        await self._sessions.end(secret)

    async def open_workspace(self, workspace: str) -> _OpenWorkspace:
        """See `TeamHost`."""
        leases = AsyncExitStack()
        opened = await leases.enter_async_context(self._service.stores.lease(workspace))
        config = self._service.config
        place = _Place(config.store_url, config.artifact_url, workspace)
        reader = WorkspaceReader(opened.store, self._service.vault, workspace)
        return _OpenWorkspace(_make_source(reader, place), opened.store, leases)

    @asynccontextmanager
    async def take_place(self, workspace: str) -> AsyncIterator[None]:
        """See `TeamHost`."""
        with self._service.places.take(workspace, self._service.working):
            yield


def _describe(session: PageSession) -> TeamSession:
    key = session.key
    return TeamSession(
        workspace=key.workspace,
        key_id=key.id,
        name=key.name,
        scopes=tuple(sorted(key.scopes)),
        may_write=bool(key.scopes & _WRITES),
        ends_at=format_time(session.expires_us),
        lasts_s=max(0.0, (session.expires_us - now_us()) / _MICROSECONDS),
    )
