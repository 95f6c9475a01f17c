"""Describes the service: health, limits and metrics, its routes as OpenAPI 3.1 and as a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, get_origin

import msgspec
import numpy as np
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    PROTOCOL_VERSION,
    RUN_ID,
    SHA256,
    ErrorCode,
    ErrorReply,
    IngestRequest,
    WorkspaceReply,
)
from quark_backends.service.server.ingest_routes import JsonIngest
from quark_backends.service.server.responses import ServiceFailure
from quark_backends.service.server.service import Call, Parameter, ServiceRoute
from quark_core.records.columns import Columns
from quark_core.version import __version__

_PARAMETER = re.compile(r"\{(\w+)\}")
_BYTES = "application/octet-stream"
_BINARY = {"type": "string", "format": "binary"}
_PLACES: dict[str, dict[str, Any]] = {
    "run_id": {"type": "string", "pattern": f"^{RUN_ID.pattern}$"},
    "sha256": {"type": "string", "pattern": f"^{SHA256.pattern}$"},
    "key_id": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
}
_ERRORS = {
    "400": "The request cannot be read or has invalid values.",
    "401": "The API key is missing or not valid.",
    "403": "The API key does not have the scope.",
    "404": "The workspace does not have the run, payload or key.",
    "405": "The route does not support this method.",
    "408": "The body arrived too slowly.",
    "409": "It already exists with different content.",
    "413": "A limit of this server.",
    "415": "The server does not accept this media type or encoding.",
    "416": "The payload does not have this range.",
    "421": "The server does not answer for this host.",
    "422": "The batch cannot be stored and must not be retried.",
    "429": "Too many requests. Retry-After states when to retry.",
    "500": "A bug in the server. Its log has the same request_id.",
    "503": "The store is busy or unreachable, or the server is stopping.",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;"
    "border-bottom:1px solid #ccc;vertical-align:top}code{font:14px ui-monospace,monospace}"
    "pre{background:#f4f4f4;padding:1rem;overflow:auto}"
)


def describe(routes: Sequence[ServiceRoute]) -> dict[str, Any]:
    """The description of the routes for programs."""
    kinds = {kind for route in routes for kind in (route.request, route.reply)}
    types = [ErrorReply, JsonIngest, *(kinds - {None, bytes})]
    found, components = msgspec.json.schema_components(
        types, schema_hook=_describe_other, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe_route(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quark server",
            "version": __version__,
            "description": "Every reply has the header Quark-Protocol. Bodies are JSON or msgpack, "
            "by Content-Type and Accept; errors are the same envelope everywhere.",
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": paths,
    }


def show(routes: Sequence[ServiceRoute]) -> str:
    """The description of the routes for people: one page that loads nothing else."""
    rows = "".join(
        f"<tr><td><code>{route.method}</code></td><td><code>{escape(route.path)}</code></td>"
        f"<td>{escape(route.scope or 'no key')}</td><td>{escape(route.summary)} "
        f"{escape(route.notes)}{_show_parameters(route.parameters)}</td></tr>"
        for route in routes
    )
    errors = "".join(
        f"<tr><td><code>{status}</code></td><td>{escape(text)}</td></tr>"
        for status, text in _ERRORS.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Quark server {escape(__version__)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>Quark server</h1>"
        "<p>Send <code>Authorization: Bearer qk_…</code>. Bodies are JSON or msgpack, by "
        "<code>Content-Type</code> and <code>Accept</code>. "
        '<a href="/openapi.json">openapi.json</a> describes them for programs.</p>'
        "<pre>curl -H 'Authorization: Bearer '\"$QUARK_USER_KEY\" "
        "-H 'Content-Type: application/json' \\\n"
        '  -d \'{"project": "demo"}\' "$QUARK_PERSISTENCE_URL/v1/runs"</pre>'
        "<h2>Routes</h2><table><tr><th>Method</th><th>Path</th><th>Scope</th><th>What it does</th>"
        f"</tr>{rows}</table><h2>Errors</h2><table>{errors}</table></body></html>"
    )


def _describe_other(kind: Any) -> dict[str, Any]:
    """The schema of what msgspec does not know: arrays, rows of records, and JSON objects."""
    origin = get_origin(kind) or kind
    if origin is np.ndarray:
        return {"type": "array"}
    return (
        {"type": "array", "items": {"type": "object"}} if origin is Columns else {"type": "object"}
    )


def _describe_route(route: ServiceRoute, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _name(route),
        "summary": route.summary,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": _PLACES[name]}
                for name in _PARAMETER.findall(route.path)
            ),
            *(
                {
                    "name": each.name,
                    "in": each.place,
                    "required": False,
                    "schema": each.schema,
                    "description": each.summary,
                }
                for each in route.parameters
            ),
        ],
        "responses": {
            str(route.status): _describe_reply(route, schemas),
            **{
                status: {
                    "description": text,
                    "content": {JSON: {"schema": schemas[ErrorReply]}},
                }
                for status, text in _ERRORS.items()
            },
        },
    }
    if route.notes:
        described["description"] = route.notes
    if route.method == "PUT":
        described["responses"]["201"] = described["responses"]["200"]
    if route.scope is not None:
        described["security"] = [{"key": []}]
        described["x-scope"] = route.scope
    if route.request is not None:
        described["requestBody"] = {"required": True, "content": _describe_request(route, schemas)}
    return described


def _describe_request(route: ServiceRoute, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if route.request is bytes:
        return {_BYTES: {"schema": _BINARY}}
    if route.request is IngestRequest:
        # By hand: people send records as objects, programs the bodies of their journal.
        return {
            JSON: {"schema": schemas[JsonIngest]},
            MSGPACK: {"schema": {**_BINARY, "description": "IngestRequest, encoded as msgpack"}},
        }
    return {JSON: {"schema": schemas[route.request]}}


def _describe_reply(route: ServiceRoute, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    headers = {"Quark-Protocol": {"schema": {"type": "string"}, "required": True}}
    reply: dict[str, Any] = {"description": route.summary, "headers": headers}
    if route.method == "HEAD":
        return reply
    content: dict[str, Any] = {}
    for media in route.media:
        if media == JSON:
            content[media] = {"schema": schemas.get(route.reply, {})}
        elif media.startswith("text/"):
            content[media] = {"schema": {"type": "string"}}
        else:
            content[media] = {"schema": _BINARY}
    if route.method == "GET" and route.reply is bytes:
        reply["description"] += " 206 with Content-Range if a range was requested."
    reply["content"] = content
    return reply


def _name(route: ServiceRoute) -> str:
    parts = [part.strip("{}").replace(".", "_") for part in route.path.split("/") if part]
    return "_".join([route.method.lower(), *parts])


def _show_parameters(parameters: Sequence[Parameter]) -> str:
    if not parameters:
        return ""
    items = "".join(
        f"<li><code>{escape(each.name)}</code> ({each.place}): {escape(each.summary)}</li>"
        for each in parameters
    )
    return f"<ul>{items}</ul>"


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
    """The process takes work; 503 where it is about to end."""
    if call.service.is_draining:
        raise ServiceFailure(ErrorCode.UNAVAILABLE, "the server is stopping", retry_after_s=5.0)
    await call.service.probe()
    return call.reply(HealthReply("ready"))


async def show_metrics(call: Call) -> ASGIApp:
    """Figures for Prometheus, over all processes of the server."""
    return PlainTextResponse(
        call.service.metrics.to_text(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
