"""Replies are read as h11 reads them, and connections are used again where they may be."""

import contextlib
import random
import socket
import threading

import h11
import httpcore
import httpx
import pytest

from quark_backends.service.client.address import ServiceAddress, UserKey
from quark_backends.service.client.bounded_transport import Deadline
from quark_backends.service.client.calls import Call, ServiceClient
from quark_backends.service.client.direct_connections import DirectConnections, Outgoing
from quark_backends.service.client.reply_reading import ReplyReader
from quark_backends.service.client.service_errors import Unreachable

PROTOCOL = b"Quark-Protocol: 1\r\n"


class Parts:
    """Hands out bytes in pieces of chance, as a network does."""

    def __init__(self, data, chance=None):
        self.data = data
        self.chance = chance

    def receive(self, size):
        if self.chance is not None:
            size = min(size, self.chance.choice((1, 2, 7, 100, 10_000)))
        part, self.data = self.data[:size], self.data[size:]
        return part


def read_ours(data, method, chance=None):
    """Status, headers, body and whether the connection can be used again; or why not."""
    reader = ReplyReader(Parts(data, chance).receive)
    try:
        reader.read_head()
        body = b"".join(reader.read_body(method))
    except httpx.RemoteProtocolError as error:
        return str(error)
    headers = dict(reader.headers)
    if "transfer-encoding" in headers:
        headers["transfer-encoding"] = headers["transfer-encoding"].lower()  # as h11 has it
    return reader.status, headers, body, reader.is_reusable


def read_theirs(data, method):
    """The same by h11; None where it finds an error."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    status, headers, body = 0, {}, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = {n.decode(): v.decode("latin-1") for n, v in event.headers}
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return None
    except h11.RemoteProtocolError:
        return None
    has_end = status in (204, 304) or headers.keys() & {"content-length", "transfer-encoding"}
    is_done = connection.their_state is h11.DONE and not connection.trailing_data[0]
    return status, headers, body, bool(has_end and is_done)


def make_reply(chance):
    """A reply as servers send it, or one with something wrong in it."""
    end = chance.choice((b"\r\n", b"\r\n", b"\n"))
    status = chance.choice((200, 200, 201, 204, 304, 404, 503))
    lines = [b"HTTP/1.%d %d%s" % (chance.choice((1, 1, 0)), status, chance.choice((b"", b" Fine")))]
    lines += [b"X-%d:%s%s " % (n, b" " * chance.randrange(3), b"v\xe9" * n) for n in range(3)]
    if chance.random() < 0.3:
        lines.append(b"Connection: " + chance.choice((b"close", b"keep-alive, Close", b"x")))
    body = chance.randbytes(chance.choice((0, 1, 10, 5_000)))
    kind = chance.choice(("length", "length", "chunked", "end"))
    if kind == "length":
        lines.append(b"Content-Length: %d" % len(body))
    elif kind == "chunked":
        lines.append(b"Transfer-Encoding: Chunked")
        cuts = sorted(chance.randrange(len(body) + 1) for _ in range(3))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        chunks = [b"%x;n=1\r\n%s\r\n" % (len(each), each) for each in pieces if each]
        body = b"".join(chunks) + b"0\r\n" + chance.choice((b"", b"A: b\r\n")) + b"\r\n"
    if status in (204, 304):
        body = b""
    data = end.join(lines) + end + end + body
    if chance.random() < 0.2:
        data = b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" + data
    if chance.random() < 0.2:
        place = chance.randrange(len(data))
        data = data[:place] + chance.choice((b"", b"\x00", b" ", b"9")) + data[place + 1 :]
    return data[: chance.randrange(len(data))] if chance.random() < 0.1 else data


def test_replies_are_read_as_h11_reads_them():
    chance = random.Random(11)
    good = 0
    for _ in range(4_000):
        data, method = make_reply(chance), chance.choice(("POST", "GET"))
        theirs, ours = read_theirs(data, method), read_ours(data, method, chance)
        if isinstance(ours, str):
            # Stricter than h11: folded headers, HTTP/9.1, and what stands around chunks.
            stricter = ("is no header", "it begins with", "chunked read", "size of a chunk")
            assert theirs is None or any(words in ours for words in stricter), data
        else:
            assert theirs is not None, data
            assert ours == theirs
            good += 1
    assert good > 2_500


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\x16\x03\x01",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na b: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\rc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: \x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 200,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 30_000,
    ],
)
def test_what_is_no_reply_is_refused(reply):
    assert isinstance(read_ours(reply, "GET"), str)


@pytest.mark.parametrize(
    ("reply", "method"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", "GET"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", "GET"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab", "GET"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK", "GET"),
        (b"HTTP/1.1 204 None\r\n\r\nmore", "DELETE"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", "HEAD"),
    ],
)
def test_after_which_replies_a_connection_is_done_with(reply, method):
    *_, reusable = read_ours(reply, method)
    assert not reusable


def test_a_head_request_and_one_without_a_body_leave_the_connection_usable():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n"
    assert read_ours(head, "HEAD")[2:] == (b"", True)
    assert read_ours(b"HTTP/1.1 304 Same\r\nContent-Length: 9\r\n\r\n", "GET")[2:] == (b"", True)


class Server:
    """Answers each connection with a function, on threads; counts connections."""

    def __init__(self, serve):
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self._open = []

    @property
    def address(self):
        return ServiceAddress(
            scheme="http", host="127.0.0.1", port=self.port, prefix="", store=None, timeout_s=5.0
        )

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                self._open.append(connection)
                thread = threading.Thread(target=self._answer, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _answer(self, connection):
        with contextlib.suppress(OSError), connection:
            self._serve(connection)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


def read_request(connection):
    """One request with the body that it announces, or None."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.partition(b":")[2]) for line in head.split(b"\r\n") if b"Length" in line), 0
    )
    while len(body) < length:
        part = connection.recv(65536)
        if not part:
            return None
        body += part
    return head, body


def answer_each(connection):
    while (request := read_request(connection)) is not None:
        reply = b"%d" % len(request[1])
        size = len(reply)
        connection.sendall(b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (PROTOCOL, size))
        connection.sendall(reply)


def post(body=b"", **more):
    return Call(method="POST", path="/v1/x", body=body, **more)


def test_calls_one_after_the_other_share_a_connection():
    with Server(answer_each) as server:
        client = ServiceClient(server.address, UserKey())
        for size in (0, 1, 65_536, 65_537, 3_000_000):
            assert client.ask(post(bytes(size)))[0] == b"%d" % size
        pieces = Call(method="PUT", path="/v1/x", body=lambda: [b"ab", b"c"], size_bytes=3)
        assert client.ask(pieces)[0] == b"3"
        client.close()
        assert server.connections == 1


def test_calls_at_once_have_connections_of_their_own_of_which_four_are_kept():
    meet = threading.Barrier(8)

    def answer(connection):
        while read_request(connection) is not None:
            meet.wait(10)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + PROTOCOL + b"Content-Length: 0\r\n\r\n")

    with Server(answer) as server:
        client = ServiceClient(server.address, UserKey())
        for _ in range(2):
            threads = [threading.Thread(target=client.ask, args=(post(),)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        client.close()
        assert server.connections == 8 + 4


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used():
    closed = threading.Semaphore(0)

    def answer_once(connection):
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + PROTOCOL + b"Content-Length: 0\r\n\r\n")
        connection.close()
        closed.release()

    with Server(answer_once) as server:
        client = ServiceClient(server.address, UserKey())
        for _ in range(3):
            client.ask(post(attempts=1))
            assert closed.acquire(timeout=10)
        client.close()
        assert server.connections == 3


def test_a_reply_that_is_not_read_to_its_end_takes_its_connection_along():
    def answer(connection):
        while read_request(connection) is not None:
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + PROTOCOL + b"Content-Length: 9\r\n\r\n123")

    with Server(answer) as server:
        client = ServiceClient(server.address, UserKey())
        for _ in range(3):
            assert client.use(post(), lambda reply: next(reply.iterate())) == b"123"
        client.close()
        assert server.connections == 3


def test_an_answer_before_the_whole_body_was_taken_is_read():
    def refuse(connection):
        connection.recv(1000)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\n" + PROTOCOL + b"Connection: close\r\nContent-Length: 2\r\n\r\nno"
        )
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with Server(refuse) as server:
        client = ServiceClient(server.address, UserKey())
        assert client.ask(post(bytes(8_000_000)))[0] == b"no"
        client.close()


@pytest.mark.parametrize("size", [2, 4])
def test_a_body_of_another_length_than_was_told_is_not_finished(size):
    with Server(answer_each) as server:
        client = ServiceClient(server.address, UserKey())
        call = Call(method="PUT", path="/v1/x", body=lambda: [b"ab", b"c"], size_bytes=size)
        with pytest.raises(Unreachable, match="bytes that were told"):
            client.ask(call)
        assert client.ask(post(b"abc"))[0] == b"3"
        client.close()


@pytest.mark.parametrize(
    ("target", "headers"),
    [("/a b", []), ("/é", []), ("/a\r\nX: y", []), ("/a", [(b"A", b"b\r\nC: d")])],
)
def test_a_head_has_no_lines_that_nobody_meant(target, headers):
    with Server(answer_each) as server:
        connections = DirectConnections(server.address)
        with (
            Deadline(5.0).bind(),
            pytest.raises((httpx.InvalidURL, httpx.LocalProtocolError)),
        ):
            connections.send(Outgoing("GET", target, headers, b"", 0))
        connections.close()
        assert server.connections == 0


def test_errors_have_the_names_that_httpx_has():
    connections = DirectConnections(
        ServiceAddress(
            scheme="http", host="127.0.0.1", port=1, prefix="", store=None, timeout_s=5.0
        )
    )
    with Deadline(5.0).bind(), pytest.raises(httpx.ConnectError) as raised:
        connections.send(Outgoing("GET", "/", [], b"", 0))
    assert isinstance(raised.value.__cause__, httpcore.ConnectError)
    connections.close()
