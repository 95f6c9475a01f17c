"""The connections of one process to one service, through the proxy of the environment."""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

import httpcore

from quark_backends.service.client.address import ServiceAddress
from quark_backends.service.client.bounded_network import BoundedNetwork

__all__ = ["MAX_CONNECTIONS", "Connections"]

MAX_CONNECTIONS = 16
_KEPT_ALIVE = 4
_KEEP_ALIVE_S = 120.0


class Connections:
    """The connections of one process to one service.

    Args:
        address: The service.

    Attributes:
        process: Id of the process.
        way: What lies between, for messages; empty where nothing does.
    """

    def __init__(self, address: ServiceAddress) -> None:
        self.process = os.getpid()
        proxy = _find_proxy(address)
        self.way = "" if proxy is None else f"by the proxy {urlsplit(proxy).hostname}: "
        self._pool = _open_pool(address, proxy)
        self._lock = threading.Lock()
        self._calls = 0
        self._retired = False

    def handle(self, request: httpcore.Request) -> httpcore.Response:
        """Send a request; returns the reply once its head is there."""
        return self._pool.handle_request(request)

    def enter(self) -> None:
        """Count a call."""
        with self._lock:
            self._calls += 1

    def leave(self) -> None:
        """Count a call no more."""
        with self._lock:
            self._calls -= 1
            last = self._retired and self._calls == 0
        if last:
            self._pool.close()

    def retire(self) -> None:
        """Close the connections, once the calls that are under way are over."""
        if self.process != os.getpid():
            return
        with self._lock:
            self._retired = True
            idle = self._calls == 0
        if idle:
            self._pool.close()

    def abandon(self) -> None:
        """Close the connections: nobody can call any more."""
        if self.process == os.getpid():
            with contextlib.suppress(Exception):
                self._pool.close()


def _open_pool(address: ServiceAddress, proxy: str | None) -> httpcore.ConnectionPool:
    """A pool that goes through a proxy, where there is one for the host."""
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "max_keepalive_connections": _KEPT_ALIVE,
        "keepalive_expiry": _KEEP_ALIVE_S,
        "network_backend": BoundedNetwork(),
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
