"""Runs a server: one process, or several that share a socket and a parent."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quark_backends.service.protocol import JSON, PROTOCOL_VERSION, ErrorCode
from quark_backends.service.server.application import make_application
from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.responses import ServiceFailure, make_failure_reply
from quark_core.errors import SessionStoreError

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport
    from multiprocessing.context import SpawnProcess

    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from quark_backends.service.server.application import MakePage
    from quark_backends.service.server.service import Service

_log = logging.getLogger("quark.service")

_BACKLOG = 2048
# Parameter of mallopt (malloc.h of glibc), and its value.
_ARENA_MAX, _ARENAS = -8, 2
_KEEP_ALIVE_S = 120
_HEAD_BYTES = 64 * 1024
_HEAD_S = 15.0
_RESTART_PAUSE_S = 1.0
_POLL_S = 0.2
_KILL_AFTER_S = 5.0


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send small replies at once.

    Asyncio switches Nagle's algorithm off only on sockets that say that they
    are TCP; on others a reply in two writes waits for the client's delayed
    acknowledgement, 40 ms. The option is inherited by what is accepted, too.

    Args:
        host: A name or an address.
        port: 0 takes a free one.

    Raises:
        SessionStoreError: It is taken, or may not be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise SessionStoreError(f"cannot listen on host {host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise SessionStoreError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Is another server "
            "running? --port selects another port."
        ) from error
    bound.set_inheritable(True)
    return bound


def run_server(
    config: ServiceConfig,
    bound: socket.socket,
    *,
    on_ready: Callable[[], None] | None = None,
    make_page: MakePage | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; what was accepted by then is finished first.

    Args:
        config: How the server is set up; its databases are of this version.
        bound: Where it listens.
        on_ready: Called once it serves; of one process only.
        make_page: See `make_application`.

    Raises:
        SessionStoreError: A process cannot start.
    """
    _bound_arenas()
    if config.workers == 1:
        _serve(config, bound, 0, None, make_page, on_ready)
    else:
        _Supervisor(config, bound, make_page).run()


def _bound_arenas() -> None:
    """Let threads share two pools of the C library's memory: each keeps what was freed in it."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)


class _BoundedProtocol(HttpToolsProtocol):
    """Lets go of clients whose requests' heads are too long, or take too long."""

    _head_timer: TimerHandle | None = None
    _head_bytes = 0
    _heads = 0
    # The request that is answered now; uvicorn knows the newest one, which may wait behind it.
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        counts, heads = self._head_timer is not None, self._heads
        super().data_received(data)
        # Where heads ended in these bytes, nobody knows how many of them are of the next one.
        if counts and heads == self._heads and self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._stop_timer()
                self.send_400_response("the head of the request is too long")

    def send_400_response(self, msg: str) -> None:
        """Answer what no application sees with the envelope, and hang up."""
        if self.transport.is_closing() or self._leave_reply():
            return
        request_id = os.urandom(8).hex()
        reply = make_failure_reply(ServiceFailure(ErrorCode.MALFORMED, msg), JSON, request_id)
        head = [b"HTTP/1.1 400 Bad Request"]
        head += [name + b": " + value for name, value in reply.raw_headers]
        head += [
            b"quark-protocol: " + str(PROTOCOL_VERSION).encode(),
            b"quark-request-id: " + request_id.encode(),
            b"connection: close",
            b"",
            bytes(reply.body),
        ]
        self.transport.write(b"\r\n".join(head))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self._give_up)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._heads += 1
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _give_up(self) -> None:
        self._head_timer = None
        is_open = self.transport is not None and not self.transport.is_closing()
        if is_open and not self._leave_reply():
            self.transport.close()

    def _leave_reply(self) -> bool:
        """Hang up on a client whose earlier request is being answered; whether it was."""
        cycle = self._running
        if cycle is None or cycle.response_complete:
            return False
        # Nothing may be written from now on: neither the rest of the reply nor another one.
        self.pipeline.clear()
        cycle.disconnected = True
        cycle.message_event.set()
        self.transport.close()
        return True

    def _stop_timer(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ServiceServer(uvicorn.Server):
    """Says that it is not ready before it ends.

    Attributes:
        service: What the routes share.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_s: float,
        on_ready: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self.service = service
        self._drain_s = drain_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and tell."""
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, after a while of not being ready where that is asked for."""
        if self.service.is_draining or not self._drain_s:
            self.service.is_draining = True
            super().handle_exit(sig, frame)
            return
        self.service.is_draining = True
        timer = threading.Timer(self._drain_s, super().handle_exit, (sig, frame))
        timer.daemon = True
        timer.start()


def make_server(
    config: ServiceConfig,
    *,
    worker: int = 0,
    metrics_path: str | None = None,
    on_ready: Callable[[], None] | None = None,
    make_page: MakePage | None = None,
) -> ServiceServer:
    """One process's server, which `run(sockets=[…])` runs; see `make_application`."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    application = make_application(
        config, worker=worker, metrics_path=metrics_path, make_page=make_page
    )
    settings = uvicorn.Config(
        application,
        http=_BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(config.shutdown_s)),
    )
    return ServiceServer(settings, application.state.service, config.drain_s, on_ready)


def _serve(
    config: ServiceConfig,
    bound: socket.socket,
    worker: int,
    metrics_path: str | None,
    make_page: MakePage | None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    server = make_server(
        config, worker=worker, metrics_path=metrics_path, on_ready=on_ready, make_page=make_page
    )
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        return


class _Supervisor:
    """Starts the processes of a server, starts them again when they die, and ends them."""

    def __init__(
        self, config: ServiceConfig, bound: socket.socket, make_page: MakePage | None
    ) -> None:
        self._config = config
        self._bound = bound
        self._make_page = make_page
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[int, SpawnProcess] = {}
        self._ending = False

    def run(self) -> None:
        """Run until a signal."""
        with tempfile.NamedTemporaryFile(prefix="quark-metrics-") as metrics:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._end)
            for worker in range(self._config.workers):
                self._start(worker, metrics.name)
            while not self._ending:
                for worker, process in list(self._processes.items()):
                    if not process.is_alive() and not self._ending:
                        _log.error(
                            "process %s of the server ended with %s; it is restarted",
                            process.pid,
                            process.exitcode,
                        )
                        time.sleep(_RESTART_PAUSE_S)
                        self._start(worker, metrics.name)
                time.sleep(_POLL_S)
            self._join()

    def _start(self, worker: int, metrics_path: str) -> None:
        process = self._context.Process(
            target=_run_worker,
            args=(self._config, self._bound, worker, metrics_path, os.getpid(), self._make_page),
        )
        process.start()
        self._processes[worker] = process

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._ending = True

    def _join(self) -> None:
        # While any process has it open, connections are made that nobody accepts.
        self._bound.close()
        for process in self._processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._config.drain_s + self._config.shutdown_s + _KILL_AFTER_S
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run_worker(
    config: ServiceConfig,
    bound: socket.socket,
    worker: int,
    metrics_path: str,
    parent: int,
    make_page: MakePage | None,
) -> None:
    """One process of several; it ends with its parent."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # Ctrl-C goes to the whole group: the parent passes it on, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="quark-parent").start()
    _serve(config, bound, worker, metrics_path, make_page)
