"""Connections that keep to a deadline, whatever the other side does.

The time-outs of HTTP libraries bound one read or one write, so that a server
which sends a byte now and then is waited for without end. Here every wait on
a socket ends with the deadline of the call that it belongs to.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore

__all__ = ["BoundedNetwork", "Deadline"]

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
        raise expired("the time is over")
    return left_s if timeout_s is None else min(left_s, timeout_s)


class BoundedNetwork(httpcore.NetworkBackend):
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
                return BoundedStream(stream)
        raise httpcore.ConnectError(f"{host} has no address")

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class BoundedStream(httpcore.NetworkStream):
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
        return BoundedStream(self._inner.start_tls(ssl_context, server_hostname, left_s))

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
            failures.append(OSError(f"{host} is no host name"))
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
            raise httpcore.ConnectTimeout(f"the name {host} is not resolved in time")
    if failures:
        raise httpcore.ConnectError(f"the name {host} cannot be resolved: {failures[0]}")
    return found
