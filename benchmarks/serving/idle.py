"""What clients that have nothing to say cost the server: a thousand connections kept alive."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import psutil
from figures import Figure, print_figures

from serving.servers import Service, open_services


def measure_idle(*, quick: bool) -> dict[str, float]:
    clients = 100 if quick else 1000
    _raise_descriptor_limit(2 * clients + 200)
    figures = []
    with ExitStack() as stack:
        for opened in open_services():
            service = stack.enter_context(opened)
            before = _measure_bytes(service)
            sockets = [_ask(service) for _ in range(clients)]
            time.sleep(1.0)
            after = _measure_bytes(service)
            # They are still served: none was dropped to save memory.
            for connection in sockets[:: max(1, clients // 20)]:
                _exchange(connection, service)
            for connection in sockets:
                connection.close()
            figures.append(
                Figure(
                    f"{service.name}, {clients} idle clients, MB",
                    (after - before) / 1e6,
                    at_most=None if quick else 100,
                )
            )
            figures.append(Figure(f"{service.name}, the server alone, MB", before / 1e6))
    return print_figures(f"Memory for {clients} clients that are connected and idle", figures)


def _ask(service: Service) -> socket.socket:
    address = urlsplit(service.url)
    assert address.hostname is not None
    assert address.port is not None
    connection = socket.create_connection((address.hostname, address.port), timeout=30)
    _exchange(connection, service)
    return connection


def _exchange(connection: socket.socket, service: Service) -> None:
    connection.sendall(
        b"GET /v1/workspace HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        + f"Authorization: Bearer {service.key}\r\n\r\n".encode()
    )
    reply = b""
    while b"\r\n\r\n" not in reply:
        part = connection.recv(65536)
        if not part:
            raise RuntimeError("the server closed the connection of an idle client")
        reply += part
    if b" 200 " not in reply.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"the server answered {reply[:200]!r}")


def _measure_bytes(service: Service) -> int:
    """Proportional memory of the server's processes."""
    parent = psutil.Process(service.pid)
    processes = [parent, *parent.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes)


def _raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
