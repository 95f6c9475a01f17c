"""Every error of the protocol is told, in one envelope, with nothing that is not for the client."""

import contextlib
import hashlib
import sqlite3

import httpx
import pytest
from service_fixtures import call, error_of, ingest, serving
from starlette.exceptions import HTTPException

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.responses import ServiceFailure, to_failure
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    BackendUnavailable,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.testing.fakes import BatchMaker


@contextlib.contextmanager
def serving_small_bodies(folder, **limits):
    limits |= {"body_bytes": 1000, "requests_per_s": 1e6}
    with serving(folder, limits=limits, allowed_hosts=("127.0.0.1",)) as running:
        running.folder = folder
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving_small_bodies(tmp_path_factory.mktemp("errors")) as running:
        yield running


@pytest.fixture(scope="module")
def hasty_server(tmp_path_factory):
    """Waits half a second for a body, which any may take on a busy machine."""
    folder = tmp_path_factory.mktemp("hasty")
    with serving_small_bodies(folder, body_timeout_s=0.5) as running:
        yield running


def slowly():
    import time

    for _ in range(10):
        yield b"x"
        time.sleep(0.2)


SHA256 = hashlib.sha256(b"abc").hexdigest()
CAUSES = {
    ErrorCode.MALFORMED: ("POST", "/v1/runs", {"content": b"{", "json_type": True}),
    ErrorCode.INVALID_ARGUMENT: ("POST", "/v1/runs", {"json": {"project": 5}}),
    ErrorCode.UNAUTHORIZED: ("GET", "/v1/workspace", {"headers": {"Authorization": "Bearer x"}}),
    ErrorCode.NOT_FOUND: ("GET", "/v1/nowhere", {}),
    ErrorCode.RUN_NOT_FOUND: ("POST", "/v1/call/load_run", {"json": {"run_id": "nobody"}}),
    ErrorCode.PAYLOAD_NOT_FOUND: ("GET", f"/v1/runs/run1/payloads/{'0' * 64}", {}),
    ErrorCode.METHOD_NOT_ALLOWED: ("DELETE", "/v1/runs", {}),
    ErrorCode.TIMEOUT: ("POST", "/v1/runs", {"content": slowly, "json_type": True}),
    ErrorCode.CONFLICT: ("POST", "/v1/runs", {"json": {"project": "p", "run_id": "run1"}}),
    ErrorCode.TOO_LARGE: ("POST", "/v1/runs", {"json": {"project": "p", "notes": "x" * 1000}}),
    ErrorCode.UNSUPPORTED: ("POST", "/v1/runs", {"content": b"{}"}),
    ErrorCode.RANGE: (
        "GET",
        f"/v1/runs/run1/payloads/{SHA256}",
        {"headers": {"Range": "bytes=9-"}},
    ),
    ErrorCode.MISDIRECTED: ("GET", "/v1/workspace", {"headers": {"Host": "elsewhere"}}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("code", CAUSES)
def test_each_error_has_its_status_and_its_envelope(request, code):
    name = "hasty_server" if code is ErrorCode.TIMEOUT else "server"
    with request.getfixturevalue(name).client() as client:
        ingest(client, BatchMaker("run1").start())
        client.put(f"/v1/runs/run1/payloads/{SHA256}", content=b"abc")
        method, path, given = CAUSES[code]
        arguments = dict(given)
        if callable(arguments.get("content")):
            arguments["content"] = arguments["content"]()
        if arguments.pop("json_type", False):
            arguments["headers"] = {"Content-Type": "application/json"}
        reply = client.request(method, path, **arguments)
    assert (reply.status_code, error_of(reply)["code"]) == (code.status, str(code))
    assert reply.headers["quark-protocol"] == "1"
    assert reply.headers["quark-request-id"] == error_of(reply)["request_id"]
    assert set(reply.json()) == {"error"}
    assert error_of(reply)["message"]


def test_the_other_codes_have_tests_of_their_own():
    elsewhere = {"forbidden", "rejected", "rate_limited", "internal", "unavailable"}
    elsewhere |= {"invalid_state"}  # test_service_removal.py
    assert {str(code) for code in CAUSES} | elsewhere == {str(code) for code in ErrorCode}


def test_a_bug_of_the_server_is_told_without_its_details(server, caplog):
    with server.client() as client:
        ingest(client, BatchMaker("run1").start())
        opened = server.service.stores._open["default"].store

        def fail(*args, **kwargs):
            raise ZeroDivisionError("a detail of the server")

        opened.load_run, kept = fail, opened.load_run
        try:
            reply = call(client, "load_run", run_id="run1")
        finally:
            opened.load_run = kept
    assert (reply.status_code, error_of(reply)["code"]) == (500, "internal")
    assert "detail" not in reply.text
    assert error_of(reply)["request_id"] in caplog.text
    assert "a detail of the server" in caplog.text
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert "quark_failures_total 1" in text


@pytest.mark.long
def test_a_store_that_is_locked_is_unavailable(server):
    with server.client() as client:
        ingest(client, BatchMaker("run1").start())
        path = next((server.folder / "workspaces").rglob("quark.db"))
        path.rename(path.with_suffix(".away"))
        with server.client("fresh") as other:
            assert call(other, "list_runs").status_code == 200
        path.with_suffix(".away").rename(path)
        lock = sqlite3.connect(path, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        try:
            reply = ingest(client, BatchMaker("run2").start())
        finally:
            lock.execute("ROLLBACK")
            lock.close()
        assert (reply.status_code, error_of(reply)["code"]) == (503, "unavailable")
        assert int(reply.headers["retry-after"]) >= 1
        assert str(server.folder) not in reply.text
        assert ingest(client, BatchMaker("run2").start()).status_code == 200


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunNotFoundError("x"), "run_not_found"),
        (ArtifactNotFoundError("x"), "payload_not_found"),
        (SchemaValidationError("x"), "invalid_argument"),
        (BackendRejected("batch 3 of writer w came again with other content"), "conflict"),
        (BackendRejected("attempt 1 of run r was started by another process"), "conflict"),
        (BackendRejected("x"), "rejected"),
        (BackendUnavailable("x", retry_after_s=7.0), "unavailable"),
        (SessionStoreError("/srv/x"), "unavailable"),
        (HTTPException(404), "not_found"),
        (HTTPException(405), "method_not_allowed"),
        (HTTPException(400), "malformed"),
        (RuntimeError("x"), "internal"),
        (ServiceFailure(ErrorCode.RANGE, "x"), "range"),
    ],
)
def test_what_becomes_of_errors(error, code):
    failure = to_failure(error, "id")
    assert failure.code == code
    assert "/srv" not in failure.message
    if isinstance(error, BackendUnavailable):
        assert failure.retry_after_s == 7.0


def test_the_log_of_requests_holds_no_secrets(tmp_path, caplog):
    caplog.set_level("INFO", logger="quark.service")
    with serving(tmp_path, access_log=True) as server:
        key = server.make_key()
        with server.client(key=key) as client:
            client.get("/v1/workspace?project=secret-project")
            call(client, "load_run", run_id="a%0abc")
            client.get("/v1/workspace", headers={"Authorization": "Bearer qk_wrong_verysecret"})
    lines = [record.getMessage() for record in caplog.records if record.name == "quark.service"]
    assert any("GET /v1/workspace key=" + key.split("_")[1] in line for line in lines)
    assert len(lines) == 3
    for secret in (key.split("_", 2)[2], "verysecret", "secret-project"):
        assert secret not in caplog.text
    assert all("\n" not in line for line in lines)
