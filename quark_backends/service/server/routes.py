"""The table of the service's routes."""

from __future__ import annotations

from typing import Any

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    Acknowledged,
    CollectReply,
    CollectRequest,
    GenerationReply,
    GenerationRequest,
    IngestRequest,
    KeyInfo,
    KeyList,
    KeyRequest,
    NewKey,
    PayloadReply,
    RotateRequest,
    WorkspaceReply,
)
from quark_backends.service.server import ingest_routes, keys, openapi, payloads, removal_routes
from quark_backends.service.server.call_routes import CALL_ROUTES
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.ingest_routes import (
    HeartbeatRequest,
    LogRequest,
    StartRequest,
    StatusRequest,
    TagRequest,
)
from quark_backends.service.server.requests import Call, Parameter, ServiceRoute
from quark_core.backends.run_summary import StoredRun

_BOTH = (JSON, MSGPACK)
_BYTES = ("application/octet-stream",)


async def _show_run(call: Call) -> ASGIApp:
    return await call.read("load_run", call.run_id)


_WORKSPACE = ServiceRoute(
    method="GET",
    path="/v1/workspace",
    handler=openapi.describe_workspace,
    summary="Whom the key lets in, and what the server takes.",
    scope=ANY_SCOPE,
    reply=WorkspaceReply,
    media=_BOTH,
)

_RUN = ServiceRoute(
    method="GET",
    path="/v1/runs/{run_id}",
    handler=_show_run,
    summary="One run: what the URI of a run leads to.",
    scope="read",
    reply=StoredRun,
    media=_BOTH,
)

_WRITES = (
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/batches",
        handler=ingest_routes.ingest,
        summary="Store batches, all of them or none; answered once they are committed.",
        scope="ingest",
        request=IngestRequest,
        reply=Acknowledged,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/runs/{run_id}/generations",
        handler=ingest_routes.write_generation,
        summary="Keep the outputs of one analysis, visible all at once.",
        scope="ingest",
        request=GenerationRequest,
        reply=GenerationReply,
        media=_BOTH,
    ),
)

_IDEMPOTENT = (
    Parameter(
        name="Idempotency-Key",
        schema={"type": "string", "maxLength": 200},
        summary="Names the request: sent again with the same name, it does nothing more.",
        place="header",
    ),
)


def _control(path: str, handler: Any, request: Any, summary: str) -> ServiceRoute:
    return ServiceRoute(
        method="POST",
        path=f"/v1/runs/{{run_id}}/{path}",
        handler=handler,
        summary=summary,
        scope="ingest",
        request=request,
        reply=Acknowledged,
        parameters=_IDEMPOTENT,
        media=_BOTH,
    )


_CONTROL = (
    ServiceRoute(
        method="POST",
        path="/v1/runs",
        handler=ingest_routes.start_run,
        summary="Start a run.",
        scope="ingest",
        request=StartRequest,
        reply=dict[str, Any],
        parameters=_IDEMPOTENT,
        media=_BOTH,
        status=201,
    ),
    _control("tags", ingest_routes.add_tags, TagRequest, "Add tags to a run."),
    _control("logs", ingest_routes.add_log, LogRequest, "Add a log line to a run."),
    _control("status", ingest_routes.set_status, StatusRequest, "End a run."),
    _control("heartbeat", ingest_routes.beat, HeartbeatRequest, "Say that a run lives."),
)

_COLLECT = ServiceRoute(
    method="POST",
    path="/v1/trash/collect",
    handler=removal_routes.collect_trash,
    summary="Remove what is in the trash for good.",
    scope="admin",
    request=CollectRequest,
    reply=CollectReply,
    media=_BOTH,
    notes="Works for a few seconds; where the reply is not done, the same request goes on.",
)

_KEYS = (
    ServiceRoute(
        method="GET",
        path="/v1/keys",
        handler=keys.list_keys,
        summary="The keys of the workspace, without their secrets.",
        scope="admin",
        reply=KeyList,
        media=_BOTH,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/keys",
        handler=keys.create_key,
        summary="Make a key for the workspace; only this reply tells all of it.",
        scope="admin",
        request=KeyRequest,
        reply=NewKey,
        media=_BOTH,
        status=201,
    ),
    ServiceRoute(
        method="POST",
        path="/v1/keys/{key_id}/rotate",
        handler=keys.rotate,
        summary="Make a key like this one, which lives on for a time.",
        scope="admin",
        request=RotateRequest,
        reply=NewKey,
        media=_BOTH,
        status=201,
    ),
    ServiceRoute(
        method="DELETE",
        path="/v1/keys/{key_id}",
        handler=keys.revoke_key,
        summary="Revoke a key.",
        scope="admin",
        reply=KeyInfo,
        media=_BOTH,
    ),
)

_PAYLOADS = (
    ServiceRoute(
        method="PUT",
        path="/v1/runs/{run_id}/payloads/{sha256}",
        handler=payloads.put_payload,
        summary="Keep the payload of an artifact; 201 where it is new.",
        scope="ingest",
        request=bytes,
        reply=PayloadReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="HEAD",
        path="/v1/runs/{run_id}/payloads/{sha256}",
        handler=payloads.head_payload,
        summary="The size of a payload.",
        scope="read",
        media=_BYTES,
    ),
    ServiceRoute(
        method="GET",
        path="/v1/runs/{run_id}/payloads/{sha256}",
        handler=payloads.get_payload,
        summary="A payload, or one range of it.",
        scope="read",
        reply=bytes,
        parameters=(
            Parameter(
                name="Range",
                schema={"type": "string"},
                summary="One range, such as bytes=0-99.",
                place="header",
            ),
        ),
        media=_BYTES,
    ),
)


async def _describe_openapi(call: Call) -> ASGIApp:
    """The description of this service for programs."""
    return call.reply(openapi.describe(ROUTES))


async def _show_docs(call: Call) -> ASGIApp:
    """The description of this service for people."""
    del call
    return HTMLResponse(
        openapi.show(ROUTES),
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


_SERVER = (
    ServiceRoute(
        method="GET",
        path="/healthz",
        handler=openapi.report_health,
        summary="The process serves.",
        scope=None,
        reply=openapi.HealthReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/readyz",
        handler=openapi.report_readiness,
        summary="The process takes work; 503 where it is about to end.",
        scope=None,
        reply=openapi.HealthReply,
        media=_BOTH,
    ),
    ServiceRoute(
        method="GET",
        path="/metrics",
        handler=openapi.show_metrics,
        summary="Figures for Prometheus, over all processes of the server.",
        scope=None,
        media=("text/plain",),
    ),
    ServiceRoute(
        method="GET",
        path="/openapi.json",
        handler=_describe_openapi,
        summary="This description for programs.",
        scope=None,
        media=(JSON,),
    ),
    ServiceRoute(
        method="GET",
        path="/docs",
        handler=_show_docs,
        summary="This description for people.",
        scope=None,
        media=("text/html",),
    ),
)

ROUTES: tuple[ServiceRoute, ...] = (
    _WORKSPACE,
    _RUN,
    *_WRITES,
    *_CONTROL,
    *_PAYLOADS,
    *CALL_ROUTES,
    _COLLECT,
    *_KEYS,
    *_SERVER,
)
"""Every route. Where two paths fit, the first of the table is taken."""
