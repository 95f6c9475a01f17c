"""Reads replies of HTTP/1.1 from a connection, as strictly as a client may.

What follows here of a reply is that of RFC 9112: its head, how long its body is, and whether the
connection can be used again after it. Whatever does not fit ends the connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import httpx

__all__ = ["ReplyReader"]

_HEAD_BYTES = 100 * 1024
_READ_BYTES = 16 * 1024
_BODY_READ_BYTES = 256 * 1024
_LINE_BYTES = 4096  # of a chunk's size with its extensions, or of a trailer
_TRAILERS = 100
_SWITCHES = 101
_HAS_NONE = frozenset({204, 304})

# An empty line ends a head; its line ends may lack the carriage return.
_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\x00\r]*)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r]*?)[ \t]*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\x00\r\n]*)?")


class ReplyReader:
    """One reply after the other of one connection.

    Args:
        receive: Returns some of at most so many bytes, and none where the other side has ended.

    Attributes:
        status, headers: Of the reply; names in lower case. Of a name that comes several times
            the last one counts.
        is_over: Whether all of the reply has come.
        is_reusable: Whether there may be another reply after it.
    """

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive
        self._buffer = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_over = True
        self.is_reusable = True

    def read_head(self) -> None:
        """Read the head of the next reply.

        Raises:
            httpx.RemoteProtocolError: What comes is none.
        """
        self.is_over = False
        while True:
            self._parse(self._read_head())
            if self.status >= 200:
                break
            if self.status == _SWITCHES:
                raise httpx.RemoteProtocolError("it switches to another protocol")

    def read_body(self, method: str) -> Iterator[bytes]:
        """The body in pieces as they come.

        Args:
            method: Of the request.

        Raises:
            httpx.RemoteProtocolError: It breaks off, or is none.
        """
        if method == "HEAD" or self.status in _HAS_NONE:
            pass
        elif "transfer-encoding" in self.headers:
            yield from self._read_chunks()
        elif (length := self.headers.get("content-length")) is not None:
            yield from self._read_bytes(int(length))
        else:
            self.is_reusable = False
            yield from self._read_all()
        self.is_over = True
        if self._buffer:
            self.is_reusable = False  # nothing was asked for that could be answered so

    def _read_head(self) -> bytes:
        buffer = self._buffer
        searched = 0
        while (found := _END.search(buffer, max(0, searched - 3))) is None:
            searched = len(buffer)
            if len(buffer) > _HEAD_BYTES:
                raise httpx.RemoteProtocolError("its head is too long")
            part = self._receive(_READ_BYTES)
            if not part:
                raise httpx.RemoteProtocolError(
                    "Server disconnected without sending a response."
                    if not buffer
                    else "the connection ended within the head"
                )
            buffer += part
        self._buffer = buffer[found.end() :]
        return buffer[: found.start()]

    def _parse(self, head: bytes) -> None:
        first, *lines = head.replace(b"\r\n", b"\n").split(b"\n")
        started = _STATUS.fullmatch(first)
        if started is None:
            raise httpx.RemoteProtocolError(f"it begins with {first[:60]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            told = _HEADER.fullmatch(line)
            if told is None:
                raise httpx.RemoteProtocolError(f"{line[:60]!r} is no header")
            name, value = told[1].decode("ascii").lower(), told[2].decode("latin-1")
            # Where they differ, nobody can tell what belongs to this reply.
            if name == "content-length":
                value = _check_length(value, headers.get(name))
            elif name == "transfer-encoding" and name in headers:
                value = f"{headers[name]}, {value}"
            headers[name] = value
        encoding = headers.get("transfer-encoding", "chunked")
        if encoding.lower() != "chunked":
            raise httpx.RemoteProtocolError(f"Transfer-Encoding is {encoding[:60]!r}")
        self.status = int(started[2])
        self.headers = headers
        tokens = [each.strip() for each in headers.get("connection", "").lower().split(",")]
        self.is_reusable = started[1] == b"1" and "close" not in tokens

    def _read_bytes(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            part = self._buffer or self._receive(min(max(left, 1024), _BODY_READ_BYTES))
            if not part:
                raise _cut(f"received {size - left} bytes, expected {size}")
            self._buffer = part[left:]
            part = part[:left]
            left -= len(part)
            yield part

    def _read_chunks(self) -> Iterator[bytes]:
        while True:
            line = self._read_line()
            told = _CHUNK.fullmatch(line)
            if told is None:
                raise httpx.RemoteProtocolError(f"{line[:60]!r} is no size of a chunk")
            size = int(told[1], 16)
            if not size:
                break
            yield from self._read_bytes(size)
            if self._read_line():
                raise httpx.RemoteProtocolError("a chunk is longer than it says")
        for _ in range(_TRAILERS):
            line = self._read_line()
            if not line:
                return
            if _HEADER.fullmatch(line) is None:
                raise httpx.RemoteProtocolError(f"{line[:60]!r} is no trailer")
        raise httpx.RemoteProtocolError("the body has too many trailers")

    def _read_line(self) -> bytes:
        buffer = self._buffer
        while (end := buffer.find(b"\r\n")) < 0:
            if len(buffer) > _LINE_BYTES:
                raise httpx.RemoteProtocolError("a line within the body is too long")
            part = self._receive(_READ_BYTES)
            if not part:
                raise _cut("incomplete chunked read")
            buffer += part
        self._buffer = buffer[end + 2 :]
        return buffer[:end]

    def _read_all(self) -> Iterator[bytes]:
        part, self._buffer = self._buffer, b""
        while part or (part := self._receive(_BODY_READ_BYTES)):
            yield part
            part = b""


def _check_length(value: str, before: str | None) -> str:
    """The length of a body that a head says, perhaps several times."""
    lengths = {each.strip() for each in value.split(",")} | ({before} if before else set())
    (length, *others) = lengths
    if others or not length.isascii() or not length.isdigit() or len(length) > 18:
        raise httpx.RemoteProtocolError(f"Content-Length is {value[:60]!r}")
    return length


def _cut(what: str) -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError(
        f"peer closed connection without sending complete message body ({what})"
    )
