"""`quark serve --ui`: the page over the service: logins by key, and of each workspace its own page.

The page knows no service and the service no page; they are joined here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request

from quark.page.app import PageApplication, make_app, send_static
from quark.page.auth import (
    VISITOR,
    Headers,
    Message,
    Receive,
    RequestHeaders,
    Scope,
    Send,
    Visitor,
    add_headers,
    derive_csrf,
    find_foreign_origin,
    find_forgery,
    make_error,
    reply,
)
from quark.page.recent import Recent
from quark.page.routes.page_source import PageSource, Reopening
from quark.page.routes.parameters import Parameters
from quark.page.routes.runs import list_rows
from quark.page.static_files import load_installed_files
from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import Deployment
from quark_backends.service.server.responses import ServiceFailure
from quark_backends.service.server.stores import WorkspaceReader
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.runs.run_reader import ForeignStore

if TYPE_CHECKING:
    from quark.page.auth import AsgiApp
    from quark_backends.service.server.deployment import PageSession
    from quark_backends.service.server.service import Service

_WRITES = frozenset(("write", "admin"))
_MICROSECONDS = 1_000_000
_BURST = 10
_FILL_EVERY_S = 6.0
_MOST_ADDRESSES = 10_000
_PREFIX = 64
_MOST_NEXT = 8_000

_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{head}<title>{title} · Quark</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="{static}style.css"></head>
<body><header class="top"><span class="brand">quark</span></header>
<main id="main" class="login">{body}</main></body></html>
"""
_FORM = """<h1>Log in</h1>
{said}<form method="post" action="login">
<input type="text" value="{workspace}" autocomplete="username" aria-label="Workspace" hidden>
<p><label for="key">Key of your workspace</label>
<input id="key" name="key" type="password" autocomplete="current-password" spellcheck="false"
required autofocus></p>
<input type="hidden" name="token" value="{token}">
<input type="hidden" name="next" value="{next}"><input type="hidden" name="in" value="{workspace}">
<p><button>Log in</button></p></form>
<p class="quiet">Use the key in <code>QUARK_USER_KEY</code>, or ask the server's administrator for
one (<code>quark keys create --scope read</code>). You stay logged in for 12 hours in this
browser, or until the key is revoked.</p>
<p class="quiet">Already logged in? <a href="{next}">Continue</a>.</p>
"""


class LoginLimit:
    """Bounds how often an address may try keys that are none: ten at once, then ten a minute."""

    def __init__(self) -> None:
        self._free = Recent[str, tuple[float, float]](_MOST_ADDRESSES)

    def find_wait_s(self, address: str) -> float:
        """0 where it may try now, or in how many seconds it may."""
        free = self._fill(_group(address))
        return 0.0 if free >= 1 else (1 - free) * _FILL_EVERY_S

    def note_failure(self, address: str) -> None:
        """Count a try that failed."""
        group = _group(address)
        self._free[group] = (self._fill(group) - 1, time.monotonic())

    def _fill(self, group: str) -> float:
        moment = time.monotonic()
        free, at = self._free.get(group, (float(_BURST), moment))
        return min(float(_BURST), free + (moment - at) / _FILL_EVERY_S)


def _group(address: str) -> str:
    """An address, or of IPv6 what one customer has."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((found, _PREFIX), strict=False))


def check_next(text: str) -> str:
    """The address after a login, from `/login` on: a page of this server, or the list of runs."""
    is_plain = text.isascii() and text.isprintable() and not set(text) & set('\\"<> ')
    if len(text) > _MOST_NEXT or not is_plain:
        return "./"
    parts = urlsplit(text)
    place = parts.path.removeprefix("./")
    is_page = place in ("", "compare", "sweeps") or place.startswith(("run/", "sweep/"))
    if parts.scheme or parts.netloc or not is_page or ".." in place or ":" in place:
        return "./"
    return f"./{place}" + (f"?{parts.query}" if parts.query else "")


def write_login(
    static: str,
    *,
    token: str,
    next_place: str,
    workspace: str = "",
    said: str = "",
    is_mistake: bool = False,
) -> bytes:
    """The form.

    Args:
        static: Address of the page's files.
        token: What its POST must show.
        next_place: Where to go then, as `check_next` gives it.
        workspace: Of which workspace the key must be; "" for any.
        said: What to say above it.
        is_mistake: Whether that is what went wrong.
    """
    role = ' role="alert" class="mistake-line"' if is_mistake else ' class="notice-line"'
    body = _FORM.format(
        said=f"<p{role}>{escape(said)}</p>\n" if said else "",
        token=escape(token),
        next=escape(next_place),
        workspace=escape(workspace),
    )
    return _FRAME.format(head="", title="Log in", static=escape(static), body=body).encode()


def write_interstitial(static: str) -> bytes:
    """Asks for the same address once more, from here: then a browser shows its cookie too.

    A cookie that is `SameSite=Strict` does not come along where a link on another site was
    followed.
    """
    return _FRAME.format(
        head='<meta http-equiv="refresh" content="0">',
        title="Loading",
        static=escape(static),
        body='<h1>Loading</h1><p><a href="">Continue</a></p>',
    ).encode()


_HTML = b"text/html; charset=utf-8"
_MOST_WORKSPACES = 16
_MOST_FORM = 16_384
_FORM_S = 10.0
# A long answer is broken off so soon after its session has ended.
_CHECK_EVERY_S = 1.0
_PAGES = ("/", "/compare", "/sweeps")


class _Place(msgspec.Struct, frozen=True):
    """How another process finds a workspace."""

    store_url: str
    artifact_url: str
    workspace: str


def make_team_page(service: Service) -> TeamPage:
    """The page over what the routes of a service share; called in each process of a server."""
    return TeamPage(service)


def open_workspace_source(argument: str) -> PageSource:
    """Open a workspace once more, in a process of its own that analyzes; see `Reopening`."""
    place = msgspec.json.decode(argument, type=_Place)
    config = ServiceConfig(store_url=place.store_url, artifact_url=place.artifact_url)
    store = Deployment(config).open_store(place.workspace, read_only=True)
    return _make_source(WorkspaceReader(store, None, place.workspace), place)


def _make_source(reader: WorkspaceReader, place: _Place) -> PageSource:
    name = f"workspace {place.workspace}"
    # Where the server keeps it is nobody's affair.
    store = ForeignStore(reader, "service", name, Path("/"))
    return PageSource(
        reader,
        place=name,
        backend="service",
        storage_dir=Path("/"),
        open_run=store.open_run,
        reopening=Reopening(
            f"{__name__}:{open_workspace_source.__name__}", msgspec.json.encode(place).decode()
        ),
    )


@dataclass(slots=True)
class _WorkspacePage:
    """The page of one workspace, whose store is leased, and how many requests are in it."""

    leases: AsyncExitStack
    app: AsgiApp
    page: PageApplication
    guests: int = 0

    async def close(self) -> None:
        await asyncio.to_thread(self.page.desk.close)
        await asyncio.to_thread(self.page.tables.close)
        await self.leases.aclose()


class TeamPage:
    """The page of all workspaces, as one ASGI application; of one event loop.

    Host names are checked by whoever stands before it.

    Args:
        service: Who has which key, and where runs are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._static = load_installed_files()
        self._limit = LoginLimit()
        self._pages: OrderedDict[str, _WorkspacePage] = OrderedDict()
        self._changing = asyncio.Lock()
        self._preparing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path, method = str(scope["path"]), scope["method"]
        headers = RequestHeaders(scope)
        is_api = path.startswith(("/api/", "/artifacts/"))
        posts = path in ("/login", "/logout") or path.startswith("/api/")
        if method not in ("GET", "HEAD") and not (method == "POST" and posts):
            await reply(send, 405, *make_error(405, f"{path} does not support {method}"))
        elif is_api and headers.find(b"sec-fetch-site") not in (None, "same-origin", "none"):
            await reply(send, 403, *make_error(403, "request from another site"))
        elif path.startswith("/static/"):
            version, _, name = path.removeprefix("/static/").partition("/")
            await send_static(self._static, version, name)(scope, receive, add_headers(send))
        elif path == "/login" and method == "POST":
            await self._log_in(scope, headers, receive, send)
        elif path == "/login":
            await self._ask_for_key(scope, send, _read_query(scope, "next", "in"))
        else:
            await self._serve(scope, headers, receive, send, is_api=is_api)

    async def close(self) -> None:
        """Close the pages of all workspaces; no request is in them any more."""
        await asyncio.gather(*self._preparing, return_exceptions=True)
        while self._pages:
            _, page = self._pages.popitem()
            await page.close()

    async def _serve(
        self, scope: Scope, headers: RequestHeaders, receive: Receive, send: Send, *, is_api: bool
    ) -> None:
        """Answer whoever is logged in, and have others log in."""
        secret = _find_secret(scope, headers)
        session = None if secret is None else await self._service.guard.find_session(secret)
        if secret is None or session is None:
            await self._turn_away(scope, headers, send, is_api=is_api)
            return
        scope.setdefault("state", {})["key_id"] = session.key.id
        csrf = derive_csrf(secret)
        if scope["method"] == "POST" and (why := find_forgery(headers, csrf)) is not None:
            await reply(send, 403, *make_error(403, why))
            return
        if scope["path"] == "/logout":
            await self._log_out(send, secret)
            return
        (wanted,) = _read_query(scope, "in")
        if not is_api and wanted not in ("", session.key.workspace):
            place = {"next": _name_place(scope), "in": wanted, "now": session.key.workspace}
            await _send_on(send, f"{_find_way(scope)}login?{urlencode(place)}")
            return
        scope[VISITOR] = self._describe(session, csrf, secret)
        async with self._enter(session.key.workspace) as app:
            watched = self._watch(secret, add_headers(send))
            await app(scope, receive, watched)

    def _describe(self, session: PageSession, csrf: str, secret: str) -> Visitor:
        key = session.key
        return Visitor(
            session=secret.encode(),
            csrf=csrf,
            by=f"{key.name} (key {key.id})",
            may_edit=self._service.config.allow_edit and bool(key.scopes & _WRITES),
            said={
                "mode": "team",
                "workspace": key.workspace,
                "name": key.name,
                "scopes": sorted(key.scopes),
                "ends_at": format_time(session.expires_us),
            },
        )

    async def _turn_away(
        self, scope: Scope, headers: RequestHeaders, send: Send, *, is_api: bool
    ) -> None:
        path = scope["path"]
        if is_api or scope["method"] == "POST":
            await reply(send, 401, *make_error(401, "not logged in, or the session has expired"))
        elif path not in _PAGES and not path.startswith(("/run/", "/sweep/")):
            await reply(send, 404, *make_error(404, "page not found"))
        elif headers.find(b"sec-fetch-site") in ("cross-site", "same-site"):
            await reply(send, 200, _HTML, write_interstitial(self._find_static(scope)))
        else:
            (wanted,) = _read_query(scope, "in")
            place = {"next": _name_place(scope), **({"in": wanted} if wanted else {})}
            await _send_on(send, f"{_find_way(scope)}login?{urlencode(place)}")

    async def _ask_for_key(
        self,
        scope: Scope,
        send: Send,
        place: tuple[str, ...],
        *,
        status: int = 200,
        mistake: str = "",
        extra: Headers | None = None,
    ) -> None:
        """The form, with a token that only this browser can show."""
        following, workspace = place
        secret = secrets.token_urlsafe(32)
        said = mistake
        if not said and workspace:
            (now,) = _read_query(scope, "now")
            said = f"This link leads to the workspace {workspace}." + (
                f" You are logged in to {now}. Log in with a key of {workspace}." if now else ""
            )
        body = write_login(
            self._find_static(scope),
            token=derive_csrf(secret),
            next_place=check_next(following),
            workspace=workspace,
            said=said[:500],
            is_mistake=bool(mistake),
        )
        cookie = f"{_name_cookie(scope, 'login')}={secret}; HttpOnly; SameSite=Strict; Path=/"
        head: Headers = [
            (b"set-cookie", cookie.encode()),
            # Under `no-referrer` browsers hide from its own server too where a form comes from.
            (b"referrer-policy", b"same-origin"),
            *(extra or []),
        ]
        await reply(send, status, _HTML, body, head)

    async def _log_in(
        self, scope: Scope, headers: RequestHeaders, receive: Receive, send: Send
    ) -> None:
        """Trade a key for a session of its own, whatever the browser had before."""
        fields = await _read_form(scope, receive)
        if fields is None:
            await reply(send, 400, *make_error(400, "not a login form"))
            return
        place = fields.get("next", "./"), fields.get("in", "")
        made = headers.find_cookie(_name_cookie(scope, "login"))
        foreign = find_foreign_origin(headers)
        if foreign is None and (made is None or fields.get("token") != derive_csrf(made)):
            foreign = "This form is expired or from another browser. Try again."
        if foreign is not None:
            await self._ask_for_key(scope, send, place, status=403, mistake=foreign)
            return
        address = (scope.get("client") or ("", 0))[0]
        try:
            if wait_s := self._limit.find_wait_s(address):
                raise ServiceFailure(
                    ErrorCode.RATE_LIMITED, "too many login attempts", retry_after_s=wait_s
                )
            await self._begin(scope, headers, send, fields.get("key", "").strip(), place)
        except ServiceFailure as refused:
            said = refused.message
            if refused.code == ErrorCode.UNAUTHORIZED:
                self._limit.note_failure(address)
                said = "This key is not valid"
            extra: Headers = []
            if refused.retry_after_s is not None:
                after_s = str(max(1, round(refused.retry_after_s)))
                extra.append((b"retry-after", after_s.encode()))
                said += f"; try again in {after_s} s"
            status = refused.code.status
            await self._ask_for_key(scope, send, place, status=status, mistake=said, extra=extra)

    async def _begin(
        self,
        scope: Scope,
        headers: RequestHeaders,
        send: Send,
        key: str,
        place: tuple[str, str],
    ) -> None:
        is_secure = urlsplit(headers.find(b"origin") or "").scheme == "https"
        name = _name_cookie(scope, "team", is_secure=is_secure)
        value = secrets.token_urlsafe(32)
        session = await self._service.guard.begin_session(key, f"{name}={value}")
        if place[1] not in ("", session.key.workspace):
            await self._service.guard.end_session(f"{name}={value}")
            raise ServiceFailure(
                ErrorCode.FORBIDDEN, f"this key belongs to another workspace than {place[1]}"
            )
        # Nobody goes on in a session that somebody else may know of.
        before = _find_secret(scope, headers)
        if before is not None:
            await self._service.guard.end_session(before)
        lasts_s = max(0, (session.expires_us - now_us()) // _MICROSECONDS)
        cookie = (
            f"{name}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age={lasts_s}"
            f"{'; Secure' if is_secure else ''}"
        )
        made = f"{_name_cookie(scope, 'login')}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"
        if session.key.workspace not in self._pages:
            task = asyncio.create_task(self._prepare(session.key.workspace))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        extra: Headers = [(b"set-cookie", cookie.encode()), (b"set-cookie", made.encode())]
        await _send_on(send, check_next(place[0]), extra)

    async def _log_out(self, send: Send, secret: str) -> None:
        await self._service.guard.end_session(secret)
        name = secret.partition("=")[0]
        is_secure = "; Secure" if name.startswith("__Host-") else ""
        cookie = f"{name}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0{is_secure}"
        await reply(send, 200, b"application/json", b"{}", [(b"set-cookie", cookie.encode())])

    @asynccontextmanager
    async def _enter(self, workspace: str) -> AsyncIterator[AsgiApp]:
        """The page of a workspace, which stays open meanwhile."""
        with self._service.places.take(workspace, self._service.working):
            page = self._pages.get(workspace)
            if page is None:
                page = await self._open(workspace)
            self._pages.move_to_end(workspace)
            page.guests += 1
            try:
                yield page.app
            finally:
                page.guests -= 1

    async def _open(self, workspace: str) -> _WorkspacePage:
        async with self._changing:
            if (found := self._pages.get(workspace)) is not None:
                return found
            while len(self._pages) >= _MOST_WORKSPACES:
                idle = next((name for name, each in self._pages.items() if not each.guests), None)
                if idle is None:
                    break
                await self._pages.pop(idle).close()
            leases = AsyncExitStack()
            store = (await leases.enter_async_context(self._service.stores.lease(workspace))).store
            config = self._service.config
            place = _Place(config.store_url, config.artifact_url, workspace)
            source = _make_source(WorkspaceReader(store, self._service.vault, workspace), place)
            editor = store if config.allow_edit else None
            app = make_app(source, editor=editor)
            page = _WorkspacePage(leases, app, app.state.page)
            self._pages[workspace] = page
            return page

    async def _prepare(self, workspace: str) -> None:
        """Open a workspace while the browser loads the page; what goes wrong its answers tell."""
        with contextlib.suppress(Exception):
            async with self._enter(workspace):
                source = self._pages[workspace].page.source
                await asyncio.to_thread(list_rows, source, Parameters([("limit", "1")]))

    def _watch(self, secret: str, send: Send) -> Send:
        """Breaks off an answer that takes long, once its session is over."""
        checked_s = time.monotonic()

        async def send_it(message: Message) -> None:
            nonlocal checked_s
            if time.monotonic() - checked_s > _CHECK_EVERY_S:
                if await self._service.guard.find_session(secret) is None:
                    raise ClientDisconnect
                checked_s = time.monotonic()
            await send(message)

        return send_it

    def _find_static(self, scope: Scope) -> str:
        return f"{_find_way(scope)}static/{self._static.version}/"


def _find_way(scope: Scope) -> str:
    """From the address of a request to the root: a proxy may have put anything before both."""
    return "../" * (str(scope["path"]).count("/") - 1) or "./"


def _name_place(scope: Scope) -> str:
    """The address of a request, from the root."""
    query = scope["query_string"].decode("latin-1")
    return f"./{quote(str(scope['path'])[1:])}{'?' if query else ''}{query}"


def _name_cookie(scope: Scope, what: str, *, is_secure: bool = False) -> str:
    """Cookies know no ports, so the name does; `__Host-` keeps other hosts from setting it."""
    port = (scope.get("server") or ("", 0))[1]
    return f"{'__Host-' if is_secure else ''}quark_{what}_{port}"


def _find_secret(scope: Scope, headers: RequestHeaders) -> str | None:
    """The token as a browser shows it: with its name, so that none counts under another."""
    for is_secure in (True, False):
        name = _name_cookie(scope, "team", is_secure=is_secure)
        value = headers.find_cookie(name)
        if value:
            return f"{name}={value}"
    return None


def _read_query(scope: Scope, *names: str) -> tuple[str, ...]:
    found = parse_qs(scope["query_string"].decode("latin-1"))
    return tuple(found.get(name, [""])[0] for name in names)


async def _read_form(scope: Scope, receive: Receive) -> dict[str, str] | None:
    parts, size_bytes = [], 0
    try:
        async with asyncio.timeout(_FORM_S):
            async for part in Request(scope, receive).stream():
                size_bytes += len(part)
                if size_bytes > _MOST_FORM:
                    return None
                parts.append(part)
    except TimeoutError:
        return None
    fields = parse_qs(b"".join(parts).decode("latin-1"), encoding="utf-8", errors="replace")
    return {name: values[0] for name, values in fields.items()}


async def _send_on(send: Send, place: str, extra: Headers | None = None) -> None:
    head: Headers = [(b"location", place.encode("latin-1")), *(extra or [])]
    await reply(send, 303, b"text/plain", b"", head)
