"""Two workspaces never see each other, whichever route is tried."""

import hashlib
import re

import pytest
from service_fixtures import encode_ingest, ingest, serving

from quark_backends.service.protocol import MSGPACK, ROWS
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.routes import ROUTES
from quark_core.testing.fakes import BatchMaker

PAYLOAD = b"the secret of the other workspace"
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()
SECRET = "d1ff1cu1t"

UPDATE = {"project": SECRET, "by": "x@y", "description": "x"}
LOG = f"{SECRET}/optuna"
EXCHANGE = {"field": "state", "expect": None, "value": "mine", "by": "x@y"}

# What is sent, and which status says that there is nothing: 404, or 200 and an empty reply.
# A route that is added to the table must be added here.
TRIES = {
    "GET /v1/workspace": ({}, 200),
    "GET /v1/groups": ({}, 200),
    "POST /v1/groups": ({"json": {**UPDATE, "path": SECRET}}, 400),
    "GET /v1/project": ({"params": {"project": SECRET}}, 400),
    "POST /v1/project": ({"json": UPDATE}, 400),
    "GET /v1/sweeps": ({}, 200),
    "POST /v1/sweeps": ({"json": {"project": "p", "name": "n", "definition": {}}}, 200),
    "GET /v1/sweeps/{sweep_id}": ({}, 400),
    "POST /v1/sweeps/{sweep_id}/state": ({"json": {"state": "cancelled", "by": "x@y"}}, 400),
    "GET /v1/sweeps/{sweep_id}/trials": ({}, 400),
    "POST /v1/sweeps/{sweep_id}/trials": (
        {"json": {"trials": [{"parameters": {"lr": 1.0}}], "key": "k"}},
        400,
    ),
    "POST /v1/sweeps/{sweep_id}/claim": ({"json": {"request_id": "r"}}, 400),
    "POST /v1/sweeps/{sweep_id}/settle": (
        {"json": {"number": 1, "token": 1, "result": {"state": "failed"}}},
        400,
    ),
    "GET /v1/entries": ({"params": {"log": LOG}}, 200),
    # A log of this name is begun in one's own workspace.
    "POST /v1/entries": ({"json": {"log": LOG, "entries": ["x"], "request_id": "r"}}, 200),
    "POST /v1/runs/{run_id}/compare_and_set": ({"json": EXCHANGE}, 404),
    "POST /v1/groups/compare_and_set": (
        {"json": {**EXCHANGE, "project": SECRET, "path": SECRET}},
        400,
    ),
    "POST /v1/project/compare_and_set": ({"json": {**EXCHANGE, "project": SECRET}}, 400),
    "GET /v1/runs": ({}, 200),
    "POST /v1/runs/search": ({"json": {"where": "'tag' in tags"}}, 200),
    "POST /v1/runs/page": ({"json": {"where": "'tag' in tags"}}, 200),
    "GET /v1/names": ({}, 200),
    "GET /v1/runs/{run_id}/grid": ({"params": {"kind": "layer", "field": "norm"}}, 404),
    "GET /v1/runs/{run_id}": ({}, 404),
    "GET /v1/runs/{run_id}/summary": ({}, 404),
    "POST /v1/runs/{run_id}/records/{kind}/read": ({"json": {}}, 404),
    "GET /v1/runs/{run_id}/series": ({"params": {"key": SECRET}}, 404),
    "POST /v1/runs/{run_id}/curves": ({"json": {"keys": [SECRET]}}, 404),
    "GET /v1/runs/{run_id}/heads": ({}, 404),
    "POST /v1/runs/{run_id}/changes": ({"json": {"cursor": {}, "kinds": ["metric"]}}, 404),
    "GET /v1/runs/{run_id}/writers/{writer_id}/batches": ({}, 404),
    "GET /v1/runs/{run_id}/outputs/{kind}": ({}, 404),
    "POST /v1/runs/{run_id}/batches": (
        {
            "content": encode_ingest(BatchMaker("shared", writer_id="x").metrics(("m", 0, 1.0))),
            "headers": {"Content-Type": MSGPACK},
        },
        422,
    ),
    "POST /v1/runs/{run_id}/generations": (
        {"json": {"analyzer": "a", "replaces": True, "outputs": []}},
        404,
    ),
    # The id is free in one's own workspace, whoever has it elsewhere; the parent is not there.
    "POST /v1/runs": ({"json": {"project": "p", "parent_run_id": "shared"}}, 404),
    "POST /v1/runs/{run_id}/tags": ({"json": {"tags": ["x"]}}, 404),
    "POST /v1/runs/{run_id}/logs": ({"json": {"message": "x"}}, 404),
    "POST /v1/runs/{run_id}/status": ({"json": {"status": "failed"}}, 404),
    "POST /v1/runs/{run_id}/heartbeat": ({"json": {}}, 404),
    "POST /v1/runs/{run_id}/edit": ({"json": {"by": "x@y", "name": "x"}}, 404),
    "POST /v1/runs/{run_id}/stop": ({"json": {"by": "x@y"}}, 404),
    "GET /v1/runs/{run_id}/stop": ({}, 404),
    "PUT /v1/runs/{run_id}/payloads/{sha256}": ({"content": PAYLOAD}, 404),
    "HEAD /v1/runs/{run_id}/payloads/{sha256}": ({}, 404),
    "GET /v1/runs/{run_id}/payloads/{sha256}": ({}, 404),
    "POST /v1/runs/trash": ({"json": {"run_ids": ["shared"]}}, 404),
    "POST /v1/runs/restore": ({"json": {"run_ids": ["shared"]}}, 404),
    "POST /v1/runs/usage": ({"json": {"run_ids": ["shared"]}}, 404),
    "DELETE /v1/runs/{run_id}": ({}, 404),
    "GET /v1/trash": ({}, 200),
    "POST /v1/trash/collect": ({"json": {}}, 200),
    "GET /v1/usage": ({}, 200),
    "GET /v1/damaged": ({}, 200),
    "GET /v1/keys": ({}, 200),
    "POST /v1/keys": ({"json": {"name": "mine", "scopes": ["read"]}}, 201),
    "POST /v1/keys/{key_id}/rotate": ({"json": {}}, 404),
    "DELETE /v1/keys/{key_id}": ({}, 404),
    "GET /healthz": ({}, 200),
    "GET /readyz": ({}, 200),
    "GET /metrics": ({}, 200),
    "GET /openapi.json": ({}, 200),
    "GET /docs": ({}, 200),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A server whose workspace `theirs` has all that there can be, and a key of `ours`."""
    with serving(tmp_path_factory.mktemp("tenants")) as server:
        theirs, ours = server.make_key("theirs", name=SECRET), server.make_key("ours")
        with server.client(key=theirs) as client:
            maker = BatchMaker("shared", writer_id="writer0")
            sent = ingest(
                client,
                maker.start(project=SECRET, tags=["tag", SECRET]),
                maker.metrics((SECRET, 0, 1.0)),
                maker.events(SECRET),
            )
            assert sent.status_code == 200
            made = client.post(
                "/v1/sweeps", json={"project": SECRET, "name": SECRET, "definition": {"x": SECRET}}
            )
            route = f"/v1/sweeps/{made.json()['id']}"
            trials = [{"parameters": {"name": SECRET}}] * 2
            client.post(f"{route}/trials", json={"trials": trials, "key": "k"})
            # One waits, and one is held: both would be changed by whoever could.
            claimed = client.post(f"{route}/claim", json={"request_id": SECRET})
            assert claimed.json()["trial"]["token"] == 1
            entries = {"log": LOG, "entries": [SECRET], "request_id": SECRET}
            assert client.post("/v1/entries", json=entries).status_code == 200
            kept = client.put(f"/v1/runs/shared/payloads/{SHA256}", content=PAYLOAD)
            assert kept.status_code == 201
        with server.client(key=ours) as client:
            yield server, client, theirs


def find_sweep_id(client):
    """Of the one sweep that a workspace has."""
    (sweep,) = client.get("/v1/sweeps").json()["sweeps"]
    return sweep["id"]


def read_all(server, key):
    """All that a workspace says, for comparing."""
    with server.client(key=key) as client:
        sweep_id = find_sweep_id(client)
        return [
            client.get("/v1/runs").content,
            client.get("/v1/groups").content,
            client.get("/v1/project", params={"project": SECRET}).content,
            client.get("/v1/runs/shared/summary").content,
            client.get("/v1/runs/shared/writers/writer0/batches?limit=100").content,
            client.post("/v1/runs/shared/records/event/read", json={}).content,
            client.post("/v1/runs/shared/records/lifecycle/read", json={}).content,
            client.get(f"/v1/runs/shared/payloads/{SHA256}").content,
            client.get("/v1/sweeps").content,
            client.get(f"/v1/sweeps/{sweep_id}").content,
            client.get(f"/v1/sweeps/{sweep_id}/trials").content,
            client.get("/v1/entries", params={"log": LOG}).content,
            [
                {name: value for name, value in key.items() if name != "last_used_at"}
                for key in client.get("/v1/keys").json()["keys"]
            ],
        ]


def test_every_route_is_tried():
    assert set(TRIES) == {f"{route.method} {route.path}" for route in ROUTES}


@pytest.mark.parametrize(
    "accept",
    ["application/json", *(pytest.param(each, marks=pytest.mark.long) for each in (MSGPACK, ROWS))],
)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_nothing_of_another_workspace_is_seen_or_changed(world, route, accept):
    server, client, theirs = world
    before = read_all(server, theirs)
    with server.client(key=theirs) as holder:
        sweep_id = find_sweep_id(holder)
    path = (
        route.path.replace("{run_id}", "shared")
        .replace("{kind}", "alert" if "outputs" in route.path else "metric")
        .replace("{writer_id}", "writer0")
        .replace("{sha256}", SHA256)
        .replace("{key_id}", theirs.split("_")[1])
        .replace("{sweep_id}", sweep_id)
    )
    assert not re.search(r"[{}]", path)
    arguments, expected = TRIES[f"{route.method} {route.path}"]
    headers = {**arguments.get("headers", {}), "Accept": accept}
    reply = client.request(route.method, path, **{**arguments, "headers": headers})
    assert reply.status_code == expected, reply.text
    content = reply.content
    if route.path == "/v1/runs/{run_id}/payloads/{sha256}" and route.method != "PUT":
        assert PAYLOAD not in reply.content
    else:
        # What was asked for may be said back: a series, a project.
        for asked in (f"key={SECRET}", f"project '{SECRET}'"):
            content = content.replace(asked.encode(), b"")
        assert SECRET.encode() not in content
    assert theirs.split("_", 2)[2].encode() not in reply.content
    assert read_all(server, theirs) == before


def test_lists_are_of_the_own_workspace(world):
    _, client, _ = world
    assert client.get("/v1/runs").json() == {"runs": [], "next": None}
    assert client.post("/v1/runs/search", json={}).json() == {"runs": []}
    assert client.get("/v1/workspace").json()["workspace"] == "ours"
    names = {key["name"] for key in client.get("/v1/keys").json()["keys"]}
    assert names <= {"test", "mine"}


@pytest.mark.long
def test_an_id_is_free_in_every_workspace(tmp_path):
    payload = b"own"
    sha256 = hashlib.sha256(payload).hexdigest()
    with serving(tmp_path) as server:
        for workspace, value in (("one", 1.0), ("two", 2.0)):
            with server.client(workspace) as client:
                maker = BatchMaker("same")
                ingest(client, maker.start(), maker.metrics(("loss", 0, value)))
                client.put(f"/v1/runs/same/payloads/{sha256}", content=payload)
        for workspace, value in (("one", 1.0), ("two", 2.0)):
            with server.client(workspace) as client:
                reply = client.post("/v1/runs/same/records/metric/read", json={})
                assert [each["value"] for each in reply.json()["records"]] == [value]
                assert client.get(f"/v1/runs/same/payloads/{sha256}").content == payload


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_of_the_api_needs_a_key_of_its_scope(world, route):
    server, _, _ = world
    path = re.sub(r"\{\w+\}", "x", route.path)
    import httpx

    reply = httpx.request(route.method, server.url + path, timeout=60, verify=False)
    if route.scope is None:
        assert reply.status_code == 200
        assert not path.startswith("/v1/")
        return
    assert reply.status_code == 401
    if route.scope == ANY_SCOPE:
        # Let in, and told that there is no run `x`, no such sweep, or that no log is named.
        named = {"{run_id}": 404, "{sweep_id}": 400, "/v1/entries": 400}
        expected = next((status for part, status in named.items() if part in route.path), 200)
        for scope in ("read", "ingest", "write"):
            with server.client("ours", scope) as client:
                assert client.request(route.method, path).status_code == expected
        return
    for weaker in {"read", "ingest", "write"} - {route.scope}:
        with server.client("ours", weaker) as client:
            assert client.request(route.method, path).status_code == 403
