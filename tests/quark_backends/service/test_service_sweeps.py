"""Sweeps, trials and logs as the routes of a service have them, for whoever speaks HTTP."""

import msgspec
import pytest
from service_fixtures import error_of, serving

from quark_backends.service import protocol
from quark_backends.service.protocol import MSGPACK

SWEEP = {"project": "vision", "name": "lr", "definition": {"metric": "val/acc"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("sweeps"), limits={"requests_per_s": 1e6}) as running:
        yield running


@pytest.fixture
def client(server, request):
    """A client of a workspace of its own."""
    with server.client(f"w{abs(hash(request.node.name))}") as opened:
        yield opened


def post(client, route, /, **body):
    reply = client.post(route, json=body)
    assert reply.status_code in (200, 201), reply.text
    return reply.json()


def find_route(client):
    """Of the newest sweep of a client's workspace."""
    return f"/v1/sweeps/{client.get('/v1/sweeps').json()['sweeps'][0]['id']}"


def make_sweep(client, trials, **changes):
    """A sweep with trials; returns its route."""
    route = f"/v1/sweeps/{post(client, '/v1/sweeps', **{**SWEEP, **changes})['id']}"
    if trials:
        new = [{"parameters": {"lr": place / 8}} for place in range(trials)]
        post(client, f"{route}/trials", trials=new, key="all")
    return route


def claim(client, request_id, route=None, **body):
    route = route or find_route(client)
    return post(client, f"{route}/claim", request_id=request_id, **body)["trial"]


def test_a_sweep_is_worked_through_by_requests_alone(client):
    route = make_sweep(client, 2)
    first, second, none = (claim(client, name) for name in "abc")
    assert [first["number"], second["number"], none] == [0, 1, None]
    assert (first["parameters"], first["token"], first["state"]) == ({"lr": 0.0}, 1, "running")
    held = {name: first[name] for name in ("sweep_id", "number", "token")}
    started = post(client, "/v1/runs", project="vision", run_id="run0", trial=held)
    assert (started["trial"], started["superseded"]) == (held, False)
    post(client, "/v1/runs/run0/heartbeat")
    said = {"state": "completed", "values": [0.9], "step": 3}
    post(client, "/v1/runs/run0/status", status="completed", trial=said)
    settled = post(
        client,
        f"{route}/settle",
        number=1,
        token=1,
        result={"state": "pruned", "values": [0.1], "reason": "worse than the rest"},
    )["trial"]
    assert (settled["state"], settled["reason"]) == ("pruned", "worse than the rest")
    (one, other) = client.get(f"{route}/trials").json()["trials"]
    assert (one["state"], one["values"], one["step"]) == ("completed", [0.9], 3)
    assert one["run_id"] == "run0"
    assert other == settled
    sweep = client.get(route).json()
    assert sweep["counts"] == {"completed": 1, "pruned": 1}
    assert client.get("/v1/sweeps?project=vision").json()["sweeps"] == [sweep]
    assert client.get("/v1/sweeps?project=speech").json()["sweeps"] == []


def test_the_status_of_a_run_alone_settles_its_trial(client):
    route = make_sweep(client, 1, max_failures=2)
    for attempt, (status, state, failures) in enumerate(
        [("interrupted", "suspended", 0), ("failed", "waiting", 1), ("failed", "broken", 2)]
    ):
        trial = claim(client, f"claim{attempt}")
        assert (trial["token"], trial["state"]) == (attempt + 1, "running")
        held = {name: trial[name] for name in ("sweep_id", "number", "token")}
        run_id = f"run{attempt}"
        post(client, "/v1/runs", project="vision", run_id=run_id, trial=held)
        post(client, f"/v1/runs/{run_id}/status", status=status)
        (found,) = client.get(f"{route}/trials").json()["trials"]
        assert (found["state"], found["failures"]) == (state, failures)
    assert "failed 2 times" in found["reason"]
    assert claim(client, "more") is None


def test_a_heartbeat_renews_the_lease_of_the_newest_claim_only(client):
    route = make_sweep(client, 1)
    trial = claim(client, "a", lease_s=0.001)
    held = {name: trial[name] for name in ("sweep_id", "number", "token")}
    late = claim(client, "b", lease_s=600.0)
    while late is None:
        late = claim(client, "b", lease_s=600.0)
    assert late["token"] == 2
    post(client, "/v1/runs", project="vision", run_id="late", trial={**held, "token": 2})
    post(client, "/v1/runs", project="vision", run_id="early", trial=held)
    before = client.get(f"{route}/trials").json()["trials"][0]
    post(client, "/v1/runs/early/heartbeat")
    assert client.get(f"{route}/trials").json()["trials"][0] == before
    post(client, "/v1/runs/late/heartbeat")
    after = client.get(f"{route}/trials").json()["trials"][0]
    assert after["lease_until"] > before["lease_until"]
    # What the one that was taken from says changes nothing, and its run is kept.
    post(client, "/v1/runs/early/status", status="completed")
    assert client.get(f"{route}/trials").json()["trials"][0]["state"] == "running"
    early = client.get("/v1/runs/early").json()
    assert (early["run"]["status"], early["superseded"]) == ("completed", True)
    assert client.get("/v1/runs/late").json()["superseded"] is False
    refused = post(client, f"{route}/settle", number=0, token=1, result={"state": "completed"})[
        "trial"
    ]
    assert (refused["token"], refused["state"]) == (2, "running")


def test_a_request_that_comes_again_does_nothing_twice(client):
    route = make_sweep(client, 3)
    again = post(client, f"{route}/trials", trials=[{"parameters": {"other": 1}}] * 5, key="all")[
        "trials"
    ]
    assert [trial["parameters"] for trial in again] == [{"lr": n / 8} for n in range(3)]
    first = claim(client, "a")
    repeated = claim(client, "a")
    assert {**repeated, "lease_until": None} == {**first, "lease_until": None}
    failing = {"number": 0, "token": 1, "result": {"state": "waiting", "reason": "no memory"}}
    assert post(client, f"{route}/settle", **failing)["trial"]["failures"] == 1
    assert post(client, f"{route}/settle", **failing)["trial"]["failures"] == 1
    entries = {"log": "l", "entries": ["a", "b"], "request_id": "r"}
    assert post(client, "/v1/entries", **entries) == {"first": 0, "count": 2}
    assert post(client, "/v1/entries", **entries) == {"first": 0, "count": 2}
    assert post(client, "/v1/entries", **{**entries, "request_id": "s"})["first"] == 2
    read = client.get("/v1/entries?log=l&start=1").json()
    assert read == {"entries": ["b", "a", "b"], "next": 4}
    assert client.get("/v1/entries?log=l&start=4").json() == {"entries": [], "next": None}


def test_a_paused_sweep_gives_nothing_and_a_cancelled_one_never_again(client):
    route = make_sweep(client, 2)
    held = claim(client, "a")
    for state, given in (("paused", None), ("running", 1)):
        sweep = post(client, f"{route}/state", state=state, by="ann@lab")
        assert sweep["state"] == state
        found = claim(client, state)
        assert (found and found["number"]) == given
    post(client, f"{route}/settle", number=1, token=1, result={"state": "suspended"})
    assert post(client, f"{route}/state", state="cancelled", by="ann@lab")["counts"] == {
        "running": 1,
        "cancelled": 1,
    }
    assert claim(client, "b") is None
    refused = client.post(f"{route}/state", json={"state": "running", "by": "ann@lab"})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_argument")
    done = post(
        client,
        f"{route}/settle",
        number=held["number"],
        token=held["token"],
        result={"state": "completed", "values": [1.0]},
    )
    assert done["trial"]["state"] == "completed"


def test_a_claim_may_say_which_trial_it_wants(client):
    route = make_sweep(client, 4)
    assert claim(client, "a", wish={"number": 2})["number"] == 2
    assert claim(client, "b", wish={"number": 2}) is None
    assert claim(client, "c", wish={"where": "param.lr > 0.3"})["number"] == 3
    assert claim(client, "d", wish={"where": "param.lr > 0.3"}) is None
    refused = client.post(
        f"{route}/claim", json={"request_id": "e", "wish": {"where": "param.lr >"}}
    )
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_argument")


def test_a_field_is_set_only_if_it_has_the_value_that_is_expected(client):
    post(client, "/v1/runs", project="vision", run_id="run0")
    for path, named in (
        ("/v1/runs/run0/compare_and_set", {}),
        ("/v1/project/compare_and_set", {"project": "vision"}),
        ("/v1/groups/compare_and_set", {"project": "vision", "path": "paper/fig3"}),
    ):
        steps = [
            (None, "mine", True),
            (None, "yours", False),
            ("mine", 2.5, True),
            (2.5, None, True),
        ]
        for expect, value, was_set in [*steps, (None, "last", True)]:
            reply = post(
                client, path, field="owner", expect=expect, value=value, by="ann@lab", **named
            )
            assert reply == {"was_set": was_set}, (path, expect, value)
    assert client.get("/v1/runs/run0").json()["fields"]["owner"] == "last"
    assert client.get("/v1/project?project=vision").json()["fields"] == {"owner": "last"}
    (group,) = client.get("/v1/groups").json()["groups"]
    assert (group["path"], group["fields"]) == ("paper/fig3", {"owner": "last"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sweeps", {**SWEEP, "name": ""}),
        ("/v1/sweeps", {**SWEEP, "max_failures": 0}),
        ("/v1/sweeps", {**SWEEP, "definition": {"other": 1}}),
        ("{route}/trials", {"trials": [], "key": "k"}),
        ("{route}/trials", {"trials": [{"parameters": {"": 1}}], "key": "k"}),
        ("{route}/trials", {"trials": [{"parameters": {"x": 1}}], "key": ""}),
        ("{route}/claim", {"request_id": ""}),
        ("{route}/claim", {"request_id": "a\0b"}),
        ("{route}/claim", {"request_id": "a", "lease_s": 0.0}),
        ("{route}/claim", {"request_id": "a", "lease_s": 1e300}),
        ("{route}/claim", {"request_id": "a", "wish": {"number": -1}}),
        ("{route}/claim", {"request_id": "a", "wish": {"number": 2**64}}),
        (
            "{route}/claim",
            {"request_id": "a", "worker": {"host": "h", "pid": -1, "started": ""}},
        ),
        (
            "{route}/claim",
            {"request_id": "a", "worker": {"host": "h" * 2000, "pid": 1, "started": ""}},
        ),
        ("{route}/settle", {"number": 0, "token": 0}),
        ("{route}/settle", {"number": 99, "token": 1, "result": {"state": "failed"}}),
        ("{route}/settle", {"number": 0, "token": 1, "result": {"state": "running"}}),
        ("{route}/settle", {"number": 0, "token": 1, "result": {"state": "odd"}}),
        ("/v1/entries", {"log": "", "entries": ["x"], "request_id": "r"}),
        ("/v1/entries", {"log": "l", "entries": [], "request_id": "r"}),
        ("/v1/entries", {"log": "l", "entries": ["x" * 1_000_001], "request_id": "r"}),
        (
            "/v1/project/compare_and_set",
            {"project": "p", "path": "a", "field": "f", "expect": None, "value": 1, "by": "x@y"},
        ),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(client, path, body):
    route = make_sweep(client, 1)
    before = client.get(f"{route}/trials").content
    refused = client.post(path.replace("{route}", route), json=body)
    assert refused.status_code == 400, refused.text
    assert error_of(refused)["code"] in ("malformed", "invalid_argument")
    assert client.get(f"{route}/trials").content == before
    assert client.get("/v1/entries?log=l").json()["entries"] == []
    assert len(client.get("/v1/sweeps").json()["sweeps"]) == 1


def test_a_page_ends_where_it_is_large_and_says_how_to_go_on(client, monkeypatch):
    monkeypatch.setattr("quark_backends.service.server.sweep_routes.PAGE_BYTES", 100_000)
    route = make_sweep(client, 0)
    new = [{"parameters": {"text": "x" * 30_000}} for _ in range(7)]
    post(client, f"{route}/trials", trials=new, key="k")
    post(client, "/v1/entries", log="l", entries=["y" * 40_000] * 5, request_id="r")
    for path, name in (
        (f"{route}/trials?", "trials"),
        ("/v1/entries?log=l&", "entries"),
    ):
        sizes, following = [], 0
        while following is not None:
            reply = client.get(f"{path}start={following}").json()
            sizes.append(len(reply[name]))
            following = reply["next"]
        assert sizes == ([3, 3, 1, 0] if name == "trials" else [2, 2, 1, 0])
    assert client.get(f"{route}/trials?start=2&limit=1").json()["trials"][0]["number"] == 2


def test_what_comes_is_bounded_by_what_the_server_takes(tmp_path):
    limits = {"body_bytes": 10_000, "nesting": 5}
    with serving(tmp_path, limits=limits) as server, server.client() as client:
        route = make_sweep(client, 0)
        large = client.post(
            f"{route}/trials",
            json={"trials": [{"parameters": {"x": "y" * 20_000}}], "key": "k"},
        )
        assert (large.status_code, error_of(large)["code"]) == (413, "too_large")
        deep = {"x": [[[[[[[1]]]]]]]}
        for path, body in (
            ("/v1/sweeps", {**SWEEP, "name": "deep", "definition": deep}),
            (f"{route}/trials", {"trials": [{"parameters": deep}], "key": "k"}),
        ):
            refused = client.post(path.replace("{route}", route), json=body)
            assert refused.status_code == 400
            assert "levels" in error_of(refused)["message"]


def test_a_key_may_do_what_its_scope_says(server, client):
    workspace = client.get("/v1/workspace").json()["workspace"]
    route = make_sweep(client, 3)
    with server.client(workspace, "ingest") as worker:
        assert claim(worker, "a", route)["number"] == 0
        assert worker.get(f"{route}/trials").status_code == 200
        assert worker.get(route).status_code == 200
        assert worker.get("/v1/sweeps").status_code == 403
        paused = worker.post(f"{route}/state", json={"state": "paused", "by": "x@y"})
        assert (paused.status_code, error_of(paused)["code"]) == (403, "forbidden")
    with server.client(workspace, "read") as reader:
        assert len(reader.get("/v1/sweeps").json()["sweeps"]) == 1
        for path, body in (
            (f"{route}/claim", {"request_id": "b"}),
            (
                f"{route}/settle",
                {"number": 0, "token": 1, "result": {"state": "failed"}},
            ),
            (f"{route}/trials", {"trials": [{"parameters": {}}], "key": "x"}),
            ("/v1/entries", {"log": "l", "entries": ["x"], "request_id": "r"}),
        ):
            assert reader.post(path, json=body).status_code == 403
    with server.client(workspace, "write") as owner:
        post(owner, f"{route}/state", state="paused", by="ann@lab")
    assert client.get(route).json()["state"] == "paused"


def test_replies_are_the_same_in_msgpack(client):
    route = make_sweep(client, 2)
    for path in (
        "/v1/sweeps",
        route,
        f"{route}/trials",
        "/v1/entries?log=l",
    ):
        packed = client.get(path, headers={"Accept": MSGPACK})
        assert packed.headers["content-type"] == MSGPACK
        assert msgspec.msgpack.decode(packed.content) == client.get(path).json()


def test_each_message_of_sweeps_is_described(client):
    described = client.get("/openapi.json").json()["components"]["schemas"]
    messages = {
        name
        for name, value in vars(protocol).items()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == protocol.__name__
    }
    assert messages
    assert messages <= {*described}
