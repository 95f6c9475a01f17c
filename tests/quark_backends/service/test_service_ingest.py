"""Batches in: over msgpack and JSON, compressed or not, each stored exactly once."""

import gzip
import threading

import msgspec
import pytest
from service_fixtures import call, encode_ingest, error_of, ingest, serving

from quark_backends.service.protocol import JSON, MSGPACK
from quark_core.records.codec import zstd
from quark_core.testing.fakes import BatchMaker


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("ingest")) as running:
        yield running


@pytest.fixture
def client(server, request):
    with server.client("w_" + str(abs(hash(request.node.name)) % 10**9)) as client:
        yield client


def values(client, run_id, kind="metric"):
    reply = call(client, "read", run_id=run_id, kind=kind, query={})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_batches_are_acknowledged_and_read_back(client):
    maker = BatchMaker("run1")
    sent = [maker.start(tags=["a"]), maker.metrics(("loss", 0, 1.0), ("loss", 1, 0.5))]
    reply = ingest(client, *sent)
    assert (reply.status_code, reply.json()) == (200, {"batches": 2})
    assert reply.headers["quark-protocol"] == "1"
    assert [record["value"] for record in values(client, "run1")] == [1.0, 0.5]
    run = call(client, "load_run", run_id="run1").json()
    assert run["run"]["tags"] == ["a"]
    assert run["config"]["values"] == {"lr": 0.1}
    asked = {"run_id": "run1", "writer_id": "writer0", "start": 0, "limit": 9}
    found = call(client, "read_batches", accept=MSGPACK, **asked)
    bodies = [batch["body"] for batch in msgspec.msgpack.decode(found.content)]
    assert bodies == [batch.body for batch in sent]


@pytest.mark.parametrize("encoding", ["identity", "zstd", "zstd without a size", "gzip"])
def test_a_body_may_be_compressed(client, encoding):
    maker = BatchMaker("run1")
    body = encode_ingest(maker.start(), maker.metrics(*(("loss", i, 0.0) for i in range(5000))))
    if encoding == "gzip":
        body = gzip.compress(body)
    elif encoding.startswith("zstd"):
        stream = zstd.ZstdCompressor()
        body = zstd.compress(body) if encoding == "zstd" else stream.compress(body) + stream.flush()
    reply = client.post(
        "/v1/runs/run1/batches",
        content=body,
        headers={"Content-Type": MSGPACK, "Content-Encoding": encoding.split()[0]},
    )
    assert reply.json() == {"batches": 2}
    assert len(values(client, "run1")) == 5000


def test_what_comes_again_is_stored_once_and_acknowledged_again(client):
    maker = BatchMaker("run1")
    start, metrics = maker.start(), maker.metrics(("loss", 0, 1.0))
    for _ in range(3):
        assert ingest(client, start, metrics).json() == {"batches": 2}
    assert len(values(client, "run1")) == 1


def test_other_content_under_the_same_number_is_a_conflict(client):
    maker = BatchMaker("run1")
    start, metrics = maker.start(), maker.metrics(("loss", 0, 1.0))
    ingest(client, start, metrics)
    other = msgspec.structs.replace(
        BatchMaker("run1").metrics(("loss", 0, 2.0)), number=metrics.number
    )
    reply = ingest(client, other)
    assert (reply.status_code, error_of(reply)["code"]) == (409, "conflict")
    assert [record["value"] for record in values(client, "run1")] == [1.0]


def test_an_attempt_is_started_by_one_process_only(client):
    ingest(client, BatchMaker("run1").start())
    reply = ingest(client, BatchMaker("run1", writer_id="other").start())
    assert (reply.status_code, error_of(reply)["code"]) == (409, "conflict")
    assert "was started by another process" in error_of(reply)["message"]


def test_a_request_is_stored_whole_or_not_at_all(client):
    maker = BatchMaker("run1")
    ingest(client, maker.start())
    good = maker.metrics(("loss", 0, 1.0))
    bad = BatchMaker("run1", writer_id="other").start()
    assert ingest(client, good, bad).status_code == 409
    assert values(client, "run1") == []
    assert ingest(client, good).status_code == 200


def test_a_run_that_was_never_started_takes_nothing(client):
    reply = ingest(client, BatchMaker("nobody").metrics(("loss", 0, 1.0)))
    assert (reply.status_code, error_of(reply)["code"]) == (422, "rejected")
    assert "never started" in error_of(reply)["message"]


@pytest.mark.long
def test_requests_that_wait_together_are_stored_together_and_refused_alone(server, client):
    runs = [BatchMaker(f"run{i}") for i in range(12)]
    key = client.headers["Authorization"].removeprefix("Bearer ")
    replies = {}
    barrier = threading.Barrier(len(runs))

    def send(index):
        maker = runs[index]
        with server.client(key=key) as own:
            barrier.wait(60)
            batches = [maker.metrics(("loss", step, 1.0)) for step in range(3)]
            # Every third one never started its run.
            sent = batches if index % 3 == 0 else [maker.start(), *batches]
            replies[index] = ingest(own, *sent).status_code

    threads = [threading.Thread(target=send, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert replies == {index: 422 if index % 3 == 0 else 200 for index in range(len(runs))}
    listed = {run["run"]["id"] for run in call(client, "list_runs").json()}
    assert listed == {f"run{index}" for index in range(len(runs)) if index % 3}


def test_json_as_people_send_it(client):
    started = client.post(
        "/v1/runs",
        json={
            "project": "demo",
            "run_id": "by-hand",
            "tags": ["b", "a"],
            "config": {"lr": 0.1, "api_key": "sk-123456789"},
            "store": "laptop",
        },
    )
    assert started.status_code == 201
    assert started.json()["run"]["tags"] == ["a", "b"]
    assert started.json()["config"]["values"] == {"lr": 0.1, "api_key": "[redacted]"}
    sent = {
        "batches": [
            {
                "writer_id": "curl",
                "number": 0,
                "kind": "metric",
                "records": [
                    {"metric_key": "val/acc@1", "value": 1, "step": 0},
                    {"metric_key": "loss", "value": 0.5, "step": 0, "metadata": {"a": [1]}},
                    {
                        "metric_key": "loss",
                        "value": 0.25,
                        "epoch": 3,
                        "timestamp": "2026-01-02T03:04:05Z",
                    },
                ],
            },
            {
                "writer_id": "curl",
                "number": 1,
                "kind": "event",
                "records": [{"event_type": "checkpoint_saved", "severity": "info"}],
            },
        ]
    }
    for _ in range(2):  # sent again it is the same, though its records say no time
        reply = client.post("/v1/runs/by-hand/batches", json=sent)
        assert (reply.status_code, reply.json()) == (200, {"batches": 2})
    found = values(client, "by-hand")
    assert [record["metric_key"] for record in found] == ["val/acc_x40_1", "loss", "loss"]
    assert found[1]["metadata"] == {"a": [1]}
    assert found[2]["timestamp"] == "2026-01-02T03:04:05.000000Z"
    assert values(client, "by-hand", "event")[0]["event_type"] == "checkpoint_saved"
    sent["batches"][0]["records"][0]["value"] = 2
    assert client.post("/v1/runs/by-hand/batches", json=sent).status_code == 409
    listed = call(client, "list_runs", store="laptop").json()
    assert [run["run"]["id"] for run in listed] == ["by-hand"]
    assert call(client, "list_runs", store="other").json() == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"metric_key": "loss", "value": "high", "step": 0}, "value must be float"),
        ({"metric_key": "loss", "value": 1.0}, "requires a step or an epoch"),
        ({"value": 1.0, "step": 0}, "metric_key is missing"),
        ({"metric_key": "loss", "value": 1.0, "step": 0, "colour": "red"}, "no field 'colour'"),
        ({"metric_key": "loss", "value": 1.0, "step": -1}, "must not be negative"),
        ({"metric_key": "loss", "value": 1.0, "step": 2**70}, "must fit in 64 bits"),
        ({"metric_key": "loss", "value": 1.0, "step": 0, "timestamp": "soon"}, "ISO 8601"),
        ({"metric_key": "", "value": 1.0, "step": 0}, "must not be empty"),
    ],
)
def test_a_record_that_does_not_fit_is_named(client, record, message):
    client.post("/v1/runs", json={"project": "demo", "run_id": "by-hand"})
    batch = {"writer_id": "curl", "number": 0, "kind": "metric"}
    good = {"metric_key": "loss", "value": 1.0, "step": 0}
    reply = client.post(
        "/v1/runs/by-hand/batches", json={"batches": [{**batch, "records": [good, record]}]}
    )
    assert reply.status_code == 400
    assert error_of(reply)["field"] == "batches[0].records[1]"
    assert message in error_of(reply)["message"]
    assert values(client, "by-hand") == []


def test_control_routes_do_it_once_under_one_idempotency_key(client):
    named = {"Idempotency-Key": "start-1"}
    first = client.post("/v1/runs", json={"project": "demo"}, headers=named)
    again = client.post("/v1/runs", json={"project": "demo"}, headers=named)
    assert first.json()["run"] == again.json()["run"]
    other = client.post("/v1/runs", json={"project": "another"}, headers=named)
    assert (other.status_code, error_of(other)["code"]) == (409, "conflict")
    run_id = first.json()["run"]["id"]
    for _ in range(2):
        logged = client.post(
            f"/v1/runs/{run_id}/logs",
            json={"message": "half way", "identifier": "Warning", "step": 5},
            headers={"Idempotency-Key": "log-1"},
        )
        assert logged.status_code == 200
    (line,) = values(client, run_id, "event")
    assert line["payload"] == {"message": "half way", "identifier": "Warning"}
    assert (line["severity"], line["step"]) == ("warning", 5)
    for _ in range(2):  # without a name each is another
        client.post(f"/v1/runs/{run_id}/logs", json={"message": "again"})
    assert len(values(client, run_id, "event")) == 3


def test_a_run_lives_from_its_start_to_its_status(client):
    client.post("/v1/runs", json={"project": "demo", "run_id": "parent"})
    child = client.post(
        "/v1/runs", json={"project": "demo", "run_id": "child", "parent_run_id": "parent"}
    ).json()
    assert child["run"]["lineage_root_run_id"] == "parent"
    assert child["state"] == "running"
    assert client.post("/v1/runs/child/heartbeat", json={}).status_code == 200
    assert client.post("/v1/runs/child/tags", json={"tags": ["x", "y"]}).status_code == 200
    assert client.post("/v1/runs/child/status", json={"status": "completed"}).status_code == 200
    found = call(client, "load_run", run_id="child").json()
    assert (found["state"], found["run"]["tags"]) == ("completed", ["x", "y"])
    missing = client.post("/v1/runs/nobody/tags", json={"tags": ["x"]})
    assert error_of(missing)["code"] == "run_not_found"
    missing = client.post("/v1/runs", json={"project": "p", "parent_run_id": "nobody"})
    assert error_of(missing)["code"] == "run_not_found"
    taken = client.post("/v1/runs", json={"project": "p", "run_id": "child"})
    assert error_of(taken)["code"] == "conflict"


def test_a_fork_says_which_run_it_leaves_and_where(client):
    maker = BatchMaker("parent")
    start = maker.start()
    points = maker.metrics(*[("loss", step, float(step)) for step in range(4)])
    assert ingest(client, start, points).status_code == 200
    fork = {"project": "demo", "run_id": "child", "parent_run_id": "parent", "fork_step": 1}
    child = client.post("/v1/runs", json=fork).json()
    assert (child["run"]["parent_run_id"], child["run"]["fork_step"]) == ("parent", 1)
    summary = call(client, "summarize", run_id="child").json()
    assert (summary["metrics"]["loss"]["count"], summary["newest_step"]) == (2, 1)
    for wrong in ({"fork_step": -1, "parent_run_id": "parent"}, {"fork_step": 1}):
        refused = client.post("/v1/runs", json={"project": "demo", **wrong})
        assert error_of(refused)["code"] == "invalid_argument"


def test_replies_and_errors_come_in_msgpack_too(client):
    reply = call(client, "load_run", accept=MSGPACK, run_id="nobody")
    assert reply.headers["content-type"] == MSGPACK
    assert msgspec.msgpack.decode(reply.content)["error"]["code"] == "run_not_found"
    reply = client.get("/v1/workspace", headers={"Accept": f"text/html, {MSGPACK};q=0.5, {JSON}"})
    assert msgspec.msgpack.decode(reply.content)["protocol"] == 1
