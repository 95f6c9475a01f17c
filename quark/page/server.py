"""Serves the page to this machine until it is told to end."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quark.page.app import make_app
from quark.page.auth import Guard, Sessions
from quark.page.routes.edits import RootEditor
from quark.page.routes.parameters import Parameters
from quark.page.routes.runs import list_rows
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.runs.run_editing import find_user
from quark_core.system.folders import find_private_folder

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource

DEFAULT_PORT = 7410

_TRIED_PORTS = 20
_BACKLOG = 128
_END_S = 2


class PageServer:
    """One server with its socket bound, which runs in the thread that calls `run`.

    Args:
        source: What is looked at.
        bound: A listening socket; closed at the end.
        base: Path that every address begins with, or "".
        hosts: Names besides those of the loopback by which clients may call it.
        on_trade: Called after a token was traded for a cookie.
        allow_edit: Whether the page may change runs, and ask them to stop.
        keeps_sessions: Whether browsers that are signed in stay so when a server of the same
            place is started again on the same port.

    Attributes:
        sessions: Tokens and cookies.
    """

    def __init__(
        self,
        source: PageSource,
        bound: socket.socket,
        *,
        base: str = "",
        hosts: Iterable[str] = (),
        on_trade: Callable[[], None] | None = None,
        allow_edit: bool = False,
        keeps_sessions: bool = False,
    ) -> None:
        import uvicorn

        self._source = source
        self._socket = bound
        host, self._port = bound.getsockname()[:2]
        self._base = base
        self._host = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
        kept = _find_kept(source, self._port, base) if keeps_sessions else None
        self.sessions = Sessions(on_trade, kept=kept)
        editor = RootEditor(source.storage_dir) if allow_edit else None
        inner = make_app(source, base=base, editor=editor)
        self._tables = inner.state.page.tables
        app = Guard(
            inner,
            self.sessions,
            cookie_name=f"quark_page_{self._port}",
            hosts=[*hosts, show_host(host)],
            base=base,
            editor=find_user() if allow_edit else None,
        )
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """Where it is, without a token."""
        return f"http://{show_host(self._host)}:{self._port}{self._base}/"

    def make_link(self) -> str:
        """Where it is, with a new token, which is good once."""
        return f"{self.url}?token={self.sessions.make_token()}"

    def run(self) -> None:
        """Serve until `end`, or until the process is told to end.

        Raises:
            KeyboardInterrupt: It was ended by Ctrl-C, after everything was closed.
        """
        # What the first answers need is loaded while the browser starts.
        threading.Thread(
            target=_warm_up, args=(self._source,), name="quark-page-warm-up", daemon=True
        ).start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._tables.close()

    def end(self) -> None:
        """Have `run` return soon; from any thread."""
        self._server.should_exit = True


def _find_kept(source: PageSource, port: int, base: str) -> Path | None:
    """Where what is signed in is noted, of this place and this address of it alone."""
    folder = find_private_folder("pages")
    said = repr((str(source.storage_dir), source.specification, port, base)).encode()
    return None if folder is None else folder / f"{hashlib.sha256(said).hexdigest()[:32]}.json"


def _warm_up(source: PageSource) -> None:
    """Load what reads lists and curves; what goes wrong is told by the answers."""
    with contextlib.suppress(Exception):
        rows = list_rows(source, Parameters([("limit", "1")]))["rows"]
        if rows:
            source.summarize(rows[0]["id"])


def bind_socket(host: str, port: int | None) -> socket.socket:
    """A listening socket.

    Args:
        host: An address or a name.
        port: The port, 0 for a free one; None for `DEFAULT_PORT` or the next that is free.

    Raises:
        SessionStoreError: There is none that may be listened on.
    """
    tried = range(DEFAULT_PORT, DEFAULT_PORT + _TRIED_PORTS) if port is None else (port,)
    problem: OSError | None = None
    for number in tried:
        try:
            return _listen(host, number)
        except OSError as error:
            problem = error
    which = f"{tried[0]} to {tried[-1]}" if len(tried) > 1 else str(tried[0])
    reason = "" if problem is None else f": {problem.strerror or problem}"
    raise SessionStoreError(
        f"cannot listen on {host} port {which}{reason}; --port 0 selects a free one"
    )


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Without it an answer in two writes waits for the browser's delayed acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def check_base(base: str) -> str:
    """A path without a slash behind it, such as `/quark`; "" for none.

    Raises:
        SchemaValidationError: Not a plain path.
    """
    path = "/" + base.strip("/") if base.strip("/") else ""
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~/@")
    if not set(path) <= plain or any(part in (".", "..", "") for part in path.split("/")[1:]):
        raise SchemaValidationError(f"base must be a plain path such as /quark, got {base!r:.80}")
    return path


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def show_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
