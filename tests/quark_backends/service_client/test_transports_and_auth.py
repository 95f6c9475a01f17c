"""What users put between the client and the service: a transport or an `auth` of httpx."""

import hashlib
from dataclasses import replace

import httpx
import pytest
from chaos_proxy import ChaosProxy

import quark
from quark_backends.service.client.backend import ServiceBackend
from quark_backends.service.client.transport import BoundedTransport, Deadline, find_address
from quark_backends.service.plugin import SERVICE
from quark_backends.service.protocol import PROTOCOL_VERSION
from quark_core.backends.contract import BackendConfig, Capability, Payload
from quark_core.backends.registry import default_registry
from quark_core.errors import BackendUnavailable, SchemaValidationError, SessionStoreError
from quark_core.hookspecs import hookimpl
from quark_core.testing.fakes import BatchMaker

NOT_FOUND = {"error": {"code": "run_not_found", "message": "no run"}}
HEADERS = {"Quark-Protocol": str(PROTOCOL_VERSION)}


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("QUARK_USER_KEY", "qk_a_b")


def open_backend(tmp_path, **arguments):
    config = BackendConfig(
        storage_dir=tmp_path, run_path=tmp_path, run_id="run0", location="http://127.0.0.1:9"
    )
    return ServiceBackend(config, **arguments)


class Gateway(httpx.Auth):
    """Asks for a ticket when it is refused, as gateways before a service do."""

    def __init__(self):
        self.tickets = 0

    def auth_flow(self, request):
        response = yield request
        if response.status_code == 401:
            self.tickets += 1
            request.headers["X-Ticket"] = f"ticket{self.tickets}"
            yield request


def test_a_transport_of_a_test_stands_in_for_the_service(tmp_path):
    seen = []

    def answer(request):
        seen.append((request.method, request.url.path, request.headers["Authorization"]))
        if request.url.path.startswith("/v1/call/"):
            return httpx.Response(404, json=NOT_FOUND, headers=HEADERS)
        return httpx.Response(200, json={}, headers=HEADERS)

    backend = open_backend(tmp_path, transport=httpx.MockTransport(answer))
    backend.write(BatchMaker("run0").start())
    with pytest.raises(quark.RunNotFoundError):
        backend.load_run("run0")
    backend.close()
    assert seen == [
        ("POST", "/v1/runs/run0/batches", "Bearer qk_a_b"),
        ("POST", "/v1/call/load_run", "Bearer qk_a_b"),
    ]


@pytest.mark.parametrize("run_id", [".", "..", "a/../b", "a%2Fb", "%2e", "ü ?#"])
def test_a_run_id_stays_one_part_of_the_path(tmp_path, run_id):
    paths = []

    def answer(request):
        paths.append(request.url.raw_path)
        return httpx.Response(404, json=NOT_FOUND, headers=HEADERS)

    backend = open_backend(tmp_path, transport=httpx.MockTransport(answer))
    with pytest.raises(quark.RunNotFoundError):
        backend.open_payload(run_id, "0" * 64)
    (path,) = paths
    assert path.startswith(b"/v1/runs/")
    assert path.count(b"/") == 5
    assert httpx.URL("http://h" + path.decode()).path == f"/v1/runs/{run_id}/payloads/{'0' * 64}"


def test_what_a_transport_raises_is_an_outage(tmp_path):
    def answer(request):
        raise httpx.ConnectError("no way")

    backend = open_backend(tmp_path, transport=httpx.MockTransport(answer))
    with pytest.raises(BackendUnavailable, match="no way"):
        backend.write(BatchMaker("run0").start())
    with pytest.raises(SessionStoreError, match="no way"):
        backend.load_run("run0")


@pytest.mark.parametrize("body", [b"metrics", b"x" * 300_000])
def test_an_auth_may_ask_again_with_the_whole_body(tmp_path, body):
    path = tmp_path / "payload"
    path.write_bytes(body)
    bodies = []

    def answer(request):
        if request.method == "HEAD":
            return httpx.Response(404, headers=HEADERS)
        bodies.append((request.headers.get("X-Ticket"), request.read()))
        status = 200 if "X-Ticket" in request.headers else 401
        return httpx.Response(status, json={}, headers=HEADERS)

    gateway = Gateway()
    backend = open_backend(tmp_path, transport=httpx.MockTransport(answer), auth=gateway)
    payload = Payload(
        run_id="run0",
        sha256=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        path=path,
    )
    backend.put_payload(payload)
    assert bodies == [(None, body), ("ticket1", body)]
    assert gateway.tickets == 1


def test_an_auth_that_reads_a_refusal_does_not_take_it_from_the_client(tmp_path):
    read = []

    class Reader(httpx.Auth):
        requires_response_body = True

        def auth_flow(self, request):
            response = yield request
            read.append(response.content)

    def answer(request):
        content = iter([b'{"error": {"code": "run_not_found", ', b'"message": "no run"}}'])
        return httpx.Response(404, content=content, headers=HEADERS)

    backend = open_backend(tmp_path, transport=httpx.MockTransport(answer), auth=Reader())
    with pytest.raises(quark.RunNotFoundError):
        backend.load_run("run0")
    assert read == [b'{"error": {"code": "run_not_found", "message": "no run"}}']


def test_no_key_is_asked_for_where_an_auth_says_who_comes(tmp_path, monkeypatch):
    monkeypatch.delenv("QUARK_USER_KEY")
    seen = []

    def answer(request):
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={}, headers=HEADERS)

    backend = open_backend(
        tmp_path, transport=httpx.MockTransport(answer), auth=httpx.BasicAuth("ada", "s3cr3t")
    )
    backend.write(BatchMaker("run0").start())
    assert seen == ["Basic YWRhOnMzY3IzdA=="]


def test_what_is_no_transport_and_no_auth_is_refused_by_name(tmp_path):
    with pytest.raises(SchemaValidationError, match=r"transport must be an httpx.BaseTransport"):
        open_backend(tmp_path, transport="https://proxy")
    with pytest.raises(SchemaValidationError, match=r"auth must be an httpx.Auth.*not tuple"):
        open_backend(tmp_path, auth=("ada", "s3cr3t"))


def test_a_backend_of_a_users_own_trains_through_its_auth(service, tmp_path, monkeypatch):
    """A definition made of the service's: what docs/server/connect.md shows."""
    seen = []

    class Signature(httpx.Auth):
        def auth_flow(self, request):
            request.headers["X-Signature"] = "signed"
            response = yield request
            seen.append((request.method, response.status_code))

    class Plugin:
        @hookimpl
        def quark_register_backends(self):
            return [
                replace(
                    SERVICE,
                    name="gateway",
                    schemes=(),
                    open=lambda config: ServiceBackend(config, auth=Signature()),
                )
            ]

    registry = default_registry()
    plugin = Plugin()
    registry.register(plugin, name="gateway")
    try:
        assert Capability.PRIMARY in registry.find("gateway").capabilities
        storage_dir = tmp_path / "runs"
        with quark.start_run(project="p", storage_dir=storage_dir, backends="gateway") as session:
            metrics = quark.MetricsLogger(session)
            for step in range(3):
                metrics.log("loss", 1.0, step=step)
        run = quark.open_run(session.run_id, storage_dir, backend=f"gateway:{service.url}")
        assert run.status == "completed"
        assert [row.step for row in quark.MetricsLogger(run).read()] == [0, 1, 2]
    finally:
        registry._manager.unregister(plugin)
        del registry._definitions["gateway"]
    assert ("POST", 200) in seen
    assert ("GET", 200) in seen


def test_the_transport_keeps_a_deadline_for_any_client_of_httpx(tmp_path):
    with ChaosProxy(mode="drip") as server:
        address = find_address(BackendConfig(storage_dir=tmp_path, location=server.url))
        deadline = Deadline(0.5)
        with (
            httpx.Client(transport=BoundedTransport(address), timeout=None) as client,
            deadline.bind(),
            pytest.raises(httpx.ReadTimeout),
        ):
            client.get(f"{server.url}/v1/workspace")
        assert deadline.left_s == 0.0
        assert server.counts["drip"] == 1


@pytest.mark.long
def test_no_line_of_a_log_is_written_for_a_call(service, tmp_path, caplog):
    """httpx's own client writes one for each, at a level that many programs show."""
    with (
        caplog.at_level("INFO"),
        quark.start_run(project="p", storage_dir=tmp_path / "runs") as session,
    ):
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.flush()
    assert [r.name for r in caplog.records if r.name.startswith("http")] == []
