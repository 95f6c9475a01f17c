"""What is too much, too deep, too slow or too odd is refused, in bounded memory."""

import gzip
import select
import socket
import struct
import time
import zlib

import httpx
import msgspec
import pytest
from service_fixtures import (
    call,
    error_of,
    ingest,
    serving,
    serving_process,
)

from quark_backends.service.protocol import MSGPACK, IngestRequest, WireBatch
from quark_core.records.codec import zstd
from quark_core.testing.fakes import BatchMaker

SMALL = {
    "body_bytes": 200_000,
    "decoded_bytes": 1_000_000,
    "batch_rows": 1000,
    "keys_per_run": 20,
}
PATH = "/v1/runs/run1/batches"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("limits"), limits=SMALL) as running:
        with running.client() as client:
            ingest(client, BatchMaker("run1").start())
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def post(client, body, encoding="identity", media=MSGPACK):
    return client.post(
        PATH, content=body, headers={"Content-Type": media, "Content-Encoding": encoding}
    )


def zstd_bomb(size, *, declared=True):
    if declared:
        return zstd.compress(bytes(size))
    stream = zstd.ZstdCompressor()
    return b"".join([*(stream.compress(bytes(2**20)) for _ in range(size >> 20)), stream.flush()])


def name_body(value):
    return value if isinstance(value, str) else "body"


def gzip_bomb(size):
    stream = zlib.compressobj(9, wbits=31)
    return b"".join([*(stream.compress(bytes(2**20)) for _ in range(size >> 20)), stream.flush()])


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (zstd_bomb(64 * 2**20), "zstd"),
        (zstd_bomb(64 * 2**20, declared=False), "zstd"),
        (gzip_bomb(64 * 2**20), "gzip"),
        (bytes(300_000), "identity"),
        ((bytes(50_000) for _ in range(6)), "identity"),  # without Content-Length
    ],
    ids=["zstd", "zstd without a size", "gzip", "large", "large, not declared"],
)
def test_what_is_too_large_is_refused(client, body, encoding):
    reply = post(client, body, encoding)
    assert (reply.status_code, error_of(reply)["code"]) == (413, "too_large")
    assert "_bytes of this server" in error_of(reply)["message"]


def test_a_frame_that_lies_about_its_size_is_refused(client):
    frame = bytearray(zstd_bomb(2 * 2**20))
    size = struct.pack("<I", 2 * 2**20)
    at = bytes(frame).index(size)
    frame[at : at + 4] = struct.pack("<I", 5000)
    reply = post(client, bytes(frame), "zstd")
    assert reply.status_code in (400, 413)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"", "zstd"),
        (b"nonsense", "zstd"),
        (b"", "gzip"),
        (b"nonsense", "gzip"),
        (zstd.compress(b"x" * 1000)[:-3], "zstd"),
        (zstd.compress(b"a") + zstd.compress(bytes(2**20)), "zstd"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-3], "gzip"),
        (gzip.compress(b"a", mtime=0) + gzip.compress(bytes(2**20), mtime=0), "gzip"),
        (b"", "identity"),
        (b"\xc1", "identity"),
        (b"\x81" * 100_000, "identity"),
        (b"\x91" * 100_000, "identity"),
        (b"\xdd\xff\xff\xff\xff", "identity"),
        (b"\xdf\xff\xff\xff\xff", "identity"),
        (b"\x81\xa7batches\xdd\xff\xff\xff\xff", "identity"),
        (b"\x81\xa7batches\x91\x97\xa1w\0\0\0\xa6metric\1\xc6\xff\xff\xff\xff", "identity"),
    ],
    ids=name_body,
)
def test_damaged_and_nested_bodies_are_malformed(client, body, encoding):
    reply = post(client, body, encoding)
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["code"] in ("malformed", "invalid_argument")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"batches":' * 10_000,
        b'{"batches":[{"writer_id":"w","number":0,"kind":"event","records":[{"payload":'
        + b'{"a":' * 20_000,
        b'{"batches":[{"writer_id":"w","number":0,"kind":"event","records":[{"event_type":"a",'
        b'"severity":"info","payload":' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}]}]}",
        b'{"batches": NaN}',
        b'{"batches": []}',
        b"\xff\xfe",
        b"",
    ],
    ids=range(8),
)
def test_json_bombs(client, body):
    reply = post(client, body, media="application/json")
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["code"] in ("malformed", "invalid_argument")


def wire(body, count=1, kind="metric", number=1):
    return msgspec.msgpack.encode(
        IngestRequest([WireBatch("odd", 0, 0, number, kind, count, body)])
    )


def body_of(count, columns, kind="metric", version=1):
    return b"\x00" + msgspec.msgpack.encode([version, kind, count, columns])


METRIC = {
    "sequence": ["c", 0],
    "time_us": ["c", 1_767_225_600_000_000],
    "metric_key": ["c", "loss"],
    "namespace": ["c", None],
    "metric_name": ["c", "loss"],
    "value": ["c", 1.0],
    "step": ["c", 0],
}


def metric_body(count=1, **changed):
    columns = {**METRIC, **changed}
    return body_of(count, [[name, *column] for name, column in columns.items()])


def test_a_plain_body_of_that_shape_is_taken(client):
    assert post(client, wire(metric_body(), number=0)).status_code == 200


BAD_BODIES = {
    "nothing": b"",
    "marker": b"\x07abc",
    "zstd bomb": b"\x01" + zstd_bomb(64 * 2**20),
    "zstd of two frames": b"\x01" + zstd.compress(b"a") + zstd_bomb(64 * 2**20),
    "zstd without a size": b"\x01" + zstd_bomb(2**20, declared=False),
    "count of 2**40": body_of(2**40, [["value", "c", 1.0]]),
    "other count": metric_body(count=2),
    "other kind": body_of(1, [], kind="event"),
    "newer": body_of(1, [], version=9),
    "kind is none": body_of(1, [], kind="nonsense"),
    "nested head": metric_body(value=["c", [[[[]]]]]),
    "deep head": b"\x00\x94\x01\xa6metric\x01\x91\x95\xa5value\xa1c" + b"\x91" * 90_000,
    "text for a number": metric_body(value=["c", "high"]),
    "number for a text": metric_body(metric_key=["c", 3]),
    "none for a key": metric_body(metric_key=["c", None]),
    "bool for a number": metric_body(step=["c", True]),
    "short floats": metric_body(value=["f", None, b"", b"\0" * 7]),
    "long floats": metric_body(value=["f", None, b"", b"\0" * 16]),
    "short integers": metric_body(step=["i", [0, 4], b"", b"\0"]),
    "width of 3": metric_body(step=["i", [0, 3], b"", b"\0\0\0"]),
    "head of integers": metric_body(step=["i", 5, b"", b"\0"]),
    "first of 2**64": metric_body(step=["i", [2**64 - 1, 1], b"", b"\0"]),
    "index beyond": metric_body(metric_key=["t", [["a"], 1], b"", b"\1"]),
    "index below": metric_body(metric_key=["t", [["a"], 1], b"", b"\xff"]),
    "texts of numbers": metric_body(metric_key=["t", [[1], 1], b"", b"\0"]),
    "texts of nothing": metric_body(metric_key=["t", [[], 1], b"", b"\0"]),
    "nulls that are long": metric_body(step=["i", [0, 1], b"\0\0", b"\0"]),
    "nulls of twos": metric_body(step=["i", [0, 1], b"\2", b"\0"]),
    "nulls of a key": metric_body(value=["f", None, b"\1", b"\0" * 8]),
    "encoding": metric_body(value=["z", None]),
    "json of bytes": metric_body(metadata=["j", [b"{"]]),
    "json too short": metric_body(metadata=["j", []]),
    "json is deep": metric_body(metadata=["j", [b"[" * 50_000]]),
    "json of texts": metric_body(metadata=["j", ["{}"]]),
    "time of long ago": metric_body(time_us=["c", -(2**62)]),
    "time far ahead": metric_body(time_us=["i", [2**62, 1], b"", b"\0"]),
    "long key": metric_body(metric_key=["c", "k" * 600]),
    "key with a NUL": metric_body(metric_key=["c", "a\0b"]),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_would_harm_the_store_or_its_readers(client, name):
    kind = "nonsense" if name == "kind is none" else "metric"
    reply = post(client, wire(BAD_BODIES[name], kind="metric" if kind else kind))
    assert reply.status_code in (400, 413, 422), reply.text
    assert error_of(reply)["code"] in ("rejected", "too_large", "malformed", "invalid_argument")
    found = call(client, "read", run_id="run1", kind="metric", query={})
    assert found.status_code == 200


START = BatchMaker("odd")
DATA = {
    "project": {"id": "p", "name": "p", "root_path": ""},
    "run": {
        "name": None,
        "notes": None,
        "parent_run_id": None,
        "lineage_root_run_id": "odd",
        "run_path": "",
        "git_commit": None,
        "strict_mode": False,
        "tags": [],
    },
    "process": {"host": "h", "pid": 1, "started": ""},
}


@pytest.mark.parametrize(
    ("action", "data"),
    [
        ("start", {}),
        ("start", {**DATA, "process": {}}),
        ("start", {**DATA, "process": {"host": 1, "pid": "x", "started": None}}),
        ("start", {**DATA, "project": {"id": {}, "name": [], "root_path": 1}}),
        ("start", {**DATA, "run": {**DATA["run"], "tags": "abc"}}),
        ("start", {**DATA, "run": {**DATA["run"], "tags": [1]}}),
        ("start", {**DATA, "from_step": -1}),
        ("start", {**DATA, "from_step": "x"}),
        ("config", {}),
        ("config", {"values": [], "notes": []}),
        ("config", {"values": {}, "notes": 5}),
        ("tag", {}),
        ("tag", {"tag": 5}),
        ("tag", {"tag": ""}),
        ("status", {"status": "running"}),
        ("status", {"status": "nonsense"}),
        ("status", {}),
        ("explode", {}),
    ],
    ids=name_body,
)
def test_lifecycle_records_that_no_store_can_apply(client, action, data):
    reply = ingest(client, BatchMaker("run1", writer_id="odd").lifecycle((action, data)))
    assert (reply.status_code, error_of(reply)["code"]) == (422, "rejected")
    assert call(client, "list_runs").status_code == 200


def test_more_rows_than_a_batch_may_have(client):
    maker = BatchMaker("run1", writer_id="many")
    reply = ingest(client, maker.metrics(*(("loss", step, 0.0) for step in range(1001))))
    assert (reply.status_code, error_of(reply)["code"]) == (413, "too_large")
    assert "batch_rows" in error_of(reply)["message"]


def test_bodies_that_are_too_large_together(client):
    big = b"\x01" + zstd.compress(bytes(600_000))
    batches = [WireBatch("w", 0, 0, number, "metric", 1, big) for number in range(2)]
    reply = post(client, msgspec.msgpack.encode(IngestRequest(batches)))
    assert (reply.status_code, error_of(reply)["code"]) == (413, "too_large")
    assert error_of(reply)["field"] == "batches[1].body"


def test_more_batches_than_a_request_may_have(client):
    maker = BatchMaker("run1", writer_id="crowd")
    batches = [WireBatch.of(maker.metrics(("loss", 0, 0.0))) for _ in range(257)]
    reply = post(client, msgspec.msgpack.encode(IngestRequest(batches)))
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_argument")


def test_more_metrics_than_a_run_may_have(client):
    maker = BatchMaker("wide")
    ingest(client, maker.start())
    assert ingest(client, maker.metrics(*((f"m{i}", 0, 0.0) for i in range(20)))).status_code == 200
    again = maker.metrics(*((f"m{i}", 1, 0.0) for i in range(20)))
    assert ingest(client, again).status_code == 200
    reply = ingest(client, maker.metrics(("m20", 0, 0.0)))
    assert (reply.status_code, error_of(reply)["code"]) == (422, "rejected")
    assert "keys_per_run" in error_of(reply)["message"]
    assert ingest(client, maker.metrics(("m19", 2, 0.0))).status_code == 200


def test_metrics_that_a_run_has_are_counted_by_a_server_that_starts_anew(tmp_path):
    maker = BatchMaker("wide")
    with serving(tmp_path, limits=SMALL) as server, server.client() as client:
        ingest(client, maker.start(), maker.metrics(*((f"m{i}", 0, 0.0) for i in range(20))))
    with serving(tmp_path, limits=SMALL) as server, server.client() as client:
        assert ingest(client, maker.metrics(("m3", 2, 0.0))).status_code == 200
        assert ingest(client, maker.metrics(("another", 2, 0.0))).status_code == 422


@pytest.mark.parametrize(
    "where",
    [
        "(" * 4000 + "loss < 1" + ")" * 4000,
        "not " * 2000 + "loss < 1",
        " and ".join(["loss < 1"] * 900),
        "loss in (" + ",".join(["1"] * 4000) + ")",
        "'" * 9000,
        "\x00",
        "loss < " + "9" * 9000,
    ],
    ids=range(7),
)
def test_expressions_that_are_too_much(client, where):
    reply = call(client, "search", search={"where": where})
    assert reply.status_code in (200, 400), reply.text
    long = call(client, "search", search={"where": "x" * 10_001})
    assert (long.status_code, error_of(long)["field"]) == (400, "search.where")


def test_json_replies_are_bounded(tmp_path):
    with serving(tmp_path, limits={"json_rows": 10}) as server, server.client() as client:
        maker = BatchMaker("run1")
        ingest(client, maker.start(), maker.metrics(*(("loss", i, 0.0) for i in range(50))))
        reply = call(client, "read", run_id="run1", kind="metric", query={}).json()
        assert [record["step"] for record in reply] == list(range(40, 50))
        reply = call(client, "read", run_id="run1", kind="metric", query={"limit": 3}).json()
        assert [record["step"] for record in reply] == [47, 48, 49]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "unsupported"),
        ({"Content-Type": ""}, 415, "unsupported"),
        ({"Content-Type": MSGPACK, "Content-Encoding": "br"}, 415, "unsupported"),
        ({"Content-Type": MSGPACK, "Content-Encoding": "gzip, gzip"}, 415, "unsupported"),
    ],
)
def test_media_that_are_not_taken(client, headers, status, code):
    reply = client.post(PATH, content=b"{}", headers=headers)
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)


def talk(server, data, *, timeout_s=20.0, pieces=()):
    """What a server says to some bytes, until it hangs up or is silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout_s) as connection:
        connection.sendall(data)
        for piece, pause_s in pieces:
            # What is sent after the server has hung up takes back what it said.
            if select.select([connection], [], [], pause_s)[0]:
                break
            try:
                connection.sendall(piece)
            except OSError:
                break
        found = b""
        try:
            while piece := connection.recv(65_536):
                found += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def head(server, key, *lines, method="POST", path=PATH):
    host = [] if any(line.lower().startswith("host") for line in lines) else ["Host: localhost"]
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", *host, f"Authorization: Bearer {key}", *lines, "", ""]
    ).encode("latin-1")


@pytest.fixture(scope="module")
def hasty_server(tmp_path_factory):
    """Waits a second for a body, which any may take on a busy machine."""
    folder = tmp_path_factory.mktemp("hasty")
    with serving(folder, limits={**SMALL, "body_timeout_s": 1.0}) as running:
        with running.client() as client:
            ingest(client, BatchMaker("run1").start())
        yield running


@pytest.mark.long
def test_a_slow_body_is_given_up(hasty_server):
    server = hasty_server
    key = server.make_key()
    request = head(server, key, f"Content-Type: {MSGPACK}", "Content-Length: 1000")
    found = talk(server, request + b"abc", pieces=[(b"d", 0.2)] * 8)
    assert found.startswith(b"HTTP/1.1 408")
    assert b'"code":"timeout"' in found
    request = head(server, key, method="PUT", path=f"/v1/runs/run1/payloads/{'0' * 64}")
    request = request[:-2] + b"Content-Length: 1000\r\n\r\n"
    assert talk(server, request).startswith(b"HTTP/1.1 408")


ODD = {
    "two lengths": (["Content-Length: 2", "Content-Length: 3"], b"{}x"),
    "length and chunked": (
        ["Content-Length: 2", "Transfer-Encoding: chunked"],
        b"2\r\n{}\r\n0\r\n\r\n",
    ),
    "negative length": (["Content-Length: -1"], b""),
    "signed length": (["Content-Length: +2"], b"{}"),
    "huge length": (["Content-Length: " + "9" * 40], b"{}"),
    "length of words": (["Content-Length: two"], b"{}"),
    "chunked twice": (["Transfer-Encoding: chunked, identity"], b"2\r\n{}\r\n0\r\n\r\n"),
    "chunk size": (["Transfer-Encoding: chunked"], b"zz\r\n{}\r\n0\r\n\r\n"),
    "huge chunk": (["Transfer-Encoding: chunked"], b"FFFFFFFFFFFFFFFFFF\r\n{}\r\n"),
    "bare header": (["Content-Length: 2", "nonsense"], b"{}"),
    "space before colon": (["Content-Length : 2"], b"{}"),
    "folded header": (["X-A: b", "  c: d"], b""),
    "two hosts": (["Host: a", "Host: b", "Content-Length: 0"], b""),
    "NUL in a header": (["X-A: a\0b", "Content-Length: 0"], b""),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_framing_is_refused_and_smuggles_nothing(server, client, name):
    lines, body = ODD[name]
    key = server.make_key("default", "read", "ingest")
    smuggled = b"GET /v1/keys HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = talk(
        server,
        head(server, key, "Content-Type: application/json", *lines) + body + smuggled,
        timeout_s=2.0,
    )
    assert found == b"" or found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), found
    if found.count(b"HTTP/1.1 ") > 1:
        # What followed was read as a request of its own, which has no key.
        assert found.count(b"HTTP/1.1 401") == 1, found
    assert client.get("/healthz").status_code == 200


@pytest.mark.sampled
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"\r\n" * 1000,
        b"G" * 200_000,
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"v" * 500) for i in range(500)),
        b"GET /healthz HTTP/1.1\r\nX: " + b"v" * 300_000,
    ],
    ids=range(8),
)
def test_what_is_no_request_is_hung_up_on(server, client, data):
    found = talk(server, data, timeout_s=5.0)
    assert found == b"" or found.split(b"\r\n")[0].split()[1] in (b"400", b"404"), found[:200]
    if found:
        assert b'{"error":' in found
        assert b"quark-protocol: 1" in found
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/runs/a%00b", "/" + "a" * 5000, "/v1/runs/" + "%41" * 2000, "/v1//runs", "//x/y"]
)
def test_paths_that_are_none(client, path):
    reply = client.get(path)
    assert reply.status_code in (400, 404)
    assert error_of(reply)["code"] in ("malformed", "not_found", "invalid_argument")


@pytest.mark.parametrize("name", ["Authorization", "Content-Type", "Idempotency-Key", "Range"])
def test_a_header_that_is_there_twice_is_refused(client, name):
    given = client.headers.get(name, "application/json")
    headers = [*client.headers.items(), (name, given), (name, "other")]
    refused = client.request("GET", "/v1/workspace", headers=headers)
    assert refused.status_code == 400
    assert error_of(refused)["message"] == f"the request has several {name} headers"


def test_more_requests_than_the_server_works_on_at_once(tmp_path):
    limits = {"concurrent_requests": 2, "body_timeout_s": 20.0}
    with serving(tmp_path, limits=limits) as server:
        key = server.make_key()
        request = head(server, key, f"Content-Type: {MSGPACK}", "Content-Length: 1000")
        held = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(2)]
        try:
            for connection in held:
                connection.sendall(request)
            with server.client(key=key) as client:
                deadline = time.monotonic() + 20
                while (reply := client.get("/v1/workspace")).status_code != 503:
                    assert time.monotonic() < deadline
                assert error_of(reply)["code"] == "unavailable"
                assert "retry-after" in reply.headers
                assert client.get("/healthz").status_code == 200
        finally:
            for connection in held:
                connection.close()


def read_rss_mb(pid):
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(("VmHWM",)):
                return int(line.split()[1]) / 1024
    raise AssertionError


@pytest.mark.long
def test_bombs_leave_the_memory_of_the_server_as_it_was(tmp_path):
    bombs = [
        (zstd_bomb(512 * 2**20), "zstd"),
        (gzip_bomb(512 * 2**20), "gzip"),
        (wire(b"\x01" + zstd_bomb(512 * 2**20)), "identity"),
    ]
    assert len(bombs[0][0]) < 60_000
    with serving_process(tmp_path) as server, server.client() as client:
        ingest(client, BatchMaker("run1").start())
        call(client, "read", run_id="run1", kind="metric", query={})
        before = read_rss_mb(server.pid)
        for _ in range(3):
            for body, encoding in bombs:
                reply = post(client, body, encoding)
                assert (reply.status_code, error_of(reply)["code"]) == (413, "too_large")
        undeclared = zstd_bomb(512 * 2**20, declared=False)
        assert post(client, undeclared, "zstd").status_code == 413
        after = read_rss_mb(server.pid)
    print(f"peak memory {before:.0f} MB before, {after:.0f} MB after bombs of 512 MB")
    assert after - before < 100


HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.long
def test_the_head_of_a_request_may_not_take_for_ever(server):
    started = time.monotonic()
    found = talk(
        server,
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
        timeout_s=60.0,
        pieces=[(b"X: y\r\n", 1)] * 3,
    )
    assert found == b""
    assert time.monotonic() - started < 40


@pytest.mark.long
def test_errors_before_the_body_reach_clients_that_send_on(server):
    body = b"x" * 30_000_000
    reply = httpx.post(server.url + PATH, content=body, timeout=60)
    assert reply.status_code == 401
    reply = httpx.post(
        server.url + "/nowhere", content=(body[:65_536] for _ in range(100)), timeout=60
    )
    assert reply.status_code == 404
