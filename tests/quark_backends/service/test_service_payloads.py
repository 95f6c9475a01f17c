"""Payloads both ways: streamed, checked, whole or not at all."""

import hashlib
import random

import pytest
from service_fixtures import error_of, ingest, serving

from quark_core.testing.fakes import BatchMaker

DATA = random.Random(0).randbytes(3 * 2**20 + 17)
SHA256 = hashlib.sha256(DATA).hexdigest()
PATH = f"/v1/runs/run1/payloads/{SHA256}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("payloads")
    with serving(folder, limits={"artifact_bytes": 8 * 2**20}) as running:
        running.folder = folder / "payloads"
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        ingest(client, BatchMaker("run1").start())
        yield client


def test_a_payload_goes_in_and_comes_back(server, client):
    ingest(client, BatchMaker("run2").start())
    path = PATH.replace("run1", "run2")
    pieces = (DATA[start : start + 100_000] for start in range(0, len(DATA), 100_000))
    first = client.put(path, content=pieces)  # without Content-Length
    assert (first.status_code, first.json()["size_bytes"]) == (201, len(DATA))
    again = client.put(path, content=DATA)
    assert (again.status_code, again.json()) == (200, first.json())
    found = client.get(path)
    assert found.content == DATA
    assert found.headers["etag"] == f'"{SHA256}"'
    assert found.headers["x-content-type-options"] == "nosniff"
    head = client.head(path)
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(DATA)))
    stored = server.folder / "default" / "run2" / SHA256[:2] / SHA256
    assert stored.read_bytes() == DATA
    assert list((server.folder / ".partial").iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=100-", 100, len(DATA)),
        ("bytes=-5", len(DATA) - 5, len(DATA)),
        (f"bytes=5-{10**15}", 5, len(DATA)),
        (f"bytes=-{10**15}", 0, len(DATA)),
        (f"bytes={len(DATA) - 1}-", len(DATA) - 1, len(DATA)),
    ],
)
def test_one_range(client, asked, start, end):
    client.put(PATH, content=DATA)
    reply = client.get(PATH, headers={"Range": asked})
    assert reply.status_code == 206
    assert reply.content == DATA[start:end]
    assert reply.headers["content-range"] == f"bytes {start}-{end - 1}/{len(DATA)}"


@pytest.mark.parametrize("asked", ["bytes=0-1,5-6", "items=0-1", "bytes=a-b", "bytes=9-5", "x"])
def test_ranges_that_are_not_served_give_the_whole(client, asked):
    client.put(PATH, content=DATA)
    reply = client.get(PATH, headers={"Range": asked})
    assert (reply.status_code, reply.content) == (200, DATA)


@pytest.mark.parametrize("asked", [f"bytes={len(DATA)}-", f"bytes={10**18}-", "bytes=-0"])
def test_a_range_that_is_not_there(client, asked):
    client.put(PATH, content=DATA)
    reply = client.get(PATH, headers={"Range": asked})
    assert (reply.status_code, error_of(reply)["code"]) == (416, "range")


def test_a_range_of_another_payload_gives_the_whole(client):
    client.put(PATH, content=DATA)
    headers = {"Range": "bytes=0-9", "If-Range": '"other"'}
    assert client.get(PATH, headers=headers).status_code == 200
    headers["If-Range"] = f'"{SHA256}"'
    assert client.get(PATH, headers=headers).status_code == 206


def test_an_empty_payload(client):
    path = f"/v1/runs/run1/payloads/{hashlib.sha256(b'').hexdigest()}"
    assert client.put(path, content=b"").status_code == 201
    assert client.get(path).content == b""


def test_another_content_is_refused_and_leaves_nothing(server, client):
    sha256 = hashlib.sha256(b"wanted").hexdigest()
    path = f"/v1/runs/run1/payloads/{sha256}"
    reply = client.put(path, content=b"another")
    assert (reply.status_code, error_of(reply)["field"]) == (400, "sha256")
    assert client.head(path).status_code == 404
    assert error_of(client.get(path))["code"] == "payload_not_found"
    assert list((server.folder / ".partial").iterdir()) == []


def test_a_payload_that_is_too_large_is_refused_while_it_comes(server, client):
    path = f"/v1/runs/run1/payloads/{'0' * 64}"
    declared = client.put(path, content=b"x" * (9 * 2**20))
    assert (declared.status_code, error_of(declared)["code"]) == (413, "too_large")
    counted = client.put(path, content=(b"x" * 2**20 for _ in range(9)))
    assert (counted.status_code, error_of(counted)["code"]) == (413, "too_large")
    assert "artifact_bytes" in error_of(counted)["message"]
    assert list((server.folder / ".partial").iterdir()) == []


def test_the_run_must_exist(client):
    for method in ("put", "get"):
        reply = getattr(client, method)(f"/v1/runs/nobody/payloads/{SHA256}")
        assert (reply.status_code, error_of(reply)["code"]) == (404, "run_not_found")


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/runs/%2e%2e/payloads/{SHA256}",
        f"/v1/runs/..%2f..%2fetc/payloads/{SHA256}",
        f"/v1/runs/.partial/payloads/{SHA256}",
        "/v1/runs/run1/payloads/..%2f..%2fpasswd",
        f"/v1/runs/run1/payloads/{SHA256.upper()}",
        f"/v1/runs/run1/payloads/{SHA256[:-1]}",
        f"/v1/runs/run1%00/payloads/{SHA256}",
        f"/v1/runs/{'r' * 129}/payloads/{SHA256}",
    ],
)
def test_paths_that_lead_elsewhere(client, path):
    for method in ("PUT", "GET"):
        reply = client.request(method, path)
        assert reply.status_code in (400, 404), reply.text
        assert error_of(reply)["code"] in ("invalid_argument", "malformed", "not_found")


def test_no_link_is_followed(server, client, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the server")
    folder = server.folder / "default" / "run1" / "ab"
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = "ab" + "0" * 62
    (folder / sha256).symlink_to(secret)
    reply = client.get(f"/v1/runs/run1/payloads/{sha256}")
    assert b"of the server" not in reply.content
    assert reply.status_code == 503
    (server.folder / "default" / "run1" / "cd").symlink_to(tmp_path)
    (tmp_path / ("cd" + "0" * 62)).write_bytes(b"of the server")
    reply = client.get(f"/v1/runs/run1/payloads/cd{'0' * 62}")
    assert b"of the server" not in reply.content
