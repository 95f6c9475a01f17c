"""What every answer of the page's servers has, and what their guards read of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any

from quark.page.pack import encode_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self'; frame-src 'self'; base-uri 'none'; "
    "form-action 'self'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the page may do: run its own scripts, and read from where it came."""

SANDBOX_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)
"""What a payload may do: be looked at."""

_COMMON: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
]


VISITOR = "quark.visitor"
"""Under which name a guard leaves the `Visitor` in the scope of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Whoever has been let in.

    Attributes:
        session: What bounds of requests at once are counted by.
        csrf: What requests that change something must show.
        by: Who that is, for the events of what they change.
        may_edit: Whether they may change runs.
        said: What the page is told besides.
    """

    session: bytes
    csrf: str
    by: str
    may_edit: bool = False
    said: dict[str, Any] = field(default_factory=dict)


def make_error(status: int, message: str) -> tuple[bytes, bytes]:
    """Media type and body of an error."""
    return b"application/json", encode_json({"error": {"status": status, "message": message}})


class RequestHeaders:
    """The headers of a request."""

    def __init__(self, scope: Scope) -> None:
        self._pairs: list[tuple[bytes, bytes]] = scope["headers"]

    def find(self, name: bytes) -> str | None:
        """The value of a header that stands once; None where it does not."""
        values = [value for key, value in self._pairs if key == name]
        if name == b"cookie":
            return "; ".join(value.decode("latin-1") for value in values) or None
        return values[0].decode("latin-1") if len(values) == 1 else None

    def find_cookie(self, name: str) -> str | None:
        """The value of a cookie, or None."""
        text = self.find(b"cookie")
        if text is None:
            return None
        try:
            found = SimpleCookie(text).get(name)
        except CookieError:
            return None
        return None if found is None else found.value


def add_headers(send: Send) -> Send:
    """Puts what every answer has into an answer."""

    async def send_it(message: Message) -> None:
        if message["type"] == "http.response.start":
            given: Headers = list(message["headers"])
            names = {name.lower() for name, _ in given}
            given += [pair for pair in _COMMON if pair[0] not in names]
            if b"content-security-policy" not in names:
                given.append((b"content-security-policy", PAGE_POLICY.encode()))
            if b"cache-control" not in names:
                given.append((b"cache-control", b"no-store"))
            message["headers"] = given
        await send(message)

    return send_it


async def reply(
    send: Send, status: int, media_type: bytes, body: bytes, extra: Headers | None = None
) -> None:
    """Send an answer, with what every answer has."""
    headers = [
        (b"content-type", media_type),
        (b"content-length", str(len(body)).encode()),
        *(extra or []),
    ]
    guarded = add_headers(send)
    await guarded({"type": "http.response.start", "status": status, "headers": headers})
    await guarded({"type": "http.response.body", "body": body})


def strip_port(host: str) -> str:
    """The name alone: behind `ssh -L` the port is another one."""
    name, colon, port = host.rpartition(":")
    is_port = colon and (port.isdigit() or not port) and (not host.endswith("]"))
    return (name if is_port else host).lower()
