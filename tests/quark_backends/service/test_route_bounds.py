"""Whatever is stored, each route's reply has a bound, and is made in a bounded part of memory.

A route that is not told here what to ask of it fails the first test.
"""

import contextlib
import struct

import msgspec
import pytest
from service_fixtures import ingest, serving_process
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
        assert client.post("/v1/sweeps", json=sweep).status_code == 200
    refused = client.post(
        "/v1/sweeps", json={**sweep, "name": "t", "definition": {"x": ["y"] * 10**6}}
    )
    assert refused.status_code == 413
    trials = [{"parameters": {"text": "x" * 30_000}} for _ in range(500)]
    sweep_id = client.post("/v1/sweeps", json=sweep).json()["id"]
    added = client.post(f"/v1/sweeps/{sweep_id}/trials", json={"trials": trials, "key": "k"})
    assert added.status_code == 200
    entries = {"log": "log", "entries": ["x" * 100_000] * 100, "request_id": "r"}
    assert client.post("/v1/entries", json=entries).status_code == 200


@pytest.fixture(scope="module")
def client(process):
    with process.client(timeout=600) as client:
        yield client


def ask(process, client, method, path, body=None, accept=JSON):
    reply = client.request(method, path, json=body, headers={"Accept": accept})
    assert reply.status_code == 200, reply.text[:300]
    assert find_peak_bytes(process) < MEMORY_BYTES, (path, body, accept)
    return reply


CURVES = [{"keys": ["loss"]}, {"keys": ["loss"], "entries": 2**31}, {"keys": ["loss"], "high": 9}]
COLUMNS = [
    *(["config.text"] * 60, ["config.a"] * 60, ["tags"] * 60, ["notes"] * 60),
    ["config.text", "config.a", "name", "tags", "loss.best", "config.lr"],
]
CHANGES = {"cursor": {}, "kinds": ["event"], "max_rows": 100_000}
# Of each route that tells what is stored, what is asked: a path, and bodies.
QUESTIONS = {
    "GET /v1/workspace": [("/v1/workspace", None)],
    "GET /v1/runs": [("/v1/runs", None), ("/v1/runs?limit=500", None)],
    "POST /v1/runs/search": [("/v1/runs/search", {"start": 0})],
    "POST /v1/runs/page": [("/v1/runs/page", {"columns": columns}) for columns in COLUMNS],
    "GET /v1/names": [("/v1/names?limit=500", None), ("/v1/names?text=a&limit=500", None)],
    "GET /v1/runs/{run_id}": [("/v1/runs/run0", None), ("/v1/runs/figures", None)],
    "GET /v1/runs/{run_id}/summary": [("/v1/runs/figures/summary", None)],
    "POST /v1/runs/{run_id}/records/{kind}/read": [
        ("/v1/runs/many/records/event/read", {}),
        ("/v1/runs/overlaps/records/event/read", {}),
        ("/v1/runs/figures/records/metric/read", {}),
    ],
    "GET /v1/runs/{run_id}/series": [
        ("/v1/runs/figures/series?key=loss", None),
        ("/v1/runs/figures/series?key=loss&max_points=999999999999", None),
    ],
    "POST /v1/runs/{run_id}/curves": [("/v1/runs/figures/curves", asked) for asked in CURVES],
    "GET /v1/runs/{run_id}/heads": [("/v1/runs/many/heads", None)],
    "POST /v1/runs/{run_id}/changes": [
        *((f"/v1/runs/{run_id}/changes", CHANGES) for run_id in ("many", "overlaps")),
        ("/v1/runs/figures/changes", {**CHANGES, "kinds": ["metric"]}),
    ],
    "GET /v1/runs/{run_id}/grid": [
        (f"/v1/runs/figures/grid?kind=layer&field=norm&summary_type=activation&{size}", None)
        for size in ("bins=4000&rows=2000", "bins=1&rows=2000", "bins=4000&rows=1")
    ],
    "GET /v1/runs/{run_id}/writers/{writer_id}/batches": [
        ("/v1/runs/many/writers/writer0/batches?start=0&limit=1000", None)
    ],
    "GET /v1/runs/{run_id}/outputs/{kind}": [("/v1/runs/many/outputs/event", None)],
    "GET /v1/runs/{run_id}/stop": [("/v1/runs/many/stop", None)],
    "GET /v1/groups": [("/v1/groups", None)],
    "GET /v1/project": [("/v1/project?project=conformance", None)],
    "POST /v1/runs/usage": [("/v1/runs/usage", {"run_ids": ["many", "figures"]})],
    "GET /v1/trash": [("/v1/trash", None)],
    "POST /v1/trash/collect": [("/v1/trash/collect", {"dry_run": True})],
    "GET /v1/usage": [("/v1/usage", None)],
    "GET /v1/damaged": [("/v1/damaged", None)],
    "GET /v1/keys": [("/v1/keys", None)],
    "GET /v1/sweeps": [("/v1/sweeps", None)],
    "GET /v1/sweeps/{sweep_id}": [("/v1/sweeps/SWEEP", None)],
    "GET /v1/sweeps/{sweep_id}/trials": [("/v1/sweeps/SWEEP/trials", None)],
    "POST /v1/sweeps/{sweep_id}/claim": [("/v1/sweeps/SWEEP/claim", {"request_id": "r"})],
    "GET /v1/entries": [("/v1/entries?log=log", None)],
    "GET /healthz": [("/healthz", None)],
    "GET /readyz": [("/readyz", None)],
    "GET /metrics": [("/metrics", None)],
    "GET /openapi.json": [("/openapi.json", None)],
    "GET /docs": [("/docs", None)],
}
# These answer with what they were sent, or with one run, sweep, key or project.
ANSWER_OF_WHAT_CAME = {
    *("POST /v1/runs", "POST /v1/runs/{run_id}/batches", "POST /v1/runs/{run_id}/generations"),
    *(f"POST /v1/runs/{{run_id}}/{what}" for what in ("tags", "logs", "status", "heartbeat")),
    *("POST /v1/runs/{run_id}/edit", "POST /v1/runs/{run_id}/stop", "POST /v1/groups"),
    *("POST /v1/project", "POST /v1/runs/trash", "POST /v1/runs/restore", "POST /v1/keys"),
    *("DELETE /v1/runs/{run_id}", "POST /v1/keys/{key_id}/rotate", "DELETE /v1/keys/{key_id}"),
    *("POST /v1/sweeps", "POST /v1/sweeps/{sweep_id}/state", "POST /v1/sweeps/{sweep_id}/trials"),
    *("POST /v1/sweeps/{sweep_id}/settle", "POST /v1/entries"),
    *(f"POST /v1/{what}/compare_and_set" for what in ("runs/{run_id}", "groups", "project")),
}
# These send pieces as they read them.
STREAMS = {f"{method} /v1/runs/{{run_id}}/payloads/{{sha256}}" for method in ("PUT", "HEAD", "GET")}


def list_routes():
    return sorted(f"{route.method} {route.path}" for route in ROUTES)


def test_each_route_is_asked_or_answers_of_what_came():
    assert set(list_routes()) == QUESTIONS.keys() | ANSWER_OF_WHAT_CAME | STREAMS


@pytest.mark.parametrize("route", QUESTIONS)
def test_no_route_has_a_reply_without_a_bound(process, client, route):
    method, (media,) = (
        route.split(" ")[0],
        {each.media for each in ROUTES if f"{each.method} {each.path}" == route},
    )
    accepts = [JSON, MSGPACK, ROWS] if ROWS in media else [JSON, MSGPACK]
    sweep = client.get("/v1/sweeps").json()["sweeps"][0]["id"] if "sweep" in route else ""
    for path, body in QUESTIONS[route]:
        for accept in accepts:
            asked = path.replace("SWEEP", sweep)
            reply = client.request(method, asked, json=body, headers={"Accept": accept})
            assert reply.status_code in (200, 400), (asked, reply.status_code, reply.text[:300])
            if accept != ROWS:
                assert len(reply.content) < 1.1 * REPLY_BYTES, (asked, body, accept)
            assert find_peak_bytes(process) < MEMORY_BYTES, (asked, body, accept)
    assert "Traceback" not in process.log.read_text()


def test_a_page_with_long_cells_goes_on_where_it_ended(process, client):
    asked = {"columns": ["config.text", "config.a", "name"], "project": "conformance"}
    rows, after = [], ""
    while after is not None:
        page = ask(
            process, client, "POST", "/v1/runs/page", {**asked, "after": after or None, "limit": 4}
        )
        rows += page.json()["rows"]
        after = page.json()["next"]
        assert page.json()["rows"]
    shown = dict(rows)
    assert len(shown) == len(rows)
    text, values, _ = shown["run0"]
    assert text == "x" * (len(text) - 1) + "…"
    assert values.startswith("[{}, {}")


def test_batches_with_the_same_sequences_are_all_read(process, client):
    path = "/v1/runs/overlaps/records/event/read"
    found = ask(process, client, "POST", path, {"limit": 10_000}).json()["records"]
    assert len(found) == BATCHES * ROWS_OF_ONE


def test_outputs_are_read_newest_first_as_json_and_whole_as_rows(process, client):
    reply = ask(process, client, "GET", "/v1/runs/many/outputs/event")
    found = reply.json()["records"]
    assert found[-1]["writer_id"] == f"rules.{BATCHES}"
    assert 0 < len(found) <= BATCHES * ROWS_OF_ONE
    rows = ask(process, client, "GET", "/v1/runs/many/outputs/event", accept=ROWS)
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
