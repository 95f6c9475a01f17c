"""Access to the page: host names, token, cookie, CSRF, and the headers of every answer."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from quark.page.pack import encode_json
from quark.page.recent import Recent
from quark_core.system.folders import read_private, write_private

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data: blob:; media-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; "
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


CSRF_HEADER = b"quark-csrf"
"""The header that a request which changes something shows its token in."""

_PURPOSE = b"quark page: changes"


def derive_csrf(secret: str) -> str:
    """The token that belongs to a cookie: only who has the cookie, or was told, can know it."""
    return hmac.new(secret.encode("utf-8", "replace"), _PURPOSE, hashlib.sha256).hexdigest()


def find_foreign_origin(headers: RequestHeaders) -> str | None:
    """Why a request that changes something is not of this server's own page, or None.

    Browsers say with each POST where it comes from, and scripts cannot say otherwise; what is
    no browser has the service's own API.
    """
    site = headers.find(b"sec-fetch-site")
    if site not in (None, "same-origin"):
        return "only this server's own page can make changes"
    origin = headers.find(b"origin")
    if origin is None or urlsplit(origin).netloc.lower() != (headers.find(b"host") or "").lower():
        return (
            "only this server's own page can make changes, but this request comes from "
            f"{origin!r:.80}. A proxy must pass on the Host header unchanged"
        )
    return None


def find_forgery(headers: RequestHeaders, csrf: str) -> str | None:
    """Why a request of the page's script is taken for one of another page, or None.

    Args:
        headers: Of the request.
        csrf: The token that its session has.
    """
    foreign = find_foreign_origin(headers)
    if foreign is not None:
        return foreign
    shown = headers.find(CSRF_HEADER) or ""
    if not hmac.compare_digest(shown.encode("latin-1", "replace"), csrf.encode()):
        return "the token of this session is missing or belongs to another session. Reload the page"
    return None


# Who may ask: names of this server, the token and its cookie, pages of ours only; and the headers.
#
# docs/contributing/security-tests.md lists what each of these is against.

_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_log = logging.getLogger("quark")

_MOST_SESSIONS = 64
_KEPT_S = 7 * 86400.0
_OUR_SITES = ("same-origin", "none")
_LOCKED_OUT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Quark</title>
<h1>Open the address that the terminal shows</h1>
<p>Use the address with a token that <code>quark ui</code> prints. Each address works once, in one
browser. After that, it prints another one.</p>
<p>If you have opened it in this browser before, <a href="">continue</a>.</p>
</html>
"""


class Sessions:
    """The tokens that are good once, and the cookies that they were traded for; any thread.

    Only hashes are kept.

    Args:
        on_trade: Called after a token was used up.
        kept: File of this user by which a server that is started again knows the cookies of the
            last week; None where they end with this one.
    """

    def __init__(
        self, on_trade: Callable[[], None] | None = None, *, kept: Path | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._tokens = Recent[bytes, float](_MOST_SESSIONS)
        self._kept = kept
        self._cookies = Recent[bytes, float](_MOST_SESSIONS)
        if kept is not None:
            self._cookies.update(_read_cookies(kept))
        self._on_trade = on_trade

    def make_token(self) -> str:
        """A new token."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._tokens[_hash(token)] = time.time()
        return token

    def trade(self, token: str) -> str | None:
        """The cookie for a token, which is used up by that; None where it is none."""
        with self._lock:
            if _hash(token) not in self._tokens:
                return None
            del self._tokens[_hash(token)]
            cookie = secrets.token_urlsafe(32)
            self._cookies[_hash(cookie)] = time.time()
            self._keep()
        if self._on_trade is not None:
            self._on_trade()
        return cookie

    def _keep(self) -> None:
        if self._kept is None:
            return
        held = {key.hex(): at_s for key, at_s in self._cookies.items()}
        try:
            write_private(self._kept, json.dumps(held).encode())
        except OSError as error:
            _log.info("browsers must sign in again after a restart: %s", error)

    def find(self, cookie: str) -> bytes | None:
        """The session of a cookie, or None."""
        # By its hash: how long the look-up takes tells nothing of the cookie.
        key = _hash(cookie)
        with self._lock:
            if key not in self._cookies:
                return None
            self._cookies.move_to_end(key)
        return key


class Guard:
    """Stands before the application.

    Args:
        app: What answers those who may ask.
        sessions: Tokens and cookies.
        cookie_name: Name of the cookie: with the port, since cookies know none.
        hosts: Names besides those of the loopback by which clients may call this server.
        base: Path that every address begins with, such as `/quark`, or "".
        editor: By whom events say that runs were changed; None where they may not be.
    """

    def __init__(
        self,
        app: AsgiApp,
        sessions: Sessions,
        *,
        cookie_name: str,
        hosts: Iterable[str] = (),
        base: str = "",
        editor: str | None = None,
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._cookie_name = cookie_name
        self._hosts = frozenset(name.lower() for name in (*_LOCAL_NAMES, *hosts))
        self._base = base
        self._editor = editor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        headers = RequestHeaders(scope)
        path = str(scope["path"])
        refused = self._refuse(scope, headers)
        if refused is not None:
            await reply(send, *refused)
            return
        inner = path.removeprefix(self._base)
        if inner.startswith("/static/"):
            await self._app(scope, receive, add_headers(send))
            return
        is_api = inner.startswith(("/api/", "/artifacts/"))
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in pairs if name == "token"]
        if tokens and not is_api:
            await self._trade(send, path, pairs, tokens[0])
            return
        visitor = self._find_visitor(headers)
        if visitor is None:
            status = 401
            if is_api:
                message = "open the address that the terminal shows"
                await reply(send, status, *make_error(status, message))
            else:
                await reply(send, status, b"text/html; charset=utf-8", _LOCKED_OUT.encode())
            return
        if scope["method"] == "POST" and (why := find_forgery(headers, visitor.csrf)) is not None:
            await reply(send, 403, *make_error(403, why))
            return
        scope[VISITOR] = visitor
        await self._app(scope, receive, add_headers(send))

    def _refuse(self, scope: Scope, headers: RequestHeaders) -> tuple[int, bytes, bytes] | None:
        """What is said to whoever may not ask at all, or None."""
        host = headers.find(b"host")
        if host is None or strip_port(host) not in self._hosts:
            message = f"this server does not serve host {host!r:.80}; see --allowed-host"
            return 421, *make_error(421, message)
        path = str(scope["path"])
        methods = ["GET", "HEAD"]
        if self._editor is not None and path.removeprefix(self._base).startswith("/api/"):
            methods.append("POST")
        if scope["method"] not in methods:
            return 405, *make_error(405, "this server is read-only")
        if self._base and not (path == self._base or path.startswith(f"{self._base}/")):
            return 404, *make_error(404, f"all addresses here start with {self._base}/")
        is_api = path.removeprefix(self._base).startswith(("/api/", "/artifacts/"))
        site = headers.find(b"sec-fetch-site")
        if is_api and site is not None and site not in _OUR_SITES:
            return 403, *make_error(403, "only this server's own page can send requests")
        return None

    def _find_visitor(self, headers: RequestHeaders) -> Visitor | None:
        cookie = headers.find_cookie(self._cookie_name)
        session = None if cookie is None else self._sessions.find(cookie)
        if cookie is None or session is None:
            return None
        return Visitor(
            session=session,
            csrf=derive_csrf(cookie),
            by=self._editor or "",
            may_edit=self._editor is not None,
            said={"mode": "local"},
        )

    async def _trade(self, send: Send, path: str, pairs: list[tuple[str, str]], token: str) -> None:
        cookie = self._sessions.trade(token)
        if cookie is None:
            await reply(send, 401, b"text/html; charset=utf-8", _LOCKED_OUT.encode())
            return
        rest = urlencode([pair for pair in pairs if pair[0] != "token"])
        # Relative to the address itself, so that a proxy may put anything before it.
        name = path.rpartition("/")[2]
        target = (
            f"{_quote_segment(name)}{'?' if rest else ''}{rest}" if name else f"./{_query(rest)}"
        )
        place = f"{self._base}/"
        value = f"{self._cookie_name}={cookie}; HttpOnly; SameSite=Strict; Path={place}"
        extra = [(b"location", target.encode("latin-1")), (b"set-cookie", value.encode())]
        await reply(send, 303, b"text/plain", b"", extra)


def _quote_segment(segment: str) -> str:
    return f"./{quote(segment, safe='')}"


def _query(rest: str) -> str:
    return f"?{rest}" if rest else ""


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _read_cookies(path: Path) -> dict[bytes, float]:
    """Hashes of cookies and when they were made; nothing where the file says nothing."""
    now_s = time.time()
    try:
        held = json.loads(read_private(path) or b"{}")
        pairs = sorted(held.items(), key=lambda pair: pair[1])
        fresh = [(bytes.fromhex(key), float(at_s)) for key, at_s in pairs]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {key: at_s for key, at_s in fresh if 0 <= now_s - at_s < _KEPT_S}
