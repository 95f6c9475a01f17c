"""Whatever is stored, each route's reply has a bound, and is made in a bounded part of memory.

A route that is not told here what to ask of it fails the first test.
"""

import contextlib
import struct

import msgspec
import pytest
from service_fixtures import call, ingest, serving_process
from test_reply_bounds import EMPTY, find_peak_bytes

from quark_backends.service.client.backend import ServiceBackend
from quark_backends.service.protocol import JSON, MSGPACK, ROWS, GenerationRequest, OutputBody
from quark_backends.service.row_frames import decode_frame
from quark_backends.service.server.responses import REPLY_BYTES
from quark_backends.service.server.routes import ROUTES
from quark_core.backends.contract import BackendConfig
from quark_core.backends.curves import CurveQuery
from quark_core.records.json_object import JsonObject
from quark_core.testing.fakes import BatchMaker

# As values, what is stored for any of the questions takes more.
MEMORY_BYTES = 400 * 2**20
ROWS_OF_ONE, BATCHES, RUNS = 400, 6, 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(1_500)]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server with much of everything that routes tell of."""
    folder = tmp_path_factory.mktemp("bounds")
    with serving_process(folder) as running, running.client(timeout=600) as client:
        maker, payload = BatchMaker("many"), JsonObject({"values": EMPTY})
        assert ingest(client, maker.start()).status_code == 200
        for _ in range(BATCHES):
            batch = maker.events(*["x"] * ROWS_OF_ONE, payload=payload)
            assert ingest(client, batch).status_code == 200
        config = {"values": {"a": EMPTY * 20, "text": "x" * 400_000}, "notes": []}
        for number in range(RUNS):
            maker = BatchMaker(f"run{number}")
            assert ingest(client, maker.start()).status_code == 200
            assert ingest(client, maker.lifecycle(("config", config))).status_code == 200
        fill_overlaps(client, payload)
        fill_outputs(client, payload)
        fill_figures(client)
        yield running


def fill_overlaps(client, payload):
    """Batches whose sequences are all the same, which no reader can give in their order."""
    assert ingest(client, BatchMaker("overlaps").start()).status_code == 200
    batch = BatchMaker("overlaps", writer_id="w").events(*["x"] * ROWS_OF_ONE, payload=payload)
    for number in range(BATCHES):
        again = msgspec.structs.replace(batch, number=number)
        assert ingest(client, again).status_code == 200


def fill_outputs(client, payload):
    """Outputs of an analyzer that adds to what was there, analysis after analysis."""
    output = BatchMaker("many", writer_id="o").events(*["x"] * ROWS_OF_ONE, payload=payload)
    body = OutputBody("event", output.count, output.body)
    for _ in range(BATCHES):
        reply = client.post(
            "/v1/runs/many/generations",
            content=msgspec.msgpack.encode(GenerationRequest("rules", False, [body])),
            headers={"Content-Type": MSGPACK},
        )
        assert reply.status_code == 200


def fill_figures(client):
    """A long curve, many layers, many metrics, large sweeps, many keys, tags and groups."""
    maker = BatchMaker("figures")
    assert ingest(client, maker.start(tags=[f"{n:0240}" for n in range(1_000)])).status_code == 200
    for part in range(3):
        points = [("loss", 40_000 * part + step, 1 / (step + 3)) for step in range(40_000)]
        assert ingest(client, maker.metrics(*points)).status_code == 200
    names = {f"{n:0200}": 1 / 3 for n in range(1_000)}
    for step in range(4):
        assert ingest(client, maker.layers(step, names)).status_code == 200
    many = [(f"{n:0200}", 0, 1.0) for n in range(9_000)]
    assert ingest(client, maker.metrics(*many)).status_code == 200
    for number in range(20):
        sweep = {"project": "p", "name": f"s{number}", "definition": {"text": "x" * 1_000_000}}
        assert call(client, "open_sweep", **sweep).status_code == 200
    large = {**sweep, "name": "t", "definition": {"x": ["y"] * 10**6}}
    assert call(client, "open_sweep", **large).status_code == 413
    trials = [{"parameters": {"text": "x" * 30_000}} for _ in range(500)]
    sweep_id = call(client, "open_sweep", **sweep).json()["id"]
    added = call(client, "add_trials", sweep_id=sweep_id, trials=trials, key="k")
    assert added.status_code == 200
    entries = {"log": "log", "entries": ["x" * 100_000] * 100, "request_id": "r"}
    assert call(client, "append_entries", **entries).status_code == 200


@pytest.fixture(scope="module")
def client(process):
    with process.client(timeout=600) as client:
        yield client


def ask(process, client, method, accept=JSON, **arguments):
    reply = call(client, method, accept=accept, **arguments)
    assert reply.status_code == 200, reply.text[:300]
    assert find_peak_bytes(process) < MEMORY_BYTES, (method, arguments, accept)
    return reply


CURVES = [
    {"keys": ["loss"], "entries": None},
    {"keys": ["loss"], "entries": 2**31},
    {"keys": ["loss"], "entries": None, "window": {"high": 9}},
]
COLUMNS = [
    *(["config.text"] * 60, ["config.a"] * 60, ["tags"] * 60, ["notes"] * 60),
    ["config.text", "config.a", "name", "tags", "loss.best", "config.lr"],
]
CHANGES = {"cursor": {}, "kinds": ["event"], "max_rows": 100_000}
GRID = {"kind": "layer", "field": "norm", "summary_type": "activation"}
SERIES = {"run_id": "figures", "key": "loss"}
EVENTS = {"kind": "event", "query": {}}
# Of each method and each other route that tells what is stored, what is asked.
QUESTIONS = {
    "list_runs": [{}, {"limit": 500}],
    "search": [{"search": {}}],
    "search_page": [{"search": {"columns": columns}} for columns in COLUMNS],
    "list_names": [{"project": None, "text": text, "limit": 500} for text in ("", "a")],
    "load_run": [{"run_id": "run0"}, {"run_id": "figures"}],
    "summarize": [{"run_id": "figures"}],
    "read": [
        *({"run_id": run_id, **EVENTS} for run_id in ("many", "overlaps")),
        {"run_id": "figures", "kind": "metric", "query": {}},
    ],
    "read_series": [{**SERIES, "max_points": most} for most in (None, 999999999999)],
    "read_series_many": [{"run_id": "figures", "query": asked} for asked in CURVES],
    "read_heads": [{"run_id": "many"}],
    "read_changes": [
        *({"run_id": run_id, **CHANGES} for run_id in ("many", "overlaps")),
        {"run_id": "figures", **CHANGES, "kinds": ["metric"]},
    ],
    "read_grid": [
        {"run_id": "figures", "query": {**GRID, "bins": bins, "rows": rows}}
        for bins, rows in ((4000, 2000), (1, 2000), (4000, 1))
    ],
    "read_batches": [{"run_id": "many", "writer_id": "writer0", "start": 0, "limit": 1000}],
    "read_outputs": [{"run_id": "many", "kind": "event"}],
    "find_stop": [{"run_id": "many"}],
    "list_groups": [{}],
    "load_project": [{"project": "conformance"}],
    "measure_runs": [{"run_ids": ["many", "figures"]}],
    "list_trash": [{}],
    "measure_store": [{}],
    "list_damaged": [{}],
    "list_sweeps": [{}],
    "load_sweep": [{"sweep_id": "SWEEP"}],
    "list_trials": [{"sweep_id": "SWEEP"}],
    "claim_trial": [{"sweep_id": "SWEEP", "request_id": "r"}],
    "read_entries": [{"log": "log", "start": 0}],
    "POST /v1/trash/collect": [{"dry_run": True}],
    **{f"GET /v1/{what}": [None] for what in ("workspace", "keys", "runs/run0")},
    **{f"GET /{what}": [None] for what in ("healthz", "readyz", "metrics", "openapi.json", "docs")},
}
# These answer with what they were sent, or with one run, sweep, key or project.
ANSWER_OF_WHAT_CAME = {
    *("POST /v1/runs", "POST /v1/runs/{run_id}/batches", "POST /v1/runs/{run_id}/generations"),
    *(f"POST /v1/runs/{{run_id}}/{what}" for what in ("tags", "logs", "status", "heartbeat")),
    *("POST /v1/keys", "POST /v1/keys/{key_id}/rotate", "DELETE /v1/keys/{key_id}"),
    *("edit_run", "request_stop", "update_project", "update_group", "trash_runs", "restore_runs"),
    *("open_sweep", "update_sweep", "add_trials", "settle_trial", "append_entries"),
    *("compare_and_set", "compare_and_set_group"),
}
# These send pieces as they read them.
STREAMS = {f"{method} /v1/runs/{{run_id}}/payloads/{{sha256}}" for method in ("PUT", "HEAD", "GET")}


def list_routes():
    """Methods by their names, and the other routes."""
    return {f"{route.method} {route.path}".removeprefix("POST /v1/call/") for route in ROUTES}


def test_each_route_is_asked_or_answers_of_what_came():
    asked = {question.replace("run0", "{run_id}") for question in QUESTIONS}
    assert list_routes() == asked | ANSWER_OF_WHAT_CAME | STREAMS


@pytest.mark.parametrize("route", QUESTIONS)
def test_no_route_has_a_reply_without_a_bound(process, client, route):
    method, _, path = route.rpartition(" ")
    method, path = (method, path) if method else ("POST", f"/v1/call/{path}")
    accepts = [JSON, MSGPACK, ROWS] if route in ("read", "read_outputs") else [JSON, MSGPACK]
    for body in QUESTIONS[route]:
        if body is not None and "sweep_id" in body:
            body = {**body, "sweep_id": call(client, "list_sweeps").json()[0]["id"]}
        for accept in accepts:
            reply = client.request(method, path, json=body, headers={"Accept": accept})
            assert reply.status_code in (200, 400), (route, reply.status_code, reply.text[:300])
            if accept != ROWS:
                assert len(reply.content) < 1.1 * REPLY_BYTES, (route, body, accept)
            assert find_peak_bytes(process) < MEMORY_BYTES, (route, body, accept)
    assert "Traceback" not in process.log.read_text()


def test_a_page_with_long_cells_goes_on_where_it_ended(process, client):
    asked = {"columns": ["config.text", "config.a", "name"], "project": "conformance", "limit": 4}
    rows, after = [], None
    while not rows or after is not None:
        page = ask(process, client, "search_page", search={**asked, "after": after}).json()
        rows += [(row["run_id"], row["values"]) for row in page["rows"]]
        after = page["next"]
        assert page["rows"]
    shown = dict(rows)
    assert len(shown) == len(rows)
    text, values, _ = shown["run0"]
    assert text == "x" * (len(text) - 1) + "…"
    assert values.startswith("[{}, {}")


def test_batches_with_the_same_sequences_are_all_read(process, client):
    asked = {"run_id": "overlaps", "kind": "event", "query": {"limit": 10_000}}
    assert len(ask(process, client, "read", **asked).json()) == BATCHES * ROWS_OF_ONE


def test_outputs_are_read_newest_first_as_json_and_whole_as_rows(process, client):
    asked = {"run_id": "many", "kind": "event"}
    found = ask(process, client, "read_outputs", **asked).json()
    assert found[-1]["writer_id"] == f"rules.{BATCHES}"
    assert 0 < len(found) <= BATCHES * ROWS_OF_ONE
    rows = ask(process, client, "read_outputs", ROWS, **asked)
    data, place = rows.content, 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place)
        frame, place = decode_frame(data[place + 4 : place + 4 + size]), place + 4 + size
    assert frame.rows == BATCHES * ROWS_OF_ONE


def test_a_client_reads_every_point_as_rows_where_a_reply_has_no_room(
    process, monkeypatch, tmp_path
):
    monkeypatch.setenv("QUARK_USER_KEY", process.make_key())
    config = BackendConfig(storage_dir=tmp_path, location=process.url, read_only=True)
    with contextlib.closing(ServiceBackend(config)) as backend:
        (curve,) = backend.read_series_many(
            "figures", CurveQuery.build(["loss"], entries=None)
        ).curves
        assert len(curve) == 120_000
        few = backend.read_series_many("figures", CurveQuery.build(["loss"], entries=2**31))
        assert len(few.curves[0]) == 100_000
