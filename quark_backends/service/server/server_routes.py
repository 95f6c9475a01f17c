"""What the service says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp

from quark_backends.service.protocol import PROTOCOL_VERSION, ErrorCode, WorkspaceReply
from quark_backends.service.server.http.call import Call
from quark_backends.service.server.http.replies import ServiceFailure
from quark_core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark_backends.service.server.http.call import ServiceRoute


class HealthReply(msgspec.Struct, frozen=True):
    """`GET /healthz` and `GET /readyz`."""

    status: str
    server: str = __version__


async def describe_workspace(call: Call) -> ASGIApp:
    """Whom the key lets in, and what the server takes."""
    principal = call.principal
    limits = call.service.config.limits
    return call.reply(
        WorkspaceReply(
            workspace=principal.workspace,
            key_id=principal.key_id,
            scopes=tuple(sorted(principal.scopes)),
            protocol=PROTOCOL_VERSION,
            server=__version__,
            limits={
                name: int(value)
                for name in limits.__dataclass_fields__
                if isinstance(value := getattr(limits, name), (int, float))
            },
            page=call.service.config.ui,
            keeps_sources=call.service.config.keep_sources,
        )
    )


async def report_health(call: Call) -> ASGIApp:
    """The process serves."""
    return call.reply(HealthReply("ok"))


async def report_readiness(call: Call) -> ASGIApp:
    """The process takes work: it is not about to end, and its database answers."""
    if call.service.is_draining:
        raise ServiceFailure(ErrorCode.UNAVAILABLE, "the server is about to end", retry_after_s=5.0)
    await call.service.probe()
    return call.reply(HealthReply("ready"))


async def show_metrics(call: Call) -> ASGIApp:
    """Metrics of the server for Prometheus."""
    return PlainTextResponse(
        call.service.metrics.to_text(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


async def describe_openapi(call: Call) -> ASGIApp:
    """The description of this service for programs."""
    from quark_backends.service.server.openapi import describe

    return call.reply(describe(_routes()))


async def show_docs(call: Call) -> ASGIApp:
    """The description of this service for people."""
    from quark_backends.service.server.openapi import show

    del call
    return HTMLResponse(
        show(_routes()),
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


def _routes() -> Sequence[ServiceRoute]:
    from quark_backends.service.server.routes import ROUTES

    return ROUTES
