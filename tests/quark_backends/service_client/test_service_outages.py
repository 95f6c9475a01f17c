"""A server that is killed, replies that are cut, and processes that are forked meanwhile."""

import multiprocessing
import os
import threading
import time

import pytest
from held_ports import hold_port
from service_fixtures import serving, serving_process

import quark
from quark_backends.service.client.backend import ServiceBackend
from quark_backends.service.protocol import ROWS
from quark_backends.service.row_frames import End, Rows, encode_frame
from quark_core.backends.contract import BackendConfig
from quark_core.delivery.delivery_worker import RetryPolicy
from quark_core.errors import BackendUnavailable, SessionStoreError
from quark_core.records.query import Query
from quark_core.testing.fakes import BatchMaker


@pytest.mark.long
def test_a_server_that_is_killed_again_and_again_has_everything_once(
    request, tmp_path, monkeypatch
):
    for name, value in {"first_s": 0.05, "cap_s": 0.2}.items():
        monkeypatch.setitem(RetryPolicy.__init__.__kwdefaults__, name, value)
    place, port = hold_port()
    request.addfinalizer(place.close)
    with serving(tmp_path) as server:  # only for its databases
        key = server.make_key("default", "read", "ingest")
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("QUARK_USER_KEY", key)
    steps, kills = 0, 0
    with serving_process(tmp_path, port=port):
        session = quark.start_run(project="p", storage_dir=tmp_path / "runs")
    metrics = quark.MetricsLogger(session)
    for _ in range(4):
        with serving_process(tmp_path, port=port) as server:
            session.flush(timeout_s=60)
            until = time.monotonic() + 0.7
            while time.monotonic() < until:
                metrics.log("m", float(steps), step=steps)
                steps += 1
                time.sleep(0.0005)
            server.kill()
            kills += 1
    with serving_process(tmp_path, port=port):
        session.end_run()
        opened = quark.open_run(session.run_id, tmp_path / "elsewhere")
        values = quark.MetricsLogger(opened).columns()["value"].tolist()
        assert opened.status == "completed"
        opened.open_run.reader.close()
    assert (kills, values) == (4, [float(step) for step in range(steps)])
    (lane,) = session.report_delivery().lanes
    assert (lane.waiting, lane.dropped, lane.quarantined) == (0, 0, {})


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_connections_of_its_own(service, tmp_path):
    backend = ServiceBackend(BackendConfig(storage_dir=tmp_path, location=service.url))
    backend.write(BatchMaker("run0").start())
    ours = backend._client._made
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def work():
        name = backend.load_run("run0").run.id
        queue.put((name, backend._client._made is ours))

    stop = threading.Event()

    def read():
        while not stop.is_set():
            backend.load_run("run0")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(5):
            process = context.Process(target=work)
            process.start()
            process.join(250)
            assert process.exitcode == 0
            assert queue.get() == ("run0", False)
    finally:
        stop.set()
        reader.join()
    assert backend._client._made is ours
    assert backend.load_run("run0").run.id == "run0"
    backend.close()


def make_rows():
    batch = BatchMaker("run0").metrics(("m", 0, 1.0), ("m", 1, 2.0))
    return encode_frame(Rows("run0", "w", 0, 0, batch.body))


def serve_once(body, media=ROWS, **headers):
    """A reply that is sent to every request, as bytes."""
    lines = ["HTTP/1.1 200 OK", "Quark-Protocol: 1", f"Content-Type: {media}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def read_request(connection):
    """Read a whole request: what had come and was not read would take the reply back."""
    size = 0
    with connection.makefile("rb") as reader:
        while line := reader.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                size = int(value)
        reader.read(size)


@pytest.fixture
def replying(tmp_path, monkeypatch):
    """A backend whose service answers everything with the same bytes."""
    import socket

    monkeypatch.setenv("QUARK_USER_KEY", "qk_a_b")
    monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "30")
    listener = socket.create_server(("127.0.0.1", 0))
    reply = {}

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                read_request(connection)
                connection.sendall(reply["bytes"])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    backend = ServiceBackend(BackendConfig(storage_dir=tmp_path, location=url, read_only=True))

    def answer(data):
        reply["bytes"] = data
        return backend

    yield answer
    backend.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends too early"),
        (make_rows(), "ends too early"),
        (make_rows()[:-5], "ends too early"),
        (make_rows() + encode_frame(End(3)), "2 rows arrived instead of 3"),
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"\x00\x00\x00\x01", "ends too early"),
        (b"\x03\x00\x00\x00\x93\x02\x01", "damaged"),
    ],
)
def test_rows_that_are_cut_or_damaged_are_never_half_a_read(replying, body, message):
    backend = replying(serve_once(body))
    with pytest.raises(SessionStoreError, match=message):
        backend.read("run0", "metric", Query())
    with pytest.raises(SessionStoreError, match=message):
        list(backend.iterate("run0", "metric", Query(), rows=1))


def test_whole_rows_are_read(replying):
    backend = replying(serve_once(make_rows() + encode_frame(End(2))))
    assert backend.read("run0", "metric", Query())["value"].tolist() == [1.0, 2.0]
    parts = list(backend.iterate("run0", "metric", Query(), rows=1))
    assert [part.count for part in parts] == [1, 1]


def test_what_is_no_quark_service_is_said(replying):
    page = b"<html>Welcome to nginx!</html>"
    backend = replying(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(page)
        + page
    )
    with pytest.raises(
        SessionStoreError, match=r"not from a Quark server .* Check the host and the path"
    ):
        backend.list_runs()
    backend = replying(
        b"HTTP/1.1 404 No\r\nContent-Type: application/json\r\nQuark-Protocol: 2\r\n"
        b'Content-Length: 45\r\n\r\n{"error":{"code":"not_found","message":"no"}}'
    )
    with pytest.raises(SessionStoreError, match="protocol version 2, but this Quark uses 1"):
        backend.list_runs()


def test_a_key_that_a_page_repeats_is_not_shown(replying, monkeypatch):
    page = b"bad header Authorization: Bearer qk_a_b here"
    backend = replying(
        b"HTTP/1.1 400 No\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(page)
        + page
    )
    with pytest.raises(SessionStoreError, match=r"Authorization: \[redacted\]") as caught:
        backend.list_runs()
    assert "qk_a_b" not in str(caught.value)
    with pytest.raises(BackendUnavailable, match="reading only"):
        backend.write(BatchMaker("run0").start())
    assert "qk_a_b" not in repr(vars(backend)) + repr(backend._client.key)
