"""The ASGI application of the service, and the state that its routes share."""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Send
from starlette.types import Scope as types_Scope

from quark_backends.service.calls import CALL_ROUTE
from quark_backends.service.server.call_routes import CALL_ROUTES
from quark_backends.service.server.config import Principal, Scope, ServiceConfig
from quark_backends.service.server.deployment import ControlDatabase, Deployment
from quark_backends.service.server.ingest_validation import RunKeys
from quark_backends.service.server.keys import KeyGuard
from quark_backends.service.server.middleware import UNROUTED, RequestMiddleware
from quark_backends.service.server.payloads import FolderVault, PayloadVault
from quark_backends.service.server.requests import (
    BodyRoom,
    Call,
    FairBudget,
    FairPlaces,
    ServiceRoute,
    WorkThreads,
)
from quark_backends.service.server.routes import ROUTES
from quark_backends.service.server.stores import WorkspaceStores
from quark_backends.store.run_store import RunStore

# What the routes of one process share, and what /metrics shows over all processes of a server.
#
# The counters of each process lie in a row of their own in a file that all of
# them map, and are added up when they are asked for: whichever process a scrape
# reaches, it shows all. That takes no more than this module; the usual client
# library keeps a file for each process and metric for the same end.

DURATION_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Upper bounds of the buckets of durations."""

_STATUSES = ("2xx", "3xx", "4xx", "5xx")
_SIMPLE = {
    "quark_ingested_batches_total": "Batches that were acknowledged.",
    "quark_ingested_rows_total": "Records in them.",
    "quark_received_bytes_total": "Bytes of requests' bodies.",
    "quark_sent_bytes_total": "Bytes of replies' bodies.",
    "quark_refused_keys_total": "Requests whose key was refused.",
    "quark_rate_limited_total": "Requests that came too often.",
    "quark_failures_total": "Requests that the server failed to serve, by a bug.",
}
_GAUGES = {"quark_requests_in_flight": "Requests that are being worked on."}
_VALUE_BYTES = 8


class ServerMetrics:
    """Counters of one process among those of its server.

    Args:
        routes: Names of the routes that requests are counted by.
        worker: Which of the processes this is, from 0.
        workers: How many there are.
        path: The file that they share; made where it is None.
    """

    def __init__(
        self, routes: list[str], *, worker: int = 0, workers: int = 1, path: str | None = None
    ) -> None:
        self._routes = routes
        self._slots = {name: index for index, name in enumerate(self._list_slots())}
        self._width = len(self._slots)
        self._workers = workers
        self._start = worker * self._width
        size = max(1, len(self._slots) * workers) * _VALUE_BYTES
        if path is None:
            descriptor, made = tempfile.mkstemp(prefix="quark-figures-")
            os.unlink(made)
        else:
            descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            # A page of memory begins it, so that each value is where the machine wants one.
            self._values = memoryview(mmap.mmap(descriptor, size)).cast("d")
        finally:
            os.close(descriptor)
        # What an earlier process in this place was working on is no longer worked on.
        for name in _GAUGES:
            self._values[self._start + self._slots[name]] = 0.0
        # Where the sum of a route is; its counters by status and by duration follow.
        self._sums = {route: self._start + self._slots[f"sum/{route}"] for route in routes}

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter of this process."""
        self._values[self._start + self._slots[name]] += amount

    def note_request(self, route: str, status: int, duration_s: float) -> None:
        """Count a request that was answered."""
        values, place = self._values, self._sums[route]
        values[place] += duration_s
        values[place + 1 + min(max(status // 100 - 2, 0), 3)] += 1.0
        place += 1 + len(_STATUSES)
        for each in range(bisect_left(DURATION_BOUNDS_S, duration_s), len(DURATION_BOUNDS_S)):
            values[place + each] += 1.0

    def read(self, name: str) -> float:
        """A counter, over all processes."""
        return sum(self._get(worker * self._width, name) for worker in range(self._workers))

    def to_text(self) -> str:
        """All of them as Prometheus reads them."""
        return "\n".join(self._list_lines()) + "\n"

    def _list_lines(self) -> Iterator[str]:
        for kind, group in (("counter", _SIMPLE), ("gauge", _GAUGES)):
            for name, summary in group.items():
                yield f"# HELP {name} {summary}"
                yield f"# TYPE {name} {kind}"
                yield f"{name} {self.read(name):.0f}"
        yield "# HELP quark_requests_total Requests that were answered."
        yield "# TYPE quark_requests_total counter"
        for route in self._routes:
            for status in _STATUSES:
                if count := self.read(f"status/{route}/{status}"):
                    yield f'quark_requests_total{{route="{route}",status="{status}"}} {count:.0f}'
        yield "# HELP quark_request_seconds How long requests took."
        yield "# TYPE quark_request_seconds histogram"
        for route in self._routes:
            count = sum(self.read(f"status/{route}/{status}") for status in _STATUSES)
            if not count:
                continue
            label = f'route="{route}"'
            for bound in DURATION_BOUNDS_S:
                below = self.read(f"bucket/{route}/{bound:g}")
                yield f'quark_request_seconds_bucket{{{label},le="{bound:g}"}} {below:.0f}'
            yield f'quark_request_seconds_bucket{{{label},le="+Inf"}} {count:.0f}'
            yield f"quark_request_seconds_sum{{{label}}} {self.read(f'sum/{route}'):.6f}"
            yield f"quark_request_seconds_count{{{label}}} {count:.0f}"

    def _list_slots(self) -> Iterator[str]:
        yield from _SIMPLE
        yield from _GAUGES
        for route in self._routes:
            yield f"sum/{route}"
            yield from (f"status/{route}/{status}" for status in _STATUSES)
            yield from (f"bucket/{route}/{bound:g}" for bound in DURATION_BOUNDS_S)

    def _get(self, start: int, name: str) -> float:
        return self._values[start + self._slots[name]]


_STREAMS = 16
_UPKEEP = 2


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
    """The stores, payloads, keys, threads and metrics of one process.

    Attributes:
        config: How the server is set up.
        guard: Lets requests in.
        vault: Keeps the payloads of artifacts.
        stores: The stores of the workspaces.
        run_keys: Counts the different metrics of runs.
        threads: Where whatever blocks is done.
        bodies: The room that requests' bodies have.
        places: Leaves room for requests of other workspaces.
        metrics: What /metrics tells.
        control: The control database.
        streams: Bounds how many replies of rows are made at once: each holds a
            connection to its store for as long as its reader takes.
        upkeep: Bounds how many workspaces are measured or cleared up at once.
        is_draining: The server is about to end; it is not ready any more.
        working: Requests that are being worked on.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        guard: Guard,
        vault: PayloadVault,
        open_store: Callable[[str], RunStore],
        groups: bool,
        metrics: ServerMetrics,
        threads: WorkThreads,
        control: ControlDatabase,
        on_close: Callable[[], None],
    ) -> None:
        self.config = config
        self.guard = guard
        self.vault = vault
        self.threads = threads
        self.metrics = metrics
        self.stores = WorkspaceStores(open_store, threads, limit=config.open_stores, groups=groups)
        self.run_keys = RunKeys(config.limits.keys_per_run)
        self.bodies = BodyRoom(config.limits)
        self.places = FairPlaces(config.limits.concurrent_requests)
        self.is_draining = False
        self.working = 0
        self.control = control
        self._on_close = on_close
        self.streams = FairBudget(
            _STREAMS, _STREAMS // 2, "the server sends as many replies of rows as it may"
        )

        self.upkeep = FairBudget(
            _UPKEEP, 1, "the server measures or clears up as much as it may; come again"
        )

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


_PAGE = "page"
_API = "/v1"


class MountedPage(Protocol):
    """What answers beside the service's own routes; of one event loop."""

    async def __call__(self, scope: types_Scope, receive: Receive, send: Send) -> None:
        """Answer one request, which is not of the service's API; it asks who that is by itself."""

    async def close(self) -> None:
        """Finish, before stores are closed."""


MakePage = Callable[[Service], MountedPage]
"""Makes it for one process of a server; a function of a module, so that others can find it."""


def make_application(
    config: ServiceConfig,
    *,
    worker: int = 0,
    metrics_path: str | None = None,
    make_page: MakePage | None = None,
) -> Starlette:
    """The application of one process of a server.

    Args:
        config: How the server is set up.
        worker: Which of its processes this is, from 0.
        metrics_path: The file in which the processes keep their metrics; None for one process.
        make_page: Makes what answers beside the API; None where nothing does.

    Raises:
        SchemaValidationError: The configuration names something that cannot be.
        SessionStoreError: A database is of another version, or cannot be reached.
    """
    deployment = Deployment(config)
    deployment.check()
    threads = WorkThreads()
    service = Service(
        config,
        guard=KeyGuard(
            deployment.control,
            threads,
            config.limits,
            cache_s=config.key_cache_s,
            workers=config.workers,
        ),
        vault=FolderVault(deployment.payload_root, threads),
        open_store=deployment.open_store,
        groups=deployment.groups,
        metrics=ServerMetrics(
            [*(f"{route.method} {route.path}" for route in ROUTES), UNROUTED, _PAGE],
            worker=worker,
            workers=config.workers,
            path=metrics_path,
        ),
        threads=threads,
        control=deployment.control,
        on_close=deployment.close,
    )
    return assemble(service, None if make_page is None else make_page(service))


def assemble(service: Service, page: MountedPage | None = None) -> Starlette:
    """The application over what its routes share; it closes that when it is shut down.

    Args:
        service: What the routes share.
        page: What answers beside them; closed first.
    """

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if page is not None:
                await page.close()
            await service.close()

    routes: list[Route | Mount] = [
        Route(route.path, _Endpoint(route, service), methods=[route.method])
        for route in ROUTES
        if not route.path.startswith(CALL_ROUTE)
    ]
    # One route of Starlette's for all calls: it tries one route after the other.
    calls = {route.path: _Endpoint(route, service) for route in CALL_ROUTES}
    routes.append(Route(f"{CALL_ROUTE}{{method}}", _CallEndpoint(calls), methods=["POST"]))
    if page is not None:
        routes.append(Mount("/", app=_PageEndpoint(page)))
    application = Starlette(
        routes=routes,
        middleware=[Middleware(RequestMiddleware, service=service)],
        exception_handlers={HTTPException: _pass_on},
        lifespan=lifespan,
    )
    application.router.redirect_slashes = False
    application.state.service = service
    return application


class _Endpoint:
    """One route of the table as an ASGI application."""

    def __init__(self, route: ServiceRoute, service: Service) -> None:
        self._route = route
        self._service = service
        self._name = f"{route.method} {route.path}"

    async def __call__(self, scope: types_Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        state["route"] = self._name
        request = Request(scope, receive, send)
        call = Call(self._service, self._route, request, state["request_id"])
        if self._route.scope is not None:
            call.principal = await self._service.guard.admit(
                request.headers.get("authorization"), self._route.scope
            )
            state["key_id"] = call.principal.key_id
            with self._service.places.take(call.principal.workspace, self._service.working):
                await self._serve(call, scope, receive, send)
        else:
            await self._serve(call, scope, receive, send)

    async def _serve(self, call: Call, scope: types_Scope, receive: Receive, send: Send) -> None:
        reply = await self._route.handler(call)
        await reply(scope, receive, send)


class _CallEndpoint:
    """All methods of the contract, by the paths of their routes."""

    def __init__(self, endpoints: Mapping[str, _Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: types_Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            raise HTTPException(404)
        await endpoint(scope, receive, send)


class _PageEndpoint:
    """Whatever is no route of the service, but for what looks like one."""

    def __init__(self, page: MountedPage) -> None:
        self._page = page

    async def __call__(self, scope: types_Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == _API or path.startswith(f"{_API}/"):
            raise HTTPException(404)
        scope["state"]["route"] = _PAGE
        await self._page(scope, receive, send)


async def _pass_on(_request: Request, error: Exception) -> Response:
    """Leave what Starlette itself refuses to the envelope around it."""
    raise error
