"""Two workspaces never see each other, whichever route is tried."""

import hashlib
import re

import pytest
from service_fixtures import ask, call, encode_ingest, ingest, serving

from quark_backends.service.protocol import MSGPACK, ROWS
from quark_backends.service.server.config import ANY_SCOPE
from quark_backends.service.server.routes import ROUTES
from quark_core.backends.methods import CHANGING_METHODS
from quark_core.testing.fakes import BatchMaker

PAYLOAD = b"the secret of the other workspace"
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()
SECRET = "d1ff1cu1t"

LOG = f"{SECRET}/optuna"
OF_RUN = {"run_id": "shared"}
BY = {"by": "x@y"}
OF_PROJECT = {"project": SECRET, **BY}
EXCHANGE = {"field": "state", "expect": None, "value": "mine", **BY}
OF_SWEEP = {"sweep_id": "SWEEP"}
DESCRIBED = {"edit": {"description": "x"}}

# What methods are asked with, and which status says that there is nothing: 404, or 200 and an
# empty reply. A method or a route that is added to the table must be added here.
CALLS = {
    "load_run": (OF_RUN, 404),
    "list_runs": ({}, 200),
    "search": ({"search": {"where": "'tag' in tags"}}, 200),
    "search_page": ({"search": {"where": "'tag' in tags"}}, 200),
    "list_names": ({"project": None, "text": "", "limit": 100}, 200),
    "summarize": (OF_RUN, 404),
    "read": ({**OF_RUN, "kind": "metric", "query": {}}, 404),
    "read_series": ({**OF_RUN, "key": SECRET, "max_points": None}, 404),
    "read_series_many": ({**OF_RUN, "query": {"keys": [SECRET], "entries": None}}, 404),
    "read_heads": (OF_RUN, 404),
    "read_changes": ({**OF_RUN, "cursor": {}, "kinds": ["metric"], "max_rows": 10}, 404),
    "read_grid": ({**OF_RUN, "query": {"kind": "layer", "field": "norm"}}, 404),
    "read_batches": ({**OF_RUN, "writer_id": "writer0", "start": 0, "limit": 100}, 404),
    "read_outputs": ({**OF_RUN, "kind": "alert"}, 404),
    "edit_run": ({**OF_RUN, "edit": {"name": "x"}, **BY}, 404),
    "request_stop": ({**OF_RUN, **BY}, 404),
    "find_stop": (OF_RUN, 404),
    "list_groups": ({}, 200),
    "load_project": ({"project": SECRET}, 400),
    "update_project": ({**OF_PROJECT, **DESCRIBED}, 400),
    "update_group": ({**OF_PROJECT, "path": SECRET, **DESCRIBED}, 400),
    "trash_runs": ({"run_ids": ["shared"]}, 404),
    "restore_runs": ({"run_ids": ["shared"]}, 404),
    "measure_runs": ({"run_ids": ["shared"]}, 404),
    "list_trash": ({}, 200),
    "measure_store": ({}, 200),
    "list_damaged": ({}, 200),
    "open_sweep": ({"project": "p", "name": "n", "definition": {}}, 200),
    "list_sweeps": ({}, 200),
    "load_sweep": (OF_SWEEP, 400),
    "update_sweep": ({**OF_SWEEP, "state": "cancelled", **BY}, 400),
    "list_trials": (OF_SWEEP, 400),
    "add_trials": ({**OF_SWEEP, "trials": [{"parameters": {"lr": 1.0}}], "key": "k"}, 400),
    "claim_trial": ({**OF_SWEEP, "request_id": "r"}, 400),
    "settle_trial": ({**OF_SWEEP, "number": 1, "token": 1, "result": {"state": "failed"}}, 400),
    "read_entries": ({"log": LOG, "start": 0}, 200),
    # A log of this name is begun in one's own workspace.
    "append_entries": ({"log": LOG, "entries": ["x"], "request_id": "r"}, 200),
    "compare_and_set": ({**OF_RUN, **EXCHANGE}, 404),
    "compare_and_set_group": ({**EXCHANGE, "project": SECRET, "path": SECRET}, 400),
}
TRIES = {
    **{
        f"POST /v1/call/{name}": ({"json": given}, status)
        for name, (given, status) in CALLS.items()
    },
    "GET /v1/workspace": ({}, 200),
    "GET /v1/runs/{run_id}": ({}, 404),
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
    "PUT /v1/runs/{run_id}/payloads/{sha256}": ({"content": PAYLOAD}, 404),
    "HEAD /v1/runs/{run_id}/payloads/{sha256}": ({}, 404),
    "GET /v1/runs/{run_id}/payloads/{sha256}": ({}, 404),
    "POST /v1/trash/collect": ({"json": {}}, 200),
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
            sweep = {"project": SECRET, "name": SECRET, "definition": {"x": SECRET}}
            sweep_id = ask(client, "open_sweep", **sweep)["id"]
            trials = [{"parameters": {"name": SECRET}}] * 2
            ask(client, "add_trials", sweep_id=sweep_id, trials=trials, key="k")
            # One waits, and one is held: both would be changed by whoever could.
            claimed = ask(client, "claim_trial", sweep_id=sweep_id, request_id=SECRET)
            assert claimed["token"] == 1
            ask(client, "append_entries", log=LOG, entries=[SECRET], request_id=SECRET)
            kept = client.put(f"/v1/runs/shared/payloads/{SHA256}", content=PAYLOAD)
            assert kept.status_code == 201
        with server.client(key=ours) as client:
            yield server, client, theirs


def find_sweep_id(client):
    """Of the one sweep that a workspace has."""
    (sweep,) = ask(client, "list_sweeps")
    return sweep["id"]


def read_all(server, key):
    """All that a workspace says, for comparing."""
    with server.client(key=key) as client:
        sweep_id = find_sweep_id(client)
        return [
            *(
                ask(
                    client,
                    method,
                    **{**given, **({"sweep_id": sweep_id} if given == OF_SWEEP else {})},
                )
                for method, (given, _) in CALLS.items()
                if method not in CHANGING_METHODS and not method.startswith("measure_")
            ),
            ask(client, "read", **OF_RUN, kind="event", query={}),
            ask(client, "read", **OF_RUN, kind="lifecycle", query={}),
            client.get(f"/v1/runs/shared/payloads/{SHA256}").content,
            [
                {name: value for name, value in key.items() if name != "last_used_at"}
                for key in client.get("/v1/keys").json()["keys"]
            ],
        ]


def test_every_route_is_tried():
    assert set(TRIES) == {f"{route.method} {route.path}" for route in ROUTES}


@pytest.mark.sampled
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
        .replace("{sha256}", SHA256)
        .replace("{key_id}", theirs.split("_")[1])
    )
    assert not re.search(r"[{}]", path)
    arguments, expected = TRIES[f"{route.method} {route.path}"]
    headers = {**arguments.get("headers", {}), "Accept": accept}
    given = arguments.get("json", {})
    if "sweep_id" in given:
        arguments = {"json": {**given, "sweep_id": sweep_id}}
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
    assert ask(client, "list_runs") == ask(client, "search", search={}) == []
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
                reply = call(client, "read", run_id="same", kind="metric", query={})
                assert [each["value"] for each in reply.json()] == [value]
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
        for scope in ("read", "ingest", "write"):
            with server.client("ours", scope) as client:
                # Let in; a call without arguments is none.
                assert client.request(route.method, path).status_code in (200, 415)
        return
    for weaker in {"read", "ingest", "write"} - {route.scope}:
        with server.client("ours", weaker) as client:
            assert client.request(route.method, path).status_code == 403
