"""Calls the service: one deadline a call, bounded replies, and the errors of a call."""

from __future__ import annotations

import contextlib
import email.utils
import html
import logging
import os
import random
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from quark_backends.service.client.transport import (
    MAX_CONNECTIONS,
    BoundedTransport,
    Deadline,
    ServiceAddress,
    UserKey,
)
from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    PROTOCOL_VERSION,
    ErrorBody,
    ErrorCode,
    ErrorReply,
)
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    InvalidRunStateError,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
    StoreUnauthorizedError,
    StoreUnavailableError,
    UnknownKindError,
)
from quark_core.version import __version__

BACKEND = "service"

_RETRY_CAP_S = 600.0
_SHOWN = 160
_INVISIBLE = re.compile(r"(?is)<(script|style|head)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>")
_TITLE = re.compile(r"(?is)<title[^>]*>(.*?)</title>")
_LATER = frozenset({408, 425, 429})
_NEVER = frozenset(
    {
        ErrorCode.MALFORMED,
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.CONFLICT,
        ErrorCode.INVALID_STATE,
        ErrorCode.TOO_LARGE,
        ErrorCode.UNSUPPORTED,
        ErrorCode.REJECTED,
        ErrorCode.RUN_NOT_FOUND,
    }
)


class ServiceError(Exception):
    """A call that did not succeed.

    Attributes:
        reason: What happened, for people; holds no secret.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(ServiceError):
    """No whole reply came.

    Attributes:
        timed_out: Whether it took too long.
        answered: Whether anything did come, so that it is not the network's fault.
        unheard: Whether the request cannot have been carried out.
    """

    def __init__(
        self,
        reason: str,
        *,
        timed_out: bool = False,
        answered: bool = False,
        unheard: bool = False,
    ) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.answered = answered
        self.unheard = unheard


class Refused(ServiceError):
    """A reply came, and says no.

    Attributes:
        status: Of HTTP.
        code: Of the envelope, or None where the reply has none: it is not the service's.
        field: The argument at fault, or None.
        retry_after_s: When to come again, or None.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.field = field
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def is_final(self) -> bool:
        """Whether the same request will never be taken."""
        if self.code is not None and self.code in _NEVER:
            return True
        return self.status in (400, 409, 413, 415, 422)

    @property
    def wants_key(self) -> bool:
        """Whether another key is needed."""
        return self.status in (401, 403)


def read_refusal(
    status: int, headers: Mapping[str, str], body: bytes, hide: Callable[[str], str]
) -> Refused:
    """What a reply that is no success says.

    Args:
        status: Its status.
        headers: Its headers, with lower-case names.
        body: The beginning of its body.
        hide: Takes secrets out of a text.
    """
    found = _decode(headers.get("content-type", ""), body)
    retry_after_s = _parse_retry_after(headers.get("retry-after"))
    if found is not None:
        if retry_after_s is None and found.retry_after_s is not None:
            retry_after_s = max(0.0, min(_RETRY_CAP_S, found.retry_after_s))
        return Refused(
            status,
            hide(found.message[:2000]),
            code=found.code,
            field=found.field,
            retry_after_s=retry_after_s,
        )
    if 300 <= status < 400:
        place = redact_text(hide(headers.get("location", "")))
        where = f" to {_shorten(place)}" if place else ""
        return Refused(
            status,
            f"it answers with a redirect{where} ({status}), which is not followed. Set "
            f"{settings.PERSISTENCE_URL} to the final URL of the server",
        )
    said = hide(_show(body, headers.get("content-type", "")))
    reason = f"it answers {status}{f': {said}' if said else ''}"
    if status in (404, 405, 421):
        reason += (
            ". This is not an answer of a Quark server. Check the host and the path of "
            f"{settings.PERSISTENCE_URL}"
        )
    return Refused(status, reason, retry_after_s=retry_after_s)


def to_write_error(error: ServiceError, url: str) -> BackendUnavailable | BackendRejected:
    """What a failed write is to the lane: to be tried again, or never."""
    if isinstance(error, Refused):
        if error.wants_key:
            return BackendUnauthorized(
                describe(error, url), backend=BACKEND, retry_after_s=error.retry_after_s
            )
        if error.is_final:
            return BackendRejected(error.reason, backend=BACKEND)
        return BackendUnavailable(
            describe(error, url), backend=BACKEND, retry_after_s=error.retry_after_s
        )
    return BackendUnavailable(describe(error, url), backend=BACKEND)


def to_read_error(error: ServiceError, url: str) -> QuarkError:
    """What a failed read is to who asked for it."""
    if isinstance(error, Refused):
        if error.code == ErrorCode.RUN_NOT_FOUND:
            return RunNotFoundError(error.reason)
        if error.code == ErrorCode.PAYLOAD_NOT_FOUND:
            return ArtifactNotFoundError(error.reason)
        if error.code == ErrorCode.INVALID_STATE:
            return InvalidRunStateError(error.reason)
        if error.code == ErrorCode.INVALID_ARGUMENT:
            unknown = error.field in ("kind", "kinds")
            return (UnknownKindError if unknown else SchemaValidationError)(error.reason)
        if error.wants_key:
            return StoreUnauthorizedError(describe(error, url))
        if error.is_final:
            return SessionStoreError(describe(error, url))
    return StoreUnavailableError(describe(error, url))


def describe(error: ServiceError, url: str) -> str:
    """A failure with the service that it is about, and what to do where that is known."""
    if isinstance(error, Refused) and error.status == 401:
        return (
            f"the Quark server at {url} rejects the API key: {error.reason}. Set "
            f"{settings.USER_KEY} to a valid key of this server"
        )
    if isinstance(error, Refused) and error.status == 403:
        return (
            f"the Quark server at {url} refuses the call: {error.reason}. Set "
            f"{settings.USER_KEY} to a key with this scope"
        )
    if isinstance(error, Refused) and error.status in _LATER:
        return f"the Quark server at {url} asks to retry later: {error.reason}"
    if isinstance(error, Unreachable) and not error.answered:
        return (
            f"the Quark server at {url} cannot be reached: {error.reason}. Check that it is "
            f"running and that {settings.PERSISTENCE_URL} is correct"
        )
    return f"the Quark server at {url} cannot serve the call: {error.reason}"


def _decode(media: str, body: bytes) -> ErrorBody | None:
    """The envelope, where the body is one."""
    try:
        if media.partition(";")[0].strip().lower() == MSGPACK:
            return msgspec.msgpack.decode(body, type=ErrorReply).error
        return msgspec.json.decode(body, type=ErrorReply).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _show(body: bytes, media: str) -> str:
    """A page of somebody else's, such as a proxy's, in a few words."""
    text = body.decode("utf-8", "replace")
    if "html" in media.lower() or text.lstrip()[:1] == "<":
        title = _TITLE.search(text)
        inside = _INVISIBLE.sub(" ", text)
        text = html.unescape(f"{title[1]} — {inside}" if title else inside)
    return redact_text(_shorten(text)).strip(" —")


def _shorten(text: str) -> str:
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"


def _parse_retry_after(text: str | None) -> float | None:
    """Seconds from now on; None where nothing is said, or the moment has passed."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(seconds, _RETRY_CAP_S) if 0.0 < seconds < float("inf") else None


T = TypeVar("T")

_log = logging.getLogger("quark")

_CONNECT_S = 3.0
_REPLY_BYTES = 64 * 2**20
_ERROR_BYTES = 64 * 1024
_PACE_BYTES = 256 * 1024
_PROTOCOL = "quark-protocol"
_TIMEOUTS = {"connect": _CONNECT_S, "pool": _CONNECT_S, "read": None, "write": None}

# Transports of a parent process: never closed by a forked child, whose copies they are.
_inherited: list[object] = []
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request.

    Attributes:
        method: Of HTTP.
        path: Behind the service's URL, with each part percent-encoded.
        parameters: Of the query; those that are None are left out.
        body: The body, or a function that begins it anew with each attempt.
        size_bytes: Length of a body that comes in pieces.
        media: Media type of the body.
        encoding: Content encoding of the body.
        accept: What the reply should be.
        headers: More headers.
        attempts: How often it is tried where no reply comes and time is left;
            1 where it must not be carried out twice.
        within_s: How long it may take, where that is less than the service is given.
    """

    method: str
    path: str
    parameters: Mapping[str, str | None] = field(default_factory=dict)
    body: bytes | Callable[[], Iterable[bytes]] | None = None
    size_bytes: int | None = None
    media: str = MSGPACK
    encoding: str | None = None
    accept: str = MSGPACK
    headers: tuple[tuple[str, str], ...] = ()
    attempts: int = 3
    within_s: float | None = None


class Reply:
    """A reply that has begun, and that was no refusal.

    Attributes:
        status: Of HTTP.
        headers: With lower-case names.
    """

    def __init__(
        self, response: httpx.Response, deadline: Deadline, hide: Callable[[str], str]
    ) -> None:
        assert isinstance(response.stream, httpx.SyncByteStream)
        self.status = response.status_code
        self.headers = _read_headers(response)
        self._deadline = deadline
        self._hide = hide
        self._parts = iter(response.stream)

    @property
    def media(self) -> str:
        """Media type of the body."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def read_all(self) -> bytes:
        """The whole body, within the call's deadline.

        Raises:
            Unreachable: It is larger than any reply, or does not come.
        """
        pieces, size = [], 0
        while piece := self._next():
            size += len(piece)
            if size > _REPLY_BYTES:
                raise _too_long()
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def iterate(self) -> Iterator[bytes]:
        """The body in pieces; as long as it keeps coming, the deadline moves on.

        Raises:
            Unreachable: It stops coming, or comes too slowly to be worth waiting for.
        """
        size = 0
        self._deadline.renew()
        while piece := self._next():
            size += len(piece)
            handed_at_s = time.monotonic()
            yield piece
            self._deadline.postpone(time.monotonic() - handed_at_s)
            if size >= _PACE_BYTES:
                size = 0
                self._deadline.renew()

    def _next(self) -> bytes:
        with self._deadline.bind(), _translate(self._deadline, self._hide):
            for piece in self._parts:
                if piece:
                    return piece
        return b""


class _Pieces(httpx.SyncByteStream):
    """A body in pieces, begun anew by each sending; as it is taken, the deadline moves on."""

    def __init__(self, begin: Callable[[], Iterable[bytes]], deadline: Deadline) -> None:
        self._begin = begin
        self._deadline = deadline

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._begin():
            yield piece
            self._deadline.renew()


class ServiceClient:
    """Talks to one service; from any thread, in any process.

    Args:
        address: Where it is.
        key: What to show it.
        transport: What carries the requests in place of connections of our own. It is
            whoever's who made it: it is used from any thread, and not closed.
        auth: What is done to requests before they are sent, and with refusals.

    Raises:
        SchemaValidationError: `transport` or `auth` is none of httpx.
    """

    def __init__(
        self,
        address: ServiceAddress,
        key: UserKey,
        *,
        transport: httpx.BaseTransport | None = None,
        auth: httpx.Auth | None = None,
    ) -> None:
        for name, given, wanted in (
            ("transport", transport, httpx.BaseTransport),
            ("auth", auth, httpx.Auth),
        ):
            if given is not None and not isinstance(given, wanted):
                raise SchemaValidationError(
                    f"{name} must be an httpx.{wanted.__name__}, not {type(given).__name__}"
                )
        self.address = address
        self.key = key
        self._given = transport
        self._auth = auth
        self._made: BoundedTransport | None = None
        _warn_of_plain_http(address)

    @property
    def is_known(self) -> bool:
        """Whether there is something that says who calls."""
        return self.key.is_set or self._auth is not None

    def ask(self, call: Call) -> tuple[bytes, Reply]:
        """The body of a reply, and the reply.

        Raises:
            Unreachable: No whole reply comes within the time.
            Refused: It is a refusal.
        """
        return self.use(call, lambda reply: (reply.read_all(), reply))

    def use(self, call: Call, read: Callable[[Reply], T]) -> T:
        """What a function makes of a reply; it is called again where the reply breaks off.

        Raises:
            Unreachable: No whole reply comes within the time.
            Refused: It is a refusal.
        """
        most_s = self.address.timeout_s
        deadline = Deadline(most_s if call.within_s is None else min(most_s, call.within_s))
        reloaded = False
        attempt = 0
        while True:
            attempt += 1
            try:
                with self._open(call, deadline) as reply:
                    return read(reply)
            except Refused as error:
                # The key may have been changed since: once more, with the one of now.
                if error.status != 401 or reloaded or not self.key.reload():
                    raise
                reloaded = True
            except Unreachable as error:
                again = attempt < call.attempts or (error.unheard and attempt == 1)
                if error.timed_out or error.answered or not again or not deadline.left_s:
                    raise
                time.sleep(min(deadline.left_s / 2, random.uniform(0.0, 0.1 * 2.0**attempt)))

    def close(self) -> None:
        """Give up the connections; a later call opens new ones."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def __repr__(self) -> str:
        return f"ServiceClient({self.address.url})"

    @contextlib.contextmanager
    def _open(self, call: Call, deadline: Deadline) -> Iterator[Reply]:
        hide = self.key.hide_in
        transport = self._given or self._find_transport()
        way = transport.way if isinstance(transport, BoundedTransport) else ""
        with deadline.bind(), _translate(deadline, hide, way):
            response = self._send(transport, self._make_request(call, deadline))
        try:
            reply = Reply(response, deadline, hide)
            _check(reply, hide)
            yield reply
        finally:
            # What was not read to its end takes its connection with it.
            with deadline.bind(), contextlib.suppress(Exception):
                response.close()

    def _send(self, transport: httpx.BaseTransport, request: httpx.Request) -> httpx.Response:
        """The reply to a request, or to those that the `auth` makes of it.

        `httpx.Client` would do it, but it unpacks what an `auth` asks to read however
        much that is, and writes a line to the log for each call.
        """
        auth = self._auth
        if auth is None:
            return transport.handle_request(request)
        with contextlib.closing(auth.sync_auth_flow(request)) as flow:
            request = next(flow)
            while True:
                response = transport.handle_request(request)
                try:
                    response.request = request
                    if auth.requires_response_body:
                        response = _read_early(response)
                    request = flow.send(response)
                except StopIteration:
                    return response
                except BaseException:
                    response.close()
                    raise
                response.close()

    def _make_request(self, call: Call, deadline: Deadline) -> httpx.Request:
        parameters = {name: value for name, value in call.parameters.items() if value is not None}
        # A part of dots alone would be taken for a step in the path.
        parts = [
            part.replace(".", "%2E") if part in (".", "..") else part
            for part in call.path.split("/")
        ]
        url = f"{self.address.url}{'/'.join(parts)}"
        if parameters:
            url += f"?{urlencode(parameters)}"
        headers: list[tuple[bytes, bytes]] = [
            (b"Host", self.address.authority.encode("ascii")),
            (b"User-Agent", f"quark/{__version__}".encode("ascii")),
            (b"Accept", f"{call.accept}, {JSON};q=0.5".encode("ascii")),
            (b"Accept-Encoding", b"identity"),
            (b"Quark-Protocol", str(PROTOCOL_VERSION).encode("ascii")),
        ]
        if self.key.is_set:
            headers.append(self.key.authorize())
        stream: httpx.SyncByteStream = httpx.ByteStream(b"")
        if call.body is not None:
            size = len(call.body) if isinstance(call.body, bytes) else call.size_bytes or 0
            headers.append((b"Content-Type", call.media.encode("ascii")))
            headers.append((b"Content-Length", str(size).encode("ascii")))
            if call.encoding is not None:
                headers.append((b"Content-Encoding", call.encoding.encode("ascii")))
            stream = (
                httpx.ByteStream(call.body)
                if isinstance(call.body, bytes)
                else _Pieces(call.body, deadline)
            )
        elif call.method in ("POST", "PUT"):
            headers.append((b"Content-Length", b"0"))
        headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in call.headers]
        return httpx.Request(
            call.method, url, headers=headers, stream=stream, extensions={"timeout": _TIMEOUTS}
        )

    def _find_transport(self) -> BoundedTransport:
        made = self._made
        if made is not None and made.process == os.getpid():
            return made
        if made is not None:
            _inherited.append(made)
        # Two threads may both make one: it opens nothing before it is used, and one of them stays.
        made = self._made = BoundedTransport(self.address)
        weakref.finalize(self, made.close)
        return made


def _read_early(response: httpx.Response) -> httpx.Response:
    """A reply whose body an `auth` asks to see; the client reads it all the same.

    Raises:
        Unreachable: It is compressed, or too large.
    """
    _check_plain(_read_headers(response))
    assert isinstance(response.stream, httpx.SyncByteStream)
    body = bytearray()
    for piece in response.stream:
        body += piece
        if len(body) > _REPLY_BYTES:
            raise _too_long()
    response.close()
    return httpx.Response(
        response.status_code,
        headers=response.headers.raw,
        content=bytes(body),
        request=response.request,
    )


def _too_long() -> Unreachable:
    return Unreachable(
        f"its reply is longer than {_REPLY_BYTES} bytes, the maximum for this call", answered=True
    )


def _check_plain(headers: Mapping[str, str]) -> None:
    """See that a reply is not compressed: unpacking it could fill the memory.

    Raises:
        Unreachable: It is.
    """
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise Unreachable(
            "its reply is compressed, although Quark did not request this. A proxy may do it",
            answered=True,
        )


def _check(reply: Reply, hide: Callable[[str], str]) -> None:
    """See that a reply is the service's, and no refusal.

    Raises:
        Refused: It is one.
        Unreachable: It is compressed, or not the service's.
    """
    _check_plain(reply.headers)
    version = reply.headers.get(_PROTOCOL)
    if 200 <= reply.status < 300:
        if version is None:
            raise Unreachable(
                "the answer is not from a Quark server (it has no header Quark-Protocol). Check "
                f"the host and the path of {settings.PERSISTENCE_URL}",
                answered=True,
            )
        return
    body = b""
    with contextlib.suppress(Unreachable):
        body = _read_beginning(reply)
    refused = read_refusal(reply.status, reply.headers, body, hide)
    if reply.status == 404 and refused.code == "not_found" and version not in (None, "1"):
        refused.reason = (
            f"it uses protocol version {version[:10]}, but this Quark uses {PROTOCOL_VERSION}. "
            "Upgrade the older one"
        )
    raise refused


def _read_beginning(reply: Reply) -> bytes:
    body = b""
    for piece in iter(reply._next, b""):
        body += piece
        if len(body) >= _ERROR_BYTES:
            break
    return body[:_ERROR_BYTES]


def _read_headers(response: httpx.Response) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in response.headers.raw
    }


@contextlib.contextmanager
def _translate(deadline: Deadline, hide: Callable[[str], str], way: str = "") -> Iterator[None]:
    """Make failures of the network ours; `way` says what lies between, where something does."""
    try:
        yield
    except ServiceError:
        raise
    except httpx.ConnectTimeout as error:
        reason = str(error) if "name" in str(error) else "no connection within the time limit"
        raise Unreachable(way + reason, timed_out=True, unheard=True) from None
    except httpx.PoolTimeout:
        raise Unreachable(
            f"all {MAX_CONNECTIONS} connections to it are in use", timed_out=True, unheard=True
        ) from None
    except httpx.TimeoutException:
        raise Unreachable(
            f"it does not answer within {deadline.timeout_s:g} s", timed_out=True
        ) from None
    except httpx.ConnectError as error:
        raise Unreachable(way + _name(error, hide), unheard=True) from None
    except httpx.ProxyError as error:
        raise Unreachable(f"the proxy refuses: {_name(error, hide)}") from None
    except httpx.RemoteProtocolError as error:
        said = str(error)
        # A connection that was kept alive may have been closed by the server a moment ago.
        if "disconnected" in said:
            raise Unreachable("it closed the connection without an answer") from None
        if "closed connection" in said:
            raise Unreachable("it closed the connection in the middle of its reply") from None
        raise Unreachable(f"its reply is not HTTP: {_name(error, hide)}", answered=True) from None
    except httpx.InvalidURL as error:
        raise Unreachable(f"its URL cannot be used: {_name(error, hide)}", unheard=True) from None
    except (httpx.TransportError, OSError) as error:
        raise Unreachable(_name(error, hide)) from None


def _name(error: Exception, hide: Callable[[str], str]) -> str:
    return hide(str(error))[:300] or type(error).__name__


def _warn_of_plain_http(address: ServiceAddress) -> None:
    if address.scheme == "http" and not address.is_loopback and address.url not in _warned:
        _warned.add(address.url)
        _log.warning(
            "the connection to the Quark server %s uses plain http, so the key and all data "
            "cross the network unencrypted",
            address.url,
        )
