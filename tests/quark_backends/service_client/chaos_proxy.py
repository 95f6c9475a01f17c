"""A proxy on loopback that misbehaves in one of many ways, which may be switched while it runs.

    with ChaosProxy(upstream=("127.0.0.1", 7411)) as proxy:
        proxy.set_mode("hang")
        ...
        proxy.counts  # Counter: connections and what was done, by mode

Modes: pass, refuse, hang, drip (bytes of a head, for ever), drip_body (a good
head, then single bytes), half_close, reset, garbage, close, redirect,
gzip_bomb, endless (a body without end), never_reads, lose_reply (the request
is carried out, its reply is not passed on), break_off (the same, but the head
of the reply is passed on), and any status such as 500, 503, 429 (with
Retry-After), 413 (before the body was read). Switching cuts the connections
that are open.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
import zlib
from collections import Counter

from held_ports import hold_port

MODES = (
    "refuse hang drip drip_body half_close reset garbage close redirect gzip_bomb endless"
    " never_reads 500 502 503 429 413 408 425 404 421"
).split()
LOST = ("lose_reply", "break_off")
_PAGE = (
    "<html><head><title>{status} Trouble</title><style>b {{ color: red }}</style></head>"
    "<body><h1>{status} Trouble</h1><p>nginx&nbsp;on the way</p></body></html>"
)
_BOMB_BYTES = 200 * 2**20
_DRIP_S = 0.05
_bomb = b""


class ChaosProxy:
    """Listens on a free port of 127.0.0.1, on a thread of its own.

    Args:
        upstream: Host and port that requests go on to.
        mode: What to do at first.
        retry_after: What 429 and 503 say under Retry-After, or None.
        location: Where a redirect points.
        tls: A context of a server, where it is spoken to in TLS.
    """

    def __init__(
        self,
        upstream=None,
        mode="pass",
        *,
        retry_after="7",
        location="https://other/x",
        tls=None,
    ):
        self.upstream = upstream
        self.retry_after = retry_after
        self.location = location
        self.tls = tls
        self.counts = Counter()
        self.requests = []
        self._mode = mode
        self._open = set()
        self._server = None
        self._listener = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._place, self.port = hold_port()
        self._call(self._apply(mode))

    @property
    def url(self):
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def mode(self):
        return self._mode

    def set_mode(self, mode):
        """Do something else from now on; connections that are open are cut."""
        self._call(self._apply(mode))

    def cut(self):
        """Cut the connections that are open."""
        self._call(self._cut())

    def close(self):
        if self._thread.is_alive():
            self._call(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
            self._place.close()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _apply(self, mode):
        if mode == "gzip_bomb":
            _make_bomb()  # before anybody waits for it
        self._mode = mode
        await self._cut()
        if mode == "refuse":
            await self._stop_listening()
        elif self._server is None:
            # Small buffers, so that what is not read is soon not taken.
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if mode == "never_reads":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            listener.bind(("127.0.0.1", self.port))
            self._server = await asyncio.start_server(
                self._serve, sock=listener, limit=2**20, ssl=self.tls
            )
        elif mode == "never_reads":
            await self._stop_listening()
            await self._apply(mode)

    async def _stop_listening(self):
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    async def _cut(self):
        for writer in list(self._open):
            with contextlib.suppress(Exception):
                writer.transport.abort()
        await asyncio.sleep(0)

    async def _shut(self):
        await self._stop_listening()
        await self._cut()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader, writer):
        mode = self._mode
        self.counts["connections"] += 1
        self._open.add(writer)
        try:
            if mode in ("pass", *LOST):
                await self._forward(reader, writer, mode)
            elif mode == "never_reads":
                writer.transport.pause_reading()
                self.counts[mode] += 1
                await asyncio.sleep(3600)
            else:
                await self._answer(reader, writer, mode)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            pass  # the proxy is closed, and asyncio would print that nobody asked how it went
        finally:
            self._open.discard(writer)
            with contextlib.suppress(Exception):
                writer.close()

    async def _answer(self, reader, writer, mode):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            self.counts[mode] += 1
            if mode != "413":
                await _skip_body(reader, head)
            if mode == "hang":
                await asyncio.sleep(3600)
            elif mode == "drip":
                writer.write(b"HTTP/1.1 200 OK\r\n")
                while True:
                    writer.write(b"X-Drip: 1\r\n"[:1])
                    await writer.drain()
                    await asyncio.sleep(_DRIP_S)
            elif mode == "drip_body":
                writer.write(_head(200, ("Content-Length", "1000000")))
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(_DRIP_S)
            elif mode == "half_close":
                writer.write_eof()
                await asyncio.sleep(3600)
            elif mode == "reset":
                _reset(writer)
                return
            elif mode == "close":
                return
            elif mode == "garbage":
                writer.write(b"\x00\xff\xfeSSH-2.0-OpenSSH_9.2\r\n" * 20)
                await writer.drain()
                return
            elif mode == "redirect":
                writer.write(_head(302, ("Location", self.location), ("Content-Length", "0")))
            elif mode == "gzip_bomb":
                body = _make_bomb()
                writer.write(
                    _head(200, ("Content-Encoding", "gzip"), ("Content-Length", str(len(body))))
                )
                writer.write(body)
            elif mode == "endless":
                writer.write(_head(200, ("Transfer-Encoding", "chunked")))
                while True:
                    writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    await writer.drain()
            else:
                self._write_page(writer, int(mode))
            await writer.drain()
            if mode == "413":
                return

    def _write_page(self, writer, status):
        body = _PAGE.format(status=status).encode()
        headers = [("Content-Type", "text/html"), ("Content-Length", str(len(body)))]
        if status in (429, 503) and self.retry_after is not None:
            headers.append(("Retry-After", self.retry_after))
        if status == 413:
            headers.append(("Connection", "close"))
        writer.write(_head(status, *headers, protocol=False) + body)

    async def _forward(self, reader, writer, mode):
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        self._open.add(up_writer)

        async def go():
            while data := await reader.read(65536):
                up_writer.write(data)
                await up_writer.drain()
            if self.tls is None:
                up_writer.write_eof()

        async def come():
            while data := await up_reader.read(65536):
                if mode in LOST:
                    # The upstream has done it, and nobody will know.
                    self.counts[mode] += 1
                    if mode == "break_off":
                        head, end, _ = data.partition(b"\r\n\r\n")
                        writer.write(head + end)
                        await writer.drain()
                    return
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.ensure_future(go()), asyncio.ensure_future(come())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done() and not tasks[1].done():
                await asyncio.wait(tasks[1:], timeout=5)
            self.counts["pass"] += mode == "pass"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._open.discard(up_writer)
            up_writer.close()


@contextlib.contextmanager
def losing(proxy, replies, mode="lose_reply"):
    """Lose the replies to so many requests, or all but their heads, and then no more."""
    before = proxy.counts[mode]
    proxy.set_mode(mode)
    done = threading.Event()

    def stop():
        while proxy.counts[mode] < before + replies and not done.is_set():
            time.sleep(0.005)
        proxy.set_mode("pass")

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(60)
    assert proxy.counts[mode] >= before + replies


def _head(status, *headers, protocol=True):
    lines = [f"HTTP/1.1 {status} Whatever"]
    lines += [f"{name}: {value}" for name, value in headers]
    if protocol:
        lines.append("Quark-Protocol: 1")
    return "\r\n".join([*lines, "", ""]).encode()


async def _skip_body(reader, head):
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            left = int(value)
            while left:
                left -= len(await reader.read(min(left, 65536)) or b" " * left)


def _reset(writer):
    handle = writer.get_extra_info("socket")
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _make_bomb():
    global _bomb
    if not _bomb:
        packer = zlib.compressobj(wbits=31)
        pieces = [packer.compress(bytes(2**20)) for _ in range(_BOMB_BYTES // 2**20)]
        _bomb = b"".join([*pieces, packer.flush()])
    return _bomb
