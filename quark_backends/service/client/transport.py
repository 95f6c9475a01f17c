"""The address of a service, and the httpx transport to it that keeps to a deadline."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

import httpcore
import httpx

from quark_core.backends.contract import BackendConfig
from quark_core.config import settings
from quark_core.errors import BackendUnauthorized, SessionStoreError

_PORTS = {"http": 80, "https": 443}
_OPTIONS = ("store", "timeout")
_EVERY_STORE = "*"
_EXAMPLE = "such as https://quark.example.org"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """A service, and what is asked of it.

    Attributes:
        scheme: http or https.
        host: Name or address, without brackets, in ASCII.
        port: Port, or None for the scheme's own.
        prefix: Path under which the service answers, "" or with a slash before it.
        store: Name of the project store that lists and searches keep to; None for
            all of the workspace.
        timeout_s: How long one call may take.
    """

    scheme: str
    host: str
    port: int | None
    prefix: str
    store: str | None
    timeout_s: float

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """URL of the service, without a slash at its end."""
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def store_root(self) -> str:
        """The project store as a URI, which QUARK_PERSISTENCE_URL takes."""
        return f"{self.url}?store={quote(self.store or _EVERY_STORE, safe='*')}"

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine."""
        if self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def run_path(self, run_id: str) -> str:
        """The run as a URI: the route that describes it to who has the key."""
        return f"{self.url}/v1/runs/{quote(run_id, safe='')}"

    def page_path(self, run_id: str, workspace: str) -> str:
        """The run's page, for people who log in to its workspace."""
        return f"{self.url}/run/{quote(run_id, safe='')}?in={quote(workspace, safe='')}"


def find_address(config: BackendConfig) -> ServiceAddress:
    """The service that a configuration means; QUARK_PERSISTENCE_URL where it says nothing.

    Raises:
        SessionStoreError: There is none, or its URL is no good; the message
            holds no user-info and no secret.
    """
    given = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    text = config.location.strip() or given
    source = settings.PERSISTENCE_URL if text in given else "the backend's URI"
    if not text:
        raise SessionStoreError(
            f"{settings.PERSISTENCE_URL} is not set. Set it to the URL of your Quark server, "
            f"{_EXAMPLE}"
        )
    parts = _split(text.removeprefix("quark+"), source)
    options = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **config.options}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise SessionStoreError(
            f"{source}: the server URL has no option {unknown[0]!r:.60}. Its options are "
            f"{' and '.join(_OPTIONS)}"
        )
    # One store for all of a workspace, so that runs of other people and folders are found.
    store = options.get("store") or settings.chosen_store() or _EVERY_STORE
    return ServiceAddress(
        scheme=parts.scheme,
        host=_encode_host(parts.hostname or "", source),
        port=_check_port(parts, source),
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        store=None if store == _EVERY_STORE else store,
        timeout_s=_find_timeout(options, source),
    )


def check_key_is_for(address: ServiceAddress, config: BackendConfig) -> None:
    """See that the user's key may be shown to a service that a run's folder names.

    The environment has one key, which is for the service that QUARK_PERSISTENCE_URL
    names, where it names one. What this process was asked for itself is not held to it.

    Raises:
        BackendUnauthorized: The key is for another service.
    """
    given = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    if not config.is_noted or not given:
        return
    parts = _split(given.removeprefix("quark+"), settings.PERSISTENCE_URL)
    host = _encode_host(parts.hostname or "", settings.PERSISTENCE_URL)
    port = _check_port(parts, settings.PERSISTENCE_URL)
    if (parts.scheme, host, port) != (address.scheme, address.host, address.port):
        raise BackendUnauthorized(
            f"the run's folder names the Quark server at {address.url}, but {settings.USER_KEY} "
            f"belongs to the server in {settings.PERSISTENCE_URL} and is not sent to another "
            f"one. Set both to {address.url} and its key, and try again",
            backend="service",
        )


def _split(text: str, source: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme == "quark":
        parts = parts._replace(scheme="https")
    if parts.scheme not in _PORTS or not host:
        shown = repr(text.rpartition("@")[2].partition("?")[0])
        raise SessionStoreError(
            f"{source} is not a URL of a Quark server: {shown:.80}. Use http:// or https://, "
            f"{_EXAMPLE}"
        )
    if "@" in parts.netloc:
        raise SessionStoreError(
            f"{source} must not contain a user name or a password. Put the key into "
            f"{settings.USER_KEY}"
        )
    if not parts.path.isascii() or not (parts.path or "/").isprintable() or " " in parts.path:
        raise SessionStoreError(f"{source}: the path {parts.path!r:.80} must be percent-encoded")
    return parts


def _check_port(parts: SplitResult, source: str) -> int | None:
    try:
        port = parts.port
    except ValueError:
        raise SessionStoreError(f"{source}: the port must be a number from 1 to 65535") from None
    return None if port == _PORTS[parts.scheme] else port


def _encode_host(host: str, source: str) -> str:
    if ":" in host:
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise SessionStoreError(f"{source}: {host!r:.80} is not a host name") from None


def _find_timeout(options: Mapping[str, str], source: str) -> float:
    text = options.get("timeout")
    if text is None:
        return settings.persistence_timeout_s()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 86_400.0:
        raise SessionStoreError(f"{source}: timeout must be a number of seconds, got {text!r:.40}")
    return seconds


_MAX_CHARACTERS = 1024


class UserKey:
    """The key of QUARK_USER_KEY, or of the file that QUARK_USER_KEY_FILE names.

    Raises:
        SessionStoreError: It cannot be read, or cannot be a key.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = _read_key()

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return bool(self._value)

    def reload(self) -> bool:
        """Read it again; whether another one is there now.

        A key that cannot be read now is left as it was.
        """
        try:
            found = _read_key()
        except SessionStoreError:
            return False
        changed = bool(found) and found != self._value
        if changed:
            self._value = found
        return changed

    def authorize(self) -> tuple[bytes, bytes]:
        """The header that shows it to the service."""
        return b"Authorization", b"Bearer " + self._value.encode("ascii")

    def hide_in(self, text: str) -> str:
        """A text of somebody else's without the key, should it repeat it."""
        return text.replace(self._value, "[key]") if self._value else text

    def __repr__(self) -> str:
        return f"UserKey({'set' if self._value else 'not set'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not copied into other processes: they read it themselves")


def _read_key() -> str:
    source = settings.USER_KEY
    value = os.environ.get(settings.USER_KEY, "").strip()
    path = os.environ.get(settings.USER_KEY_FILE, "").strip()
    if not value and path:
        source = settings.USER_KEY_FILE
        try:
            with Path(path).expanduser().open("rb") as file:
                value = file.read(8 * _MAX_CHARACTERS).decode("utf-8", "replace").strip()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise SessionStoreError(
                f"{source} names {path!r}, which cannot be read: {reason}"
            ) from (None)
    if value and (len(value) > _MAX_CHARACTERS or not value.isascii() or not value.isprintable()):
        raise SessionStoreError(
            f"{source} is not a valid key: it must be one line of at most {_MAX_CHARACTERS} "
            "ASCII characters"
        )
    if " " in value:
        raise SessionStoreError(f"{source} is not a valid key: it contains a space")
    return value


# A transport of httpx that keeps to a deadline, whatever the other side does.
#
# The time-outs of HTTP libraries bound one read or one write, so that a server
# which sends a byte now and then is waited for without end. Here every wait on
# a socket ends with the deadline of the call that it belongs to.

MAX_CONNECTIONS = 16
_KEPT_ALIVE = 4
_KEEP_ALIVE_S = 120.0
_PIECE_BYTES = 256 * 1024
_local = threading.local()


class Deadline:
    """When a call must be over.

    Args:
        timeout_s: From now on.
    """

    __slots__ = ("_at_s", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """How much time is left, not below 0."""
        return max(0.0, self._at_s - time.monotonic())

    def renew(self) -> None:
        """Count anew: there was progress."""
        self._at_s = time.monotonic() + self.timeout_s

    def postpone(self, seconds: float) -> None:
        """Leave out a time in which nobody waited for the other side."""
        self._at_s += seconds

    @contextlib.contextmanager
    def bind(self) -> Iterator[None]:
        """Hold whatever this thread does on the network meanwhile to the deadline."""
        before = getattr(_local, "deadline", None)
        _local.deadline = self
        try:
            yield
        finally:
            _local.deadline = before


def _clip(timeout_s: float | None, expired: type[Exception]) -> float | None:
    """A time-out that ends with the deadline of this thread's call.

    Raises:
        Exception: The given one, where the deadline has passed.
    """
    deadline = getattr(_local, "deadline", None)
    if not isinstance(deadline, Deadline):
        return timeout_s
    left_s = deadline.left_s
    if left_s <= 0.0:
        raise expired("the time limit is over")
    return left_s if timeout_s is None else min(left_s, timeout_s)


class BoundedTransport(httpx.BaseTransport):
    """The connections of one process to one service, through the proxy of the environment.

    From any thread. What a thread waits for ends with the deadline that it has bound;
    replies are handed on as they come, and not unpacked.

    Args:
        address: The service.

    Attributes:
        process: Id of the process.
        way: What lies between, for messages; empty where nothing does.
    """

    def __init__(self, address: ServiceAddress) -> None:
        self.process = os.getpid()
        proxy = _find_proxy(address)
        self.way = "" if proxy is None else f"through the proxy {urlsplit(proxy).hostname}: "
        self._pool = _open_pool(address, proxy)
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; returns the reply once its head is there.

        Raises:
            httpx.TransportError: It does not come, or not in time.
        """
        assert isinstance(request.stream, httpx.SyncByteStream)
        url = request.url
        with self._lock:
            self._calls += 1
        try:
            with _as_httpx(request):
                response = self._pool.handle_request(
                    httpcore.Request(
                        method=request.method,
                        url=httpcore.URL(
                            scheme=url.raw_scheme,
                            host=url.raw_host,
                            port=url.port,
                            target=url.raw_path,
                        ),
                        headers=request.headers.raw,
                        content=request.stream,
                        extensions=request.extensions,
                    )
                )
        except BaseException:
            self._leave()
            raise
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_ReplyStream(self, response, request),
            extensions=response.extensions,
        )

    def close(self) -> None:
        """Close the connections, once the calls that are under way are over; never raises."""
        if self.process != os.getpid():
            return
        with self._lock:
            self._closed = True
            idle = self._calls == 0
        if idle:
            self._close_pool()

    def _leave(self) -> None:
        """Count a call no more."""
        with self._lock:
            self._calls -= 1
            last = self._closed and self._calls == 0
        if last:
            self._close_pool()

    def _close_pool(self) -> None:
        with contextlib.suppress(Exception):
            self._pool.close()


class _ReplyStream(httpx.SyncByteStream):
    """The body of a reply as it comes; what is not read to its end takes its connection along."""

    def __init__(
        self, transport: BoundedTransport, response: httpcore.Response, request: httpx.Request
    ) -> None:
        self._transport = transport
        self._response = response
        self._request = request
        self._open = True

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx(self._request):
            yield from self._response.iter_stream()

    def close(self) -> None:
        """Give the reply up."""
        if self._open:
            self._open = False
            try:
                self._response.close()
            finally:
                self._transport._leave()


@contextlib.contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    """Make errors of httpcore those of httpx, which have the same names."""
    try:
        yield
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.ProxyError,
        httpcore.UnsupportedProtocol,
    ) as error:
        name = type(error).__name__
        raise getattr(httpx, name)(str(error), request=request) from error


def _open_pool(address: ServiceAddress, proxy: str | None) -> httpcore.ConnectionPool:
    """A pool that goes through a proxy, where there is one for the host."""
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "max_keepalive_connections": _KEPT_ALIVE,
        "keepalive_expiry": _KEEP_ALIVE_S,
        "network_backend": _BoundedNetwork(),
    }
    if address.scheme == "https":
        options["ssl_context"] = _make_tls()
    if proxy is None:
        return httpcore.ConnectionPool(**options)
    parts = urlsplit(proxy)
    url = httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target="/")
    auth = None
    if parts.username is not None:
        auth = (unquote(parts.username), unquote(parts.password or ""))
    if parts.scheme.startswith("socks5"):
        return httpcore.SOCKSProxy(proxy_url=url, proxy_auth=auth, **options)
    return httpcore.HTTPProxy(proxy_url=url, proxy_auth=auth, **options)


def _find_proxy(address: ServiceAddress) -> str | None:
    if address.is_loopback or urllib.request.proxy_bypass(address.authority):
        return None
    found = urllib.request.getproxies()
    proxy = found.get(address.scheme) or found.get("all")
    if proxy is None or not proxy.strip():
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _make_tls() -> ssl.SSLContext:
    """The system's certificates, and certifi's where it is; SSL_CERT_FILE goes before both."""
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE") and not os.environ.get("SSL_CERT_DIR"):
        with contextlib.suppress(ImportError, OSError, ssl.SSLError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


class _BoundedNetwork(httpcore.NetworkBackend):
    """Opens connections for `httpcore` that keep to the deadline of the calling thread."""

    def __init__(self) -> None:
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of a host that answers."""
        started_s = time.monotonic()
        addresses = _resolve(host, port, _clip(timeout, httpcore.ConnectTimeout))
        for place, address in enumerate(addresses, start=1):
            left_s = None
            if timeout is not None:
                left_s = max(0.01, timeout - (time.monotonic() - started_s))
            try:
                stream = self._inner.connect_tcp(
                    address,
                    port,
                    timeout=_clip(left_s, httpcore.ConnectTimeout),
                    local_address=local_address,
                    socket_options=socket_options,
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if place == len(addresses):
                    raise
            else:
                return _BoundedStream(stream)
        raise httpcore.ConnectError(f"{host} has no address")

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class _BoundedStream(httpcore.NetworkStream):
    """A connection whose every wait ends with the deadline of the calling thread."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        found = inner.get_extra_info("socket")
        # TLS inside the TLS of a proxy has a socket that must not be written to directly.
        direct = isinstance(inner, httpcore.NetworkStream) and type(inner).__name__ == "SyncStream"
        self._socket: socket.socket | None = found if direct else None

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read what there is."""
        left_s = _clip(timeout, httpcore.ReadTimeout)
        return self._inner.read(max(max_bytes, _PIECE_BYTES), left_s)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of it."""
        view = memoryview(buffer)
        while view:
            left_s = _clip(timeout, httpcore.WriteTimeout)
            if self._socket is None:
                self._inner.write(bytes(view[:4096]), left_s)
                view = view[4096:]
                continue
            try:
                self._socket.settimeout(left_s)
                view = view[self._socket.send(view[:_PIECE_BYTES]) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        """Give the connection up."""
        self._inner.close()

    def start_tls(
        self,
        ssl_context: Any,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Go on in TLS."""
        left_s = _clip(timeout, httpcore.ConnectTimeout)
        return _BoundedStream(self._inner.start_tls(ssl_context, server_hostname, left_s))

    def get_extra_info(self, info: str) -> Any:
        """See `httpcore`."""
        return self._inner.get_extra_info(info)


def _resolve(host: str, port: int, timeout_s: float | None) -> list[str]:
    """The addresses of a host; a resolver that hangs is waited for as long as anything else."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    found: list[str] = []
    failures: list[OSError] = []

    def look_up() -> None:
        try:
            # A host name that cannot be encoded is a UnicodeError.
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError:
            failures.append(OSError(f"{host} is not a host name"))
        except OSError as error:
            failures.append(error)
        else:
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in entries))

    thread = threading.Thread(target=look_up, name="quark-resolve", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends
        look_up()
    else:
        thread.join(timeout_s)
        if thread.is_alive():
            raise httpcore.ConnectTimeout(f"the name {host} was not resolved in time")
    if failures:
        raise httpcore.ConnectError(f"the name {host} cannot be resolved: {failures[0]}")
    return found
