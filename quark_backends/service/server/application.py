"""The ASGI application of the service: its routes, and the page beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from quark_backends.service.calls import CALL_ROUTE
from quark_backends.service.server.call_routes import CALL_ROUTES
from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.middleware import UNROUTED, RequestMiddleware
from quark_backends.service.server.routes import ROUTES
from quark_backends.service.server.service import Call, ServerMetrics, Service, ServiceRoute

_PAGE = "page"
_API = "/v1"


class MountedPage(Protocol):
    """What answers beside the service's own routes; of one event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    metrics = ServerMetrics(
        [*(f"{route.method} {route.path}" for route in ROUTES), UNROUTED, _PAGE],
        worker=worker,
        workers=config.workers,
        path=metrics_path,
    )
    service = Service(config, metrics)
    page = None if make_page is None else make_page(service)

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._route.handler(call)
        await reply(scope, receive, send)


class _CallEndpoint:
    """All methods of the contract, by the paths of their routes."""

    def __init__(self, endpoints: Mapping[str, _Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            raise HTTPException(404)
        await endpoint(scope, receive, send)


class _PageEndpoint:
    """Whatever is no route of the service, but for what looks like one."""

    def __init__(self, page: MountedPage) -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == _API or path.startswith(f"{_API}/"):
            raise HTTPException(404)
        scope["state"]["route"] = _PAGE
        await self._page(scope, receive, send)


async def _pass_on(_request: Request, error: Exception) -> Response:
    """Leave what Starlette itself refuses to the envelope around it."""
    raise error
