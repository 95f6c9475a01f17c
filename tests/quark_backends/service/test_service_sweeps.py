"""Sweeps, trials and logs as the routes of a service have them, for whoever speaks HTTP."""

import pytest
from service_fixtures import ask, call, error_of, serving

from quark_backends.service.protocol import NEXT_PAGE

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


def make_sweep(client, trials, **changes):
    """A sweep with trials; returns its id."""
    sweep_id = ask(client, "open_sweep", **{**SWEEP, **changes})["id"]
    if trials:
        new = [{"parameters": {"lr": place / 8}} for place in range(trials)]
        ask(client, "add_trials", sweep_id=sweep_id, trials=new, key="all")
    return sweep_id


def claim(client, request_id, sweep_id=None, **named):
    sweep_id = sweep_id or ask(client, "list_sweeps")[0]["id"]
    return ask(client, "claim_trial", sweep_id=sweep_id, request_id=request_id, **named)


def list_trials(client, sweep_id):
    return ask(client, "list_trials", sweep_id=sweep_id)


def test_a_sweep_is_worked_through_by_requests_alone(client):
    sweep_id = make_sweep(client, 2)
    first, second, none = (claim(client, name) for name in "abc")
    assert [first["number"], second["number"], none] == [0, 1, None]
    assert (first["parameters"], first["token"], first["state"]) == ({"lr": 0.0}, 1, "running")
    held = {name: first[name] for name in ("sweep_id", "number", "token")}
    started = post(client, "/v1/runs", project="vision", run_id="run0", trial=held)
    assert (started["trial"], started["superseded"]) == (held, False)
    post(client, "/v1/runs/run0/heartbeat")
    said = {"state": "completed", "values": [0.9], "step": 3}
    post(client, "/v1/runs/run0/status", status="completed", trial=said)
    settled = ask(
        client,
        "settle_trial",
        sweep_id=sweep_id,
        number=1,
        token=1,
        result={"state": "pruned", "values": [0.1], "reason": "worse than the rest"},
    )
    assert (settled["state"], settled["reason"]) == ("pruned", "worse than the rest")
    (one, other) = list_trials(client, sweep_id)
    assert (one["state"], one["values"], one["step"]) == ("completed", [0.9], 3)
    assert one["run_id"] == "run0"
    assert other == settled
    sweep = ask(client, "load_sweep", sweep_id=sweep_id)
    assert sweep["counts"] == {"completed": 1, "pruned": 1}
    assert ask(client, "list_sweeps", project="vision") == [sweep]
    assert ask(client, "list_sweeps", project="speech") == []


def test_the_status_of_a_run_alone_settles_its_trial(client):
    sweep_id = make_sweep(client, 1, max_failures=2)
    for attempt, (status, state, failures) in enumerate(
        [("interrupted", "suspended", 0), ("failed", "waiting", 1), ("failed", "broken", 2)]
    ):
        trial = claim(client, f"claim{attempt}")
        assert (trial["token"], trial["state"]) == (attempt + 1, "running")
        held = {name: trial[name] for name in ("sweep_id", "number", "token")}
        run_id = f"run{attempt}"
        post(client, "/v1/runs", project="vision", run_id=run_id, trial=held)
        post(client, f"/v1/runs/{run_id}/status", status=status)
        (found,) = list_trials(client, sweep_id)
        assert (found["state"], found["failures"]) == (state, failures)
    assert "failed 2 times" in found["reason"]
    assert claim(client, "more") is None


def test_a_heartbeat_renews_the_lease_of_the_newest_claim_only(client):
    sweep_id = make_sweep(client, 1)
    trial = claim(client, "a", lease_s=0.001)
    held = {name: trial[name] for name in ("sweep_id", "number", "token")}
    late = claim(client, "b", lease_s=600.0)
    while late is None:
        late = claim(client, "b", lease_s=600.0)
    assert late["token"] == 2
    post(client, "/v1/runs", project="vision", run_id="late", trial={**held, "token": 2})
    post(client, "/v1/runs", project="vision", run_id="early", trial=held)
    before = list_trials(client, sweep_id)[0]
    post(client, "/v1/runs/early/heartbeat")
    assert list_trials(client, sweep_id)[0] == before
    post(client, "/v1/runs/late/heartbeat")
    after = list_trials(client, sweep_id)[0]
    assert after["lease_until"] > before["lease_until"]
    # What the one that was taken from says changes nothing, and its run is kept.
    post(client, "/v1/runs/early/status", status="completed")
    assert list_trials(client, sweep_id)[0]["state"] == "running"
    early = ask(client, "load_run", run_id="early")
    assert (early["run"]["status"], early["superseded"]) == ("completed", True)
    assert ask(client, "load_run", run_id="late")["superseded"] is False
    refused = ask(
        client, "settle_trial", sweep_id=sweep_id, number=0, token=1, result={"state": "completed"}
    )
    assert (refused["token"], refused["state"]) == (2, "running")


CLAIM = {"sweep_id": "SWEEP", "request_id": "a"}
TRIALS = {"sweep_id": "SWEEP", "trials": [{"parameters": {"x": 1}}], "key": "k"}
SETTLE = {"sweep_id": "SWEEP", "number": 0, "token": 1}
ENTRIES = {"log": "l", "entries": ["x"], "request_id": "r"}


def put_in(sweep_id, arguments):
    return {name: sweep_id if value == "SWEEP" else value for name, value in arguments.items()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("open_sweep", {**SWEEP, "name": ""}, None),
        ("open_sweep", {**SWEEP, "max_failures": 0}, None),
        ("open_sweep", {**SWEEP, "definition": {"other": 1}}, None),
        ("open_sweep", {**SWEEP, "definition": [1]}, "definition"),
        ("add_trials", {**TRIALS, "trials": []}, None),
        ("add_trials", {**TRIALS, "trials": [{"parameters": {"": 1}}]}, None),
        ("add_trials", {**TRIALS, "trials": [{}]}, "trials[0]"),
        ("add_trials", {**TRIALS, "key": ""}, None),
        ("claim_trial", {"sweep_id": "SWEEP"}, None),
        ("claim_trial", {**CLAIM, "request_id": ""}, None),
        ("claim_trial", {**CLAIM, "request_id": "a\0b"}, "request_id"),
        ("claim_trial", {**CLAIM, "lease_s": 0.0}, None),
        ("claim_trial", {**CLAIM, "lease_s": 1e300}, None),
        ("claim_trial", {**CLAIM, "wish": {"number": -1}}, "wish.number"),
        ("claim_trial", {**CLAIM, "wish": {"where": "param.lr >"}}, None),
        ("claim_trial", {**CLAIM, "wish": {"number": 2**64}}, "wish.number"),
        ("claim_trial", {**CLAIM, "worker": {"host": "h", "pid": -1, "started": ""}}, "worker.pid"),
        (
            "claim_trial",
            {**CLAIM, "worker": {"host": "h" * 2000, "pid": 1, "started": ""}},
            "worker.host",
        ),
        ("settle_trial", {**SETTLE, "token": 0}, "token"),
        ("settle_trial", {**SETTLE, "number": -1}, "number"),
        ("settle_trial", {**SETTLE, "number": 99, "result": {"state": "failed"}}, None),
        ("settle_trial", {**SETTLE, "result": {"state": "running"}}, None),
        ("settle_trial", {**SETTLE, "result": {"state": "odd"}}, None),
        ("append_entries", {**ENTRIES, "log": ""}, None),
        ("append_entries", {**ENTRIES, "entries": []}, None),
        ("append_entries", {**ENTRIES, "entries": ["x" * 1_000_001]}, None),
        ("append_entries", {**ENTRIES, "entries": "x"}, "entries"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(client, method, arguments, field):
    sweep_id = make_sweep(client, 1)
    before = list_trials(client, sweep_id)
    refused = call(client, method, **put_in(sweep_id, arguments))
    assert refused.status_code == 400, refused.text
    assert error_of(refused)["code"] in ("malformed", "invalid_argument")
    if field is not None:
        assert error_of(refused)["field"] == field
    assert list_trials(client, sweep_id) == before
    assert ask(client, "read_entries", log="l", start=0) == []
    assert len(ask(client, "list_sweeps")) == 1


def test_a_page_ends_where_it_is_large_and_says_how_to_go_on(client, monkeypatch):
    monkeypatch.setattr("quark_backends.service.server.call_routes.PAGE_BYTES", 100_000)
    sweep_id = make_sweep(client, 0)
    new = [{"parameters": {"text": "x" * 30_000}} for _ in range(7)]
    ask(client, "add_trials", sweep_id=sweep_id, trials=new, key="k")
    ask(client, "append_entries", log="l", entries=["y" * 40_000] * 5, request_id="r")
    sizes, after = [], None
    while not sizes or after is not None:
        reply = call(client, "list_trials", sweep_id=sweep_id, after=after)
        sizes.append(len(reply.json()))
        after = reply.headers.get(NEXT_PAGE)
    assert sizes == [3, 3, 1, 0]
    starts = (0, 2, 4, 5)
    sizes = [len(ask(client, "read_entries", log="l", start=start)) for start in starts]
    assert sizes == [2, 2, 1, 0]
    (trial,) = ask(client, "list_trials", sweep_id=sweep_id, start=2, limit=1)
    assert trial["number"] == 2


def test_what_comes_is_bounded_by_what_the_server_takes(tmp_path):
    limits = {"body_bytes": 10_000, "nesting": 5}
    with serving(tmp_path, limits=limits) as server, server.client() as client:
        sweep_id = make_sweep(client, 0)
        asked = put_in(sweep_id, TRIALS)
        large = {**asked, "trials": [{"parameters": {"x": "y" * 20_000}}]}
        refused = call(client, "add_trials", **large)
        assert (refused.status_code, error_of(refused)["code"]) == (413, "too_large")
        deep = {"x": [[[[[[[[1]]]]]]]]}
        for method, arguments in (
            ("open_sweep", {**SWEEP, "name": "deep", "definition": deep}),
            ("add_trials", {**asked, "trials": [{"parameters": deep}]}),
        ):
            refused = call(client, method, **arguments)
            assert refused.status_code == 400
            assert "levels" in error_of(refused)["message"]


def test_a_key_may_do_what_its_scope_says(server, client):
    workspace = client.get("/v1/workspace").json()["workspace"]
    sweep_id = make_sweep(client, 3)
    with server.client(workspace, "ingest") as worker:
        assert claim(worker, "a", sweep_id)["number"] == 0
        assert len(list_trials(worker, sweep_id)) == 3
        assert ask(worker, "load_sweep", sweep_id=sweep_id)["id"] == sweep_id
        assert call(worker, "list_sweeps").status_code == 403
        paused = call(worker, "update_sweep", sweep_id=sweep_id, state="paused", by="x@y")
        assert (paused.status_code, error_of(paused)["code"]) == (403, "forbidden")
    with server.client(workspace, "read") as reader:
        assert len(ask(reader, "list_sweeps")) == 1
        for method, arguments in (
            ("claim_trial", {**CLAIM, "request_id": "b"}),
            ("settle_trial", {**SETTLE, "result": {"state": "failed"}}),
            ("add_trials", TRIALS),
            ("append_entries", ENTRIES),
        ):
            assert call(reader, method, **put_in(sweep_id, arguments)).status_code == 403
    with server.client(workspace, "write") as owner:
        ask(owner, "update_sweep", sweep_id=sweep_id, state="paused", by="ann@lab")
    assert ask(client, "load_sweep", sweep_id=sweep_id)["state"] == "paused"
