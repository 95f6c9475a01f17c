"""The table of the service's routes."""

from __future__ import annotations

from typing import Any

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    JSON,
    Acknowledged,
    CollectReply,
    CollectRequest,
    ErrorCode,
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
from quark_backends.service.server import ingest_routes, openapi, payload_routes, removal_routes
from quark_backends.service.server.call_routes import CALL_ROUTES
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.deployment import StoredKey
from quark_backends.service.server.ingest_routes import (
    HeartbeatRequest,
    LogRequest,
    StartRequest,
    StatusRequest,
    TagRequest,
)
from quark_backends.service.server.keys import MICROSECONDS, make_key, rotate_key
from quark_backends.service.server.responses import ServiceFailure
from quark_backends.service.server.service import Call, Parameter, ServiceRoute
from quark_core.backends.run_summary import StoredRun
from quark_core.records import format_time
from quark_core.records.base import now_us

_BYTES = ("application/octet-stream",)


async def _show_run(call: Call) -> ASGIApp:
    """One run: what the URI of a run leads to."""
    return await call.read("load_run", call.run_id)


_WORKSPACE = ServiceRoute(
    "GET", "/v1/workspace", openapi.describe_workspace, ANY_SCOPE, reply=WorkspaceReply
)

_RUN = ServiceRoute("GET", "/v1/runs/{run_id}", _show_run, "read", reply=StoredRun)

_WRITES = (
    ServiceRoute(
        "POST",
        "/v1/runs/{run_id}/batches",
        ingest_routes.ingest,
        "ingest",
        request=IngestRequest,
        reply=Acknowledged,
    ),
    ServiceRoute(
        "POST",
        "/v1/runs/{run_id}/generations",
        ingest_routes.write_generation,
        "ingest",
        request=GenerationRequest,
        reply=GenerationReply,
    ),
)

_IDEMPOTENT = (
    Parameter(
        name="Idempotency-Key",
        schema={"type": "string", "maxLength": 200},
        summary="A name for the request. A second request with the same name has no effect.",
        place="header",
    ),
)


def _control(path: str, handler: Any, request: Any) -> ServiceRoute:
    return ServiceRoute(
        "POST",
        f"/v1/runs/{{run_id}}/{path}",
        handler,
        "ingest",
        request=request,
        reply=Acknowledged,
        parameters=_IDEMPOTENT,
    )


_CONTROL = (
    ServiceRoute(
        "POST",
        "/v1/runs",
        ingest_routes.start_run,
        "ingest",
        request=StartRequest,
        reply=dict[str, Any],
        parameters=_IDEMPOTENT,
        status=201,
    ),
    _control("tags", ingest_routes.add_tags, TagRequest),
    _control("logs", ingest_routes.add_log, LogRequest),
    _control("status", ingest_routes.set_status, StatusRequest),
    _control("heartbeat", ingest_routes.beat, HeartbeatRequest),
)

_COLLECT = ServiceRoute(
    "POST",
    "/v1/trash/collect",
    removal_routes.collect_trash,
    "admin",
    request=CollectRequest,
    reply=CollectReply,
    notes="Works for a few seconds. If the reply is not complete, repeat the request to continue.",
)


async def _list_keys(call: Call) -> ASGIApp:
    """The keys of the workspace, without their secrets."""
    control = call.service.control
    found = await call.service.threads.key(control.list_keys, call.principal.workspace)
    return call.reply(KeyList([_describe_key(each) for each in found]))


async def _create_key(call: Call) -> ASGIApp:
    """Make a key for the workspace; only this reply tells all of it."""
    request = await call.decode(KeyRequest)
    expires_us = None
    if request.expires_in_s is not None:
        expires_us = now_us() + int(request.expires_in_s * MICROSECONDS)
    text, made = await call.service.threads.key(
        make_key,
        call.service.control,
        workspace=call.principal.workspace,
        name=request.name,
        scopes=request.scopes,
        expires_us=expires_us,
    )
    return call.reply(NewKey(text, _describe_key(made)))


async def _rotate_key(call: Call) -> ASGIApp:
    """Make a key like this one, which lives on for a time."""
    request = await call.decode(RotateRequest)
    old = await _find_key(call)
    text, made = await call.service.threads.key(
        rotate_key, call.service.control, old, overlap_s=request.overlap_s
    )
    call.service.guard.forget(old.id)
    return call.reply(NewKey(text, _describe_key(made)))


async def _revoke_key(call: Call) -> ASGIApp:
    """Revoke a key."""
    old = await _find_key(call)
    control = call.service.control
    await call.service.threads.key(control.end_key, old.id, revoked_us=now_us())
    call.service.guard.forget(old.id)
    found = await call.service.threads.key(control.find_key, old.id)
    return call.reply(_describe_key(found or old))


async def _find_key(call: Call) -> StoredKey:
    """The key that the path names, if the workspace has it."""
    key_id = call.path_text("key_id")
    control = call.service.control
    found = await call.service.threads.key(control.find_key, key_id)
    if found is None or found.workspace != call.principal.workspace:
        raise ServiceFailure(ErrorCode.NOT_FOUND, "the workspace lacks this key", field="key_id")
    return found


def _describe_key(key: StoredKey) -> KeyInfo:
    def spell(moment_us: int | None) -> str | None:
        return None if moment_us is None else format_time(moment_us)

    return KeyInfo(
        id=key.id,
        name=key.name,
        scopes=tuple(sorted(key.scopes)),
        created_at=format_time(key.created_us),
        expires_at=spell(key.expires_us),
        revoked_at=spell(key.revoked_us),
        last_used_at=spell(key.last_used_us),
    )


_KEYS = (
    ServiceRoute("GET", "/v1/keys", _list_keys, "admin", reply=KeyList),
    ServiceRoute(
        "POST", "/v1/keys", _create_key, "admin", request=KeyRequest, reply=NewKey, status=201
    ),
    ServiceRoute(
        "POST",
        "/v1/keys/{key_id}/rotate",
        _rotate_key,
        "admin",
        request=RotateRequest,
        reply=NewKey,
        status=201,
    ),
    ServiceRoute("DELETE", "/v1/keys/{key_id}", _revoke_key, "admin", reply=KeyInfo),
)

_PAYLOADS = (
    ServiceRoute(
        "PUT",
        "/v1/runs/{run_id}/payloads/{sha256}",
        payload_routes.put_payload,
        "ingest",
        request=bytes,
        reply=PayloadReply,
    ),
    ServiceRoute(
        "HEAD",
        "/v1/runs/{run_id}/payloads/{sha256}",
        payload_routes.head_payload,
        "read",
        media=_BYTES,
    ),
    ServiceRoute(
        "GET",
        "/v1/runs/{run_id}/payloads/{sha256}",
        payload_routes.get_payload,
        "read",
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
    """This description for programs."""
    return call.reply(openapi.describe(ROUTES))


async def _show_docs(call: Call) -> ASGIApp:
    """This description for people."""
    del call
    return HTMLResponse(
        openapi.show(ROUTES),
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


_SERVER = (
    ServiceRoute("GET", "/healthz", openapi.report_health, None, reply=openapi.HealthReply),
    ServiceRoute("GET", "/readyz", openapi.report_readiness, None, reply=openapi.HealthReply),
    ServiceRoute("GET", "/metrics", openapi.show_metrics, None, media=("text/plain",)),
    ServiceRoute("GET", "/openapi.json", _describe_openapi, None, media=(JSON,)),
    ServiceRoute("GET", "/docs", _show_docs, None, media=("text/html",)),
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
