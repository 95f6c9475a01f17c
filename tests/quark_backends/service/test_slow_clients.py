"""Clients that send or read slowly take nothing from others: real connections, held open."""

import contextlib
import json
import random
import socket
import threading

import pytest
from service_fixtures import call, encode_ingest, error_of, ingest, serving

from quark_backends.service.protocol import MSGPACK, ROWS
from quark_core.testing.fakes import BatchMaker

PATIENCE = {"body_timeout_s": 120.0}


class SlowClient:
    """A request whose body does not come to its end."""

    def __init__(self, server, key, *, size, sent=1000, method="POST", path=None):
        self.size, self.sent = size, sent
        self.connection = socket.create_connection(("127.0.0.1", server.port), 60)
        head = [
            f"{method} {path or '/v1/runs/slow/batches'} HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            f"Content-Type: {MSGPACK}",
            f"Content-Length: {size}",
        ]
        if key is not None:
            head.append(f"Authorization: Bearer {key}")
        self.connection.sendall("\r\n".join([*head, "", ""]).encode() + bytes(sent))

    @property
    def is_answered(self):
        """Whether the server has said something, or hung up."""
        self.connection.setblocking(False)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            self.connection.settimeout(60)

    def read_status(self):
        """The status of the reply, once it comes."""
        return int(self.connection.makefile("rb").readline().split()[1])

    def close(self):
        self.connection.close()


ROWS_OF_RUN = {"run_id": "run1", "kind": "metric", "query": {}}


class SlowReader:
    """Asks for rows, and reads none of them."""

    def __init__(self, server, key):
        body = json.dumps(ROWS_OF_RUN)
        self.connection = socket.socket()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.connection.connect(("127.0.0.1", server.port))
        head = [
            "POST /v1/call/read HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            f"Authorization: Bearer {key}",
            "Content-Type: application/json",
            f"Accept: {ROWS}",
            f"Content-Length: {len(body)}",
        ]
        self.connection.sendall("\r\n".join([*head, "", body]).encode())

    def close(self):
        self.connection.close()


@contextlib.contextmanager
def slow_clients(server, key, count, **arguments):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(SlowClient(server, key, **arguments)))
            for _ in range(count)
        ]


def wait_until(is_so):
    """Wait for something that happens in the server's thread."""
    pause = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it never was")


def make_points(count, start=0):
    """Points of a metric that nothing makes smaller."""
    chance = random.Random(start)
    return [("loss", step, chance.random()) for step in range(start, start + count)]


def count_arriving(server):
    return sum(server.service.bodies._by_key.values())


@pytest.mark.long
def test_slow_bodies_of_one_key_do_not_delay_a_write_of_another_workspace(tmp_path):
    with (
        serving(tmp_path, limits=PATIENCE) as server,
        server.client("calm") as client,
        # Together they say that they are larger than what bodies may take.
        slow_clients(server, server.make_key("busy"), 300, size=2 * 2**20) as clients,
    ):
        wait_until(lambda: count_arriving(server) == 256)
        maker = BatchMaker("run1")
        large = maker.metrics(*make_points(30_000))
        assert len(encode_ingest(large)) > 128 * 1024
        assert ingest(client, maker.start()).status_code == 200
        assert ingest(client, large).status_code == 200
        # Those that are too many may be told a little later.
        wait_until(lambda: sum(each.is_answered for each in clients) == 44)
        answered = [each for each in clients if each.is_answered]
        assert {each.read_status() for each in answered} == {429}
        assert count_arriving(server) == 256, "they were to be there all the time"


@pytest.mark.long
def test_bodies_of_which_much_has_come_hold_memory_of_their_own_workspace_only(tmp_path):
    limits = {**PATIENCE, "memory_bytes": 4 * 2**20}
    size, sent = 500_000, 400_000
    with (
        serving(tmp_path, limits=limits) as server,
        server.client("calm") as client,
        slow_clients(server, server.make_key("busy"), 6, size=size, sent=sent),
    ):
        arriving = server.service.bodies.arriving
        # Two of them have the workspace's part of the memory, and the others wait for them.
        wait_until(lambda: len(arriving._waiting) == 4)
        assert arriving._held == {"busy": 2 * size}
        maker = BatchMaker("run1")
        large = maker.metrics(*make_points(30_000))
        assert ingest(client, maker.start(), large).status_code == 200
        assert arriving._held == {"busy": 2 * size}


@pytest.mark.long
def test_one_key_has_so_many_slow_bodies_and_another_key_is_let_in(tmp_path):
    limits = {**PATIENCE, "bodies_per_key": 2}
    with serving(tmp_path, limits=limits) as server:
        key = server.make_key("team")
        with (
            slow_clients(server, key, 1, size=100_000),
            slow_clients(
                server,
                key,
                1,
                size=100_000,
                method="PUT",
                path=f"/v1/runs/run1/payloads/{'0' * 64}",
            ),
            server.client(key=key) as client,
            server.client("team") as colleague,
        ):
            maker = BatchMaker("run1")
            assert ingest(colleague, maker.start()).status_code == 200
            with slow_clients(server, key, 1, size=100_000):
                wait_until(lambda: count_arriving(server) == 2)
                reply = ingest(client, maker.metrics(("loss", 0, 1.0)))
                assert (reply.status_code, error_of(reply)["code"]) == (429, "rate_limited")
                assert "bodies_per_key" in error_of(reply)["message"]
                assert "retry-after" in reply.headers
                assert client.get("/v1/workspace").status_code == 200
                assert ingest(colleague, maker.metrics(("loss", 0, 1.0))).status_code == 200
        wait_until(lambda: count_arriving(server) == 0)


@pytest.mark.long
def test_one_workspace_leaves_places_for_others_however_many_keys_it_has(tmp_path):
    limits = {**PATIENCE, "concurrent_requests": 16}
    with (
        serving(tmp_path, limits=limits) as server,
        server.client("calm") as client,
        server.client("busy") as busy,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(10):
            key = server.make_key("busy")
            stack.enter_context(slow_clients(server, key, 2, size=100_000))
        service = server.service
        wait_until(lambda: service.places._taken["busy"] == service.working == 12)
        assert ingest(client, BatchMaker("run1").start()).status_code == 200
        reply = call(busy, "list_runs")
        assert (reply.status_code, error_of(reply)["code"]) == (429, "rate_limited")


def test_whoever_has_no_key_takes_no_place(tmp_path):
    limits = {**PATIENCE, "concurrent_requests": 4}
    with (
        serving(tmp_path, limits=limits) as server,
        server.client() as client,
        slow_clients(server, None, 20, size=100_000) as clients,
    ):
        # They are told, and may send on for a while so that they hear of it.
        assert {each.read_status() for each in clients} <= {401, 503}
        assert ingest(client, BatchMaker("run1").start()).status_code == 200


@pytest.mark.long
def test_slow_readers_of_one_workspace_leave_others_theirs(tmp_path):
    with (
        serving(tmp_path) as server,
        server.client("busy") as busy,
        server.client("calm") as calm,
        contextlib.ExitStack() as stack,
    ):
        maker = BatchMaker("run1")
        assert ingest(calm, maker.start(), maker.metrics(("loss", 0, 1.0))).status_code == 200
        maker = BatchMaker("run1")
        assert ingest(busy, maker.start()).status_code == 200
        for part in range(12):
            points = make_points(50_000, start=part * 50_000)
            assert ingest(busy, maker.metrics(*points)).status_code == 200
        key = server.make_key("busy")
        for _ in range(20):
            reader = SlowReader(server, key)
            stack.enter_context(contextlib.closing(reader))
        streams = server.service.streams
        wait_until(lambda: streams._held["busy"] == 8 and len(streams._waiting) == 12)
        assert call(calm, "read", accept=ROWS, **ROWS_OF_RUN).status_code == 200
        assert (streams._held["busy"], len(streams._waiting)) == (8, 12)
        stack.close()
        wait_until(lambda: not streams._held and not streams._waiting)


@pytest.mark.parametrize("amount", [1, 600])
def test_whoever_waits_for_memory_goes_before_those_who_came_later(amount):
    import asyncio

    from quark_backends.service.server.requests import FairBudget

    async def run():
        budget, order = FairBudget(1000, 600, "busy"), []
        release = asyncio.Event()

        async def take(owner, wanted):
            async with budget.hold(owner, wanted):
                order.append((owner, wanted))
                await release.wait()

        tasks = [asyncio.create_task(take("a", 600))]
        tasks += [asyncio.create_task(take("a", 2)), asyncio.create_task(take("b", 500))]
        tasks += [asyncio.create_task(take("c", amount)), asyncio.create_task(take("a", 1))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # b waits for what is left, so that c waits behind it; a waits for itself.
        assert order == [("a", 600)]
        tasks[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order[1:] == ([("c", 1)] if amount == 1 else [])
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(order) == 4
        async with budget.hold("d", 5000), budget.hold("e", 400):
            assert budget._free == 0

    asyncio.run(run())


def read_all(connection):
    """What comes until the server hangs up."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(2**16):
            pieces.append(piece)
    return b"".join(pieces)


def send_many(server, data):
    """Send, while somebody reads, so that neither waits for the other."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:

        def send():
            with contextlib.suppress(OSError):
                connection.sendall(data)

        sender = threading.Thread(target=send)
        sender.start()
        found = read_all(connection)
        sender.join()
    return found


def test_requests_that_come_at_once_are_all_answered(tmp_path):
    with serving(tmp_path, limits={"requests_per_s": 1e6}) as server:
        key = server.make_key()
        head = f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {key}\r\n"
        one = f"GET /v1/workspace HTTP/1.1\r\n{head}\r\n".encode()
        last = f"GET /v1/workspace HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
        # More than a head may have, in one piece, whose end is half a head.
        found = send_many(server, one * 600 + last)
        assert found.count(b"HTTP/1.1 200") == 601
        assert b"HTTP/1.1 400" not in found


def test_a_long_head_behind_a_request_ends_its_connection_and_no_more(tmp_path, caplog):
    with serving(tmp_path, limits={"requests_per_s": 1e6}) as server:
        key = server.make_key()
        head = f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {key}\r\n"
        one = f"GET /v1/workspace HTTP/1.1\r\n{head}\r\n".encode()
        for _ in range(5):
            send_many(server, one * 20 + f"GET / HTTP/1.1\r\nX: {'y' * 2**20}".encode())
        with server.client(key=key) as client:
            assert call(client, "list_runs").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]
