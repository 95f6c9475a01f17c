"""Connections to a service that no proxy and no `auth` stands before.

Each call takes time of the interpreter that a training needs. By httpx and httpcore it is 1.3 ms,
most of it for what such a call has no use for; here a call is one piece of bytes that is sent, and
one reply that is read. Deadlines, names and TLS are those of `bounded_transport`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import httpcore
import httpx

from quark_backends.service.client.address import ServiceAddress
from quark_backends.service.client.bounded_transport import (
    KEEP_ALIVE_S,
    KEPT_ALIVE,
    MAX_CONNECTIONS,
    BoundedNetwork,
    BoundedStream,
    clip_timeout,
    make_tls,
)
from quark_backends.service.client.reply_reading import ReplyReader

__all__ = ["DirectConnections", "DirectReply", "Outgoing"]

_CONNECT_S = 3.0
_JOINED_BYTES = 64 * 1024
_PORTS = {"http": 80, "https": 443}


class Outgoing(NamedTuple):
    """A request as it is sent.

    Attributes:
        method: Of HTTP.
        target: Path and query, percent-encoded.
        headers: All of them, with the length of the body where there is one.
        body: The body, or its pieces.
        size_bytes: Its length.
    """

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes | Iterable[bytes]
    size_bytes: int

    def encode_head(self) -> bytes:
        """The head of the request.

        Raises:
            httpx.InvalidURL: The target cannot be one.
            httpx.LocalProtocolError: A header cannot be one.
        """
        if not self.target.isascii() or not self.target.isprintable() or " " in self.target:
            raise httpx.InvalidURL("the path must be percent-encoded")
        lines = [f"{self.method} {self.target} HTTP/1.1".encode("ascii")]
        lines += [name + b": " + value for name, value in self.headers]
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(self.headers) or head.count(b"\r") != len(self.headers):
            raise httpx.LocalProtocolError("a header of the request has several lines")
        return head + b"\r\n\r\n"


class DirectConnections:
    """The connections of one process to one service, from any thread.

    What a thread waits for ends with the deadline that it has bound, see `Deadline`.

    Args:
        address: The service.

    Attributes:
        process: Id of the process.
    """

    def __init__(self, address: ServiceAddress) -> None:
        self.process = os.getpid()
        self._address = address
        self._network = BoundedNetwork()
        self._tls = None
        if address.scheme == "https":
            self._tls = make_tls()
            self._tls.set_alpn_protocols(["http/1.1"])
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._closed = False

    def send(self, request: Outgoing) -> DirectReply:
        """Send a request; returns the reply once its head is there.

        Raises:
            httpx.TransportError: It does not come, or not in time.
        """
        head = request.encode_head()
        if not self._places.acquire(timeout=clip_timeout(_CONNECT_S, httpx.PoolTimeout)):
            raise httpx.PoolTimeout("all connections are in use")
        try:
            connection = self._send(head, request)
        except (httpcore.TimeoutException, httpcore.NetworkError) as error:
            self._places.release()
            raise _to_httpx(error) from error
        except BaseException:
            self._places.release()
            raise
        return DirectReply(self, connection, request.method)

    def _send(self, head: bytes, request: Outgoing) -> _Connection:
        connection = self._take_idle() or self._connect()
        try:
            connection.send(head, request)
            connection.reader.read_head()
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for the next call, where it can be used again."""
        reader = connection.reader
        given_up: _Connection | None = connection
        if reader.is_over and reader.is_reusable and connection.is_sent:
            with self._lock:
                if not self._closed:
                    connection.idle_since = time.monotonic()
                    self._idle.append(connection)
                    given_up = self._idle.pop(0) if len(self._idle) > KEPT_ALIVE else None
        if given_up is not None:
            given_up.close()
        self._places.release()

    def close(self) -> None:
        """Close the connections, those in use once their calls are over; never raises."""
        if self.process != os.getpid():
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.is_usable():
                return connection
            connection.close()

    def _connect(self) -> _Connection:
        address = self._address
        port = address.port or _PORTS[address.scheme]
        stream = self._network.connect_tcp(address.host, port, timeout=_CONNECT_S)
        if self._tls is not None:
            try:
                stream = stream.start_tls(self._tls, address.host, timeout=_CONNECT_S)
            except BaseException:
                stream.close()
                raise
        return _Connection(stream)


class _Connection:
    """One connection, and the reply that comes over it.

    Attributes:
        reader: Reads replies.
        is_sent: Whether all of the newest request was sent.
        idle_since: When it was given back.
    """

    def __init__(self, stream: BoundedStream) -> None:
        self._stream = stream
        self.reader = ReplyReader(stream.receive)
        self.is_sent = False
        self.idle_since = 0.0

    def send(self, head: bytes, request: Outgoing) -> None:
        """Send a request.

        A server that does not want the body may answer before it has all of it, and hang up: then
        there is a reply all the same.
        """
        self.is_sent = False
        body = request.body
        try:
            if isinstance(body, bytes) and len(body) <= _JOINED_BYTES:
                self._stream.write(head + body)
            else:
                self._stream.write(head)
                sent_bytes = 0
                for piece in (body,) if isinstance(body, bytes) else body:
                    sent_bytes += len(piece)
                    if sent_bytes > request.size_bytes:
                        break
                    self._stream.write(piece)
                if sent_bytes != request.size_bytes:
                    raise httpx.LocalProtocolError(
                        f"the body has other than the {request.size_bytes} bytes that were told"
                    )
            self.is_sent = True
        except httpcore.WriteError:
            pass

    def is_usable(self) -> bool:
        """Whether the other side has not closed it while it was idle, nor said anything."""
        is_young = time.monotonic() - self.idle_since < KEEP_ALIVE_S
        return is_young and not self._stream.get_extra_info("is_readable")

    def close(self) -> None:
        """Give it up; never raises."""
        with contextlib.suppress(Exception):
            self._stream.close()


class DirectReply:
    """A reply whose body comes; what is not read to its end takes its connection along.

    Attributes:
        status, headers: See `ReplyReader`.
        parts: The body, in pieces.
    """

    def __init__(self, owner: DirectConnections, connection: _Connection, method: str) -> None:
        self.status = connection.reader.status
        self.headers = connection.reader.headers
        self.parts = _translate_parts(connection.reader.read_body(method))
        self._owner = owner
        self._connection: _Connection | None = connection

    def close(self) -> None:
        """Give the reply up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner.give_back(connection)


def _translate_parts(parts: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from parts
    except (httpcore.TimeoutException, httpcore.NetworkError) as error:
        raise _to_httpx(error) from error


def _to_httpx(error: Exception) -> Exception:
    """The error of httpx that has the same name as one of httpcore."""
    found: Exception = getattr(httpx, type(error).__name__)(str(error))
    return found
