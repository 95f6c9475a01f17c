"""What surrounds every request: its id, the limits of its head, its errors and its figures."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quark_backends.service.protocol import PROTOCOL_VERSION, ErrorCode
from quark_backends.service.server.failure import ServiceFailure
from quark_backends.service.server.replies import choose_media, make_failure_reply, to_failure

if TYPE_CHECKING:
    from quark_backends.service.server.service import Service

__all__ = ["UNROUTED", "Surroundings"]

UNROUTED = "none"
"""What figures call the route of requests that have none."""

_log = logging.getLogger("quark.service")

_PATH_BYTES = 4096
_DRAIN_S = 5.0
_DRAIN_BYTES = 64 * 2**20
_BUSY_RETRY_S = 1.0
_ENDING_RETRY_S = 2.0
# These answer however busy the server is.
_ALWAYS = ("/healthz", "/readyz", "/metrics")


class Surroundings:
    """Runs the application inside of it; an error becomes the envelope.

    Args:
        app: What is inside.
        service: What the routes share.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._hosts = {host.lower() for host in service.config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        service = self._service
        started_s = time.perf_counter()
        service.working += 1
        service.figures.add("quark_requests_in_flight")
        try:
            try:
                self._check(scope)
                await self._app(scope, exchange.receive, exchange.send)
            except ClientDisconnect:
                pass
            except asyncio.CancelledError:
                # The server ends, and this has taken longer than it waits.
                exchange.is_received = True
                await self._fail(_make_ending(), exchange)
                raise
            except Exception as error:  # noqa: BLE001 - every error becomes the envelope
                await self._fail(error, exchange)
        finally:
            service.working -= 1
            service.figures.add("quark_requests_in_flight", -1)
            duration_s = time.perf_counter() - started_s
            self._note(exchange, duration_s)

    def _check(self, scope: Scope) -> None:
        """Refuse what no route should see.

        Raises:
            ServiceFailure: Of the head of the request.
        """
        service = self._service
        busy = service.working > service.config.limits.concurrent_requests
        if busy and scope["path"] not in _ALWAYS:
            raise ServiceFailure(
                ErrorCode.UNAVAILABLE,
                "the server works on as many requests as it may",
                retry_after_s=_BUSY_RETRY_S,
            )
        if len(scope.get("raw_path") or b"") > _PATH_BYTES or "\x00" in scope["path"]:
            raise ServiceFailure(ErrorCode.MALFORMED, "the path is none of this service")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:
            raise ServiceFailure(ErrorCode.MALFORMED, "the request has several Host headers")
        if self._hosts:
            host = hosts[0].decode("latin-1") if hosts else ""
            if _strip_port(host).lower() not in self._hosts:
                raise ServiceFailure(
                    ErrorCode.MISDIRECTED,
                    f"this server does not answer for the host {host[:200]!r}",
                    field="Host",
                )

    async def _fail(self, error: Exception, exchange: _Exchange) -> None:
        failure = to_failure(error, exchange.request_id)
        if failure.code == ErrorCode.INTERNAL:
            self._service.figures.add("quark_failures_total")
        if failure.code == ErrorCode.RATE_LIMITED:
            self._service.figures.add("quark_rate_limited_total")
        if failure.code == ErrorCode.UNAUTHORIZED:
            self._service.figures.add("quark_refused_keys_total")
        if exchange.status:
            # The reply has begun. That it has no end is how the client learns of it.
            _log.warning("request %s broke off: %s", exchange.request_id, failure.message)
            return
        reply = make_failure_reply(failure, choose_media(exchange.accept), exchange.request_id)
        if exchange.is_received:
            await reply(exchange.scope, exchange.receive, exchange.send)
            return
        # The client may still be sending: it gets the reply now, and some time to notice.
        reply.headers["Connection"] = "close"
        await exchange.send(
            {
                "type": "http.response.start",
                "status": reply.status_code,
                "headers": reply.raw_headers,
            }
        )
        await exchange.send(
            {"type": "http.response.body", "body": bytes(reply.body), "more_body": True}
        )
        await exchange.drain()
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note(self, exchange: _Exchange, duration_s: float) -> None:
        figures = self._service.figures
        state = exchange.scope.get("state") or {}
        route = state.get("route", UNROUTED)
        figures.note_request(route, exchange.status or 499, duration_s)
        figures.add("quark_received_bytes_total", exchange.received_bytes)
        figures.add("quark_sent_bytes_total", exchange.sent_bytes)
        if self._service.config.access_log:
            client = exchange.scope.get("client") or ("", 0)
            _log.info(
                "%s %s %s key=%s status=%d received=%d sent=%d ms=%.1f id=%s",
                client[0],
                exchange.scope["method"],
                # Without the query, which is not ours to keep.
                _printable(exchange.scope["path"]),
                state.get("key_id", "-"),
                exchange.status,
                exchange.received_bytes,
                exchange.sent_bytes,
                duration_s * 1000,
                exchange.request_id,
            )


class _Exchange:
    """One request and its reply, counted."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id = os.urandom(8).hex()
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._receive = receive
        self._send = send
        self.status = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        headers = scope["headers"]
        self.is_received = not any(
            (name == b"content-length" and value != b"0") or name == b"transfer-encoding"
            for name, value in headers
        )
        accepts = [value.decode("latin-1") for name, value in headers if name == b"accept"]
        self.accept = ",".join(accepts)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.received_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_received = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"quark-protocol", str(PROTOCOL_VERSION).encode()),
                (b"quark-request-id", self.request_id.encode()),
            ]
        else:
            self.sent_bytes += len(message.get("body", b""))
        await self._send(message)

    async def drain(self) -> None:
        """Let the client send on for a while: what it has sent unread would lose it the reply."""
        drained = 0
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not self.is_received and drained < _DRAIN_BYTES:
                    message: dict[str, Any] = dict(await self.receive())
                    if message["type"] == "http.disconnect":
                        return
                    drained += len(message.get("body", b""))
        except TimeoutError:
            return


def _make_ending() -> ServiceFailure:
    return ServiceFailure(
        ErrorCode.UNAVAILABLE,
        "the server ends; whether this request was served is not known",
        retry_after_s=_ENDING_RETRY_S,
    )


def _strip_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _printable(path: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in path[:300])
