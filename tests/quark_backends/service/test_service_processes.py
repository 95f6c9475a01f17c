"""Servers as processes: several of them, told to end, killed."""

import hashlib
import os
import random
import signal
import socket
import threading
import time

import httpx
import pytest
from held_ports import hold_port
from service_fixtures import ServerProcess, call, encode_ingest, ingest, serving_process

from quark_backends.service.protocol import MSGPACK
from quark_core.testing.fakes import BatchMaker


def count_rows(client, run_id):
    reply = call(client, "read", run_id=run_id, kind="metric", query={})
    assert reply.status_code == 200, reply.text
    return [(record["writer_id"], record["step"]) for record in reply.json()]


@pytest.mark.long
def test_several_processes_serve_the_same_runs_and_count_together(tmp_path):
    with serving_process(tmp_path, "--workers", "3") as server:
        key = server.make_key()
        makers = [BatchMaker("run1", writer_id=f"w{i}") for i in range(6)]
        with server.client(key=key) as client:
            assert ingest(client, BatchMaker("run1", writer_id="first").start()).status_code == 200
        for maker in makers:  # a connection of its own for each, so that all processes have some
            with server.client(key=key) as client:
                for step in range(5):
                    assert ingest(client, maker.metrics(("loss", step, 1.0))).status_code == 200
        with server.client(key=key) as client:
            assert len(count_rows(client, "run1")) == 30
            text = client.get("/metrics").text
        assert "quark_ingested_rows_total 32" in text
        assert (
            'quark_requests_total{route="POST /v1/runs/{run_id}/batches",status="2xx"} 31' in text
        )
        assert len(server.find_pids()) >= 4


@pytest.mark.long
def test_a_process_that_dies_is_started_again(tmp_path):
    with serving_process(tmp_path, "--workers", "2") as server, server.client() as client:
        first = set(server.find_pids())
        workers = find_workers(server)
        os.kill(workers[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while workers[0] in find_workers(server) or len(find_workers(server)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert set(server.find_pids()) != first
        for _ in range(10):
            try:
                assert client.get("/v1/workspace").status_code == 200
            except httpx.TransportError:
                continue  # the connection was to the one that died


def find_workers(server):
    """Its children that serve: those that `spawn` started for that."""
    found = []
    for pid in server.find_pids()[1:]:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"spawn_main" in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_finishes_what_it_has_begun(tmp_path, workers, number):
    with serving_process(tmp_path, "--workers", workers) as server:
        key = server.make_key()
        maker = BatchMaker("run1")
        with server.client(key=key) as client:
            ingest(client, maker.start())
        body = encode_ingest(*(maker.metrics(("loss", step, 1.0)) for step in range(100)))
        head = (
            "POST /v1/runs/run1/batches HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {key}\r\n"
            f"Content-Type: {MSGPACK}\r\nContent-Length: {len(body)}\r\n"
            "Expect: 100-continue\r\n\r\n"
        ).encode()
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            connection.sendall(head)
            # It has begun: it asks for the body.
            assert connection.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body[: len(body) // 2])
            server.process.send_signal(number)
            wait_until_refused(server)
            connection.sendall(body[len(body) // 2 :])
            reply = b""
            while piece := connection.recv(65_536):
                reply += piece
        assert reply.startswith(b"HTTP/1.1 200"), reply
        assert b'{"batches":100}' in reply
        server.process.wait(120)
    with serving_process(tmp_path) as server, server.client(key=key) as client:
        assert len(count_rows(client, "run1")) == 100


def wait_until_refused(server):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", server.port), 5).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.05)
    raise AssertionError("the server accepts connections still")


@pytest.mark.long
def test_a_server_that_will_end_says_so_first(tmp_path):
    environ = {"QUARK_SERVE_DRAIN_S": "60"}
    with serving_process(tmp_path, environ=environ) as server, server.client() as client:
        assert client.get("/readyz").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while client.get("/readyz").status_code == 200:
            assert time.monotonic() < deadline
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/workspace").status_code == 200
        server.process.send_signal(signal.SIGTERM)  # the second ends it now
        client.close()
        server.process.wait(120)


def kill_after(server, acknowledged, count):
    """Kill a server in the middle of a request, once it has acknowledged so many."""
    deadline = time.monotonic() + 60
    while len(acknowledged) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.uniform(0.0, 0.02))
    server.kill()


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_what_a_killed_server_acknowledged_is_stored_once(tmp_path, workers):
    place, port = hold_port()
    server = ServerProcess(tmp_path, "--workers", workers, port=port)
    key = server.make_key()
    maker = BatchMaker("run1", writer_id="first")
    acknowledged: list[int] = []
    sent = resent = 0
    with server.client(key=key) as client:
        assert ingest(client, maker.start()).status_code == 200
    try:
        batches = (maker.metrics(("loss", step, 1.0)) for step in range(10_000))
        step = 0
        for _ in range(4):
            some = len(acknowledged) + 8
            killer = threading.Thread(target=kill_after, args=(server, acknowledged, some))
            killer.start()
            pending = None
            try:
                with server.client(key=key, timeout=60) as client:
                    while True:
                        pending = pending or next(batches)
                        sent += 1
                        reply = ingest(client, pending)
                        assert reply.status_code == 200, reply.text
                        acknowledged.append(step)
                        step += 1
                        pending = None
            except httpx.TransportError:
                resent += 1
            killer.join(120)
            server.process.stdout.close()
            server.log_file.close()
            server = ServerProcess(tmp_path, "--workers", workers, port=port)
            with server.client(key=key) as client:
                # As a lane would: the same batch again.
                assert ingest(client, pending).status_code == 200
                acknowledged.append(step)
                step += 1
        with server.client(key=key) as client:
            stored = [step for _, step in count_rows(client, "run1")]
    finally:
        server.stop()
        place.close()
    print(
        f"{sent} sent, {len(acknowledged)} acknowledged, {resent} sent again, {len(stored)} there"
    )
    assert resent == 4
    assert len(acknowledged) > 20
    assert stored == acknowledged


@pytest.mark.long
def test_a_killed_upload_leaves_nothing_that_is_half(tmp_path):
    data = os.urandom(2_000_000)
    sha256 = hashlib.sha256(data).hexdigest()
    server = ServerProcess(tmp_path)
    key = server.make_key()
    try:
        with server.client(key=key) as client:
            ingest(client, BatchMaker("run1").start())
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            connection.sendall(
                f"PUT /v1/runs/run1/payloads/{sha256} HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            )
            connection.sendall(data[:1_500_000])
            time.sleep(0.3)
            server.kill()
        server.process.stdout.close()
        server.log_file.close()
        server = ServerProcess(tmp_path)
        with server.client(key=key) as client:
            path = f"/v1/runs/run1/payloads/{sha256}"
            assert client.get(path).status_code == 404
            assert client.put(path, content=data).status_code == 201
            assert client.get(path).content == data
    finally:
        server.stop()
