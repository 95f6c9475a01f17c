"""The ASGI application of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.http.call import Call, ServiceRoute
from quark_backends.service.server.http.middleware import UNROUTED, RequestMiddleware
from quark_backends.service.server.http.work import WorkThreads
from quark_backends.service.server.routes import ROUTES
from quark_backends.service.server.service import ServerMetrics, Service
from quark_backends.service.server.workspaces.deployment import Deployment
from quark_backends.service.server.workspaces.keys import KeyGuard
from quark_backends.service.server.workspaces.payload_vault import FolderVault

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
        Route(route.path, _Endpoint(route, service), methods=[route.method]) for route in ROUTES
    ]
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
