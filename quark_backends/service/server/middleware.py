"""The layers around every request: host, id, limits of its head, errors and metrics.

A page that somebody has open can have its own name mean this machine (DNS
rebinding), and its scripts then speak with what listens here. They cannot say
another name than the page's own, so a server answers for those only that it knows.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quark_backends.service.protocol import PROTOCOL_VERSION, ErrorCode
from quark_backends.service.server.responses import (
    ServiceFailure,
    choose_media,
    make_failure_reply,
    to_failure,
)
from quark_backends.service.server.service import Service

# What surrounds every request: host, id, the limits of its head, its errors and its metrics.
#
# A page that somebody has open can have its own name mean this machine (DNS
# rebinding), and its scripts then speak with what listens here. They cannot say
# another name than the page's own, so a server answers for those only that it knows.

ANY_HOST = "*"
"""Among the allowed hosts: any name, which leaves the check to whatever stands before."""

_HOSTS = 64

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostCheck:
    """Knows the names of a server: those of this machine for itself, and what it was given.

    Args:
        bound: What the server listens on: a name or an address.
        allowed: Further names and addresses; `*` for any.

    Attributes:
        allows: Tells whether the server answers for a host, as a request has it, that came to
            an address of this machine.
    """

    allows: Callable[[str, str | None], bool]

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        names = {_without_port(name) for name in (find_own_name(bound), bound, *allowed)}
        self._is_open = ANY_HOST in names
        found = {name: _find_address(name) for name in (*names, "localhost")}
        self._names = {name for name, address in found.items() if address is None}
        self._addresses = {address for address in found.values() if address is not None}
        # Most requests are for one host; what somebody makes up pushes out no more than this.
        self.allows = lru_cache(maxsize=_HOSTS)(self._allows)

    def _allows(self, host: str, reached_at: str | None) -> bool:
        if self._is_open:
            return True
        name = _without_port(host)
        address = _find_address(name)
        if address is None:
            return name in self._names
        if address.is_loopback or address in self._addresses:
            return True
        return reached_at is not None and address == _find_address(reached_at)


def find_own_name(bound: str) -> str:
    """What other machines may call a server: the machine's name where it listens everywhere."""
    address = _find_address(bound)
    return socket.gethostname() if address is not None and address.is_unspecified else bound


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    # Of an IPv6 address without brackets, as a setting may have it, nothing is a port.
    return host if host.count(":") > 1 else host.partition(":")[0].rstrip(".")


def _find_address(name: str) -> _Address | None:
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return found if mapped is None else mapped


UNROUTED = "none"
"""What metrics call the route of requests that have none."""

_log = logging.getLogger("quark.service")

_PATH_BYTES = 4096
_SINGLE = frozenset(
    {b"host", b"authorization", b"content-type", b"content-encoding", b"idempotency-key", b"range"}
)
_REPLY_HEAD = (b"quark-protocol", str(PROTOCOL_VERSION).encode())
_DRAIN_S = 5.0
_DRAIN_BYTES = 64 * 2**20
_BUSY_RETRY_S = 1.0
# Of bodies that come without a key: as many at once, of one address, and what is waited for.
_ARRIVING = 128
_ARRIVING_OF_ONE = 32
_ARRIVAL_S = 10.0
_ARRIVAL_BYTES = 16_385
_ENDING_RETRY_S = 2.0
# These answer however busy the server is.
_ALWAYS = ("/healthz", "/readyz", "/metrics")


class RequestMiddleware:
    """Runs the application inside of it; an error becomes the envelope.

    Args:
        app: What is inside.
        service: What the routes share.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._draining = 0
        self._arriving: Counter[str] = Counter()
        self._hosts = HostCheck(service.config.host, service.config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        started_s = time.perf_counter()
        try:
            try:
                if not exchange.is_received and not scope["path"].startswith("/v1/"):
                    # The page reads a login before it knows whose it is; routes look at keys first.
                    await self._gather(exchange)
                self._enter(exchange)
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
            self._leave(exchange)
            duration_s = time.perf_counter() - started_s
            self._note(exchange, duration_s)

    async def _gather(self, exchange: _Exchange) -> None:
        """Let a body come of whom nobody knows, without one of the places that others wait for.

        Raises:
            ServiceFailure: It comes too slowly, or too many do.
        """
        address = (exchange.scope.get("client") or ("", 0))[0]
        mine = self._arriving[address]
        if mine >= _ARRIVING_OF_ONE or self._arriving.total() >= _ARRIVING:
            raise ServiceFailure(
                ErrorCode.UNAVAILABLE,
                "too many requests without a key at once",
                retry_after_s=_BUSY_RETRY_S,
            )
        self._arriving[address] += 1
        try:
            async with asyncio.timeout(_ARRIVAL_S):
                await exchange.gather(_ARRIVAL_BYTES)
        except TimeoutError:
            raise ServiceFailure(
                ErrorCode.TIMEOUT, f"the body did not arrive within {_ARRIVAL_S:g} s"
            ) from None
        finally:
            self._arriving[address] -= 1
            if not self._arriving[address]:
                del self._arriving[address]

    def _enter(self, exchange: _Exchange) -> None:
        """Take a place for a request."""
        exchange.is_counted = True
        self._service.working += 1
        self._service.metrics.add("quark_requests_in_flight")

    def _leave(self, exchange: _Exchange) -> None:
        """Give up the place of a request, once."""
        if exchange.is_counted:
            exchange.is_counted = False
            self._service.working -= 1
            self._service.metrics.add("quark_requests_in_flight", -1)

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
                "the server is handling its maximum number of requests",
                retry_after_s=_BUSY_RETRY_S,
            )
        if len(scope.get("raw_path") or b"") > _PATH_BYTES or "\x00" in scope["path"]:
            raise ServiceFailure(ErrorCode.MALFORMED, "the path does not exist on this server")
        single = [pair for pair in scope["headers"] if pair[0] in _SINGLE]
        known = dict(single)
        if len(known) < len(single):
            # Whatever stands before this server may have looked at the other one.
            name = next(n for n, _ in single if [m for m, _ in single].count(n) > 1)
            raise ServiceFailure(
                ErrorCode.MALFORMED, f"the request has several {name.decode().title()} headers"
            )
        host = known.get(b"host", b"").decode("latin-1")
        reached_at = (scope.get("server") or (None,))[0]
        if not self._hosts.allows(host, reached_at):
            raise ServiceFailure(
                ErrorCode.MISDIRECTED,
                f"this server does not answer for the host {host[:200]!r}. Its operator can "
                "allow it with --allowed-host NAME or QUARK_SERVE_ALLOWED_HOSTS",
                field="Host",
            )

    async def _fail(self, error: Exception, exchange: _Exchange) -> None:
        failure = to_failure(error, exchange.request_id)
        if failure.code == ErrorCode.INTERNAL:
            self._service.metrics.add("quark_failures_total")
        if failure.code == ErrorCode.RATE_LIMITED:
            self._service.metrics.add("quark_rate_limited_total")
        if failure.code == ErrorCode.UNAUTHORIZED:
            self._service.metrics.add("quark_refused_keys_total")
        if exchange.status:
            # The reply has begun. That it has no end is how the client learns of it.
            _log.warning("request %s was interrupted: %s", exchange.request_id, failure.message)
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
        # Nothing is done for it any more, however long it sends.
        self._leave(exchange)
        if self._draining < self._service.config.limits.concurrent_requests:
            self._draining += 1
            try:
                await exchange.drain()
            finally:
                self._draining -= 1
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note(self, exchange: _Exchange, duration_s: float) -> None:
        metrics = self._service.metrics
        state = exchange.scope.get("state") or {}
        route = state.get("route", UNROUTED)
        metrics.note_request(route, exchange.status or 499, duration_s)
        metrics.add("quark_received_bytes_total", exchange.received_bytes)
        metrics.add("quark_sent_bytes_total", exchange.sent_bytes)
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
        self.is_counted = False
        self._gathered: deque[Message] = deque()
        self.received_bytes = 0
        self.sent_bytes = 0
        headers = scope["headers"]
        self.is_received = not any(
            (name == b"content-length" and value != b"0") or name == b"transfer-encoding"
            for name, value in headers
        )
        accepts = [value.decode("latin-1") for name, value in headers if name == b"accept"]
        self.accept = ",".join(accepts)

    async def gather(self, size_bytes: int) -> None:
        """Receive the body, or so much of it, for whoever asks for it."""
        while not self.is_received and self.received_bytes < size_bytes:
            message = await self._take()
            self._gathered.append(message)
            if message["type"] == "http.disconnect":
                return

    async def receive(self) -> Message:
        return self._gathered.popleft() if self._gathered else await self._take()

    async def _take(self) -> Message:
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
                _REPLY_HEAD,
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
        "the server is stopping; it is unknown if this request was served",
        retry_after_s=_ENDING_RETRY_S,
    )


def _printable(path: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in path[:300])
