"""Counters that a client chooses and that others go on from: none of them can be used up."""

import contextlib

import msgspec
import pytest
from postgres_server import new_database
from service_fixtures import ask, error_of, ingest, serving

from quark_core.records import ArtifactLinkRecord, MetricRecord
from quark_core.testing.fakes import BatchMaker

LAST = 2**63 - 1
LIMITS = {"requests_per_s": 1e6, "rows_per_s": 1e9}
READS = {
    "load_run": {},
    "summarize": {},
    "read_heads": {},
    "read_series": {"key": "loss", "max_points": 9},
    "read_batches": {"writer_id": "writer0", "start": 0, "limit": 100},
    "read_grid": {"query": {"kind": "layer", "field": "norm", "summary_type": "activation"}},
}
KINDS = ["metric", "event", "layer", "artifact_link"]

numbers = iter(range(10**9))


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def client(request, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        url = None
        if request.param == "postgres":
            url = stack.enter_context(new_database(request.getfixturevalue("postgres_url")))
        folder = tmp_path_factory.mktemp("counters")
        server = stack.enter_context(serving(folder, store_url=url, limits=LIMITS))
        yield stack.enter_context(server.client())


@pytest.fixture
def maker(client):
    """The writer of a run that has begun."""
    made = BatchMaker(f"run{next(numbers)}")
    assert ingest(client, made.start()).status_code == 200
    return made


def make_metric(maker, sequence=None, **where):
    head = list(maker._head("metric"))
    head[4] = head[4] if sequence is None else sequence
    return maker.batch([MetricRecord(*head, "loss", None, "loss", 1.0, **where)])


def make_link(maker, version):
    head = maker._head("artifact_link")
    link = ("alias", "model", maker.run_id, "a-artifact-0", "0" * 64)
    return maker.batch([ArtifactLinkRecord(*head, *link, version=version, alias="best")])


def check_goes_on(client, run_id):
    """Every reader answers, cursors go on, and the run is resumed, logged to and tagged."""
    asked = {"run_id": run_id}
    for method, more in READS.items():
        ask(client, method, **asked, **more)
    for kind in KINDS:
        ask(client, "read", **asked, kind=kind, query={})
    curves = ask(client, "read_series_many", **asked, query={"keys": ["loss"], "entries": 5})
    for cursor in ({}, curves["cursor"], ask(client, "read_heads", **asked)["cursor"]):
        since = {**asked, "kinds": KINDS, "max_rows": 10_000}
        changes = ask(client, "read_changes", **since, cursor=cursor)
        ask(client, "read_changes", **since, cursor=changes["cursor"])
    attempt = ask(client, "load_run", **asked)["run"]["attempt"] + 1
    writer = BatchMaker(run_id, attempt=attempt, writer_id=f"w{attempt}")
    for batch in (writer.start(), make_metric(writer, step=3), writer.layers(3, {"a": 1.0})):
        reply = ingest(client, batch)
        assert reply.status_code == 200, reply.text
    runs = f"/v1/runs/{run_id}"
    assert client.post(f"{runs}/tags", json={"tags": ["later"]}).status_code == 200
    assert client.post(f"{runs}/logs", json={"message": "later"}).status_code == 200
    assert ask(client, "load_run", **asked)["run"]["attempt"] == attempt
    assert 3 in ask(client, "read_series", **asked, key="loss", max_points=None)["step"]


@pytest.mark.sampled
@pytest.mark.parametrize("ahead", [10_001, 2**39, LAST], ids=str)
@pytest.mark.parametrize("make", ["start", "events", "metrics"])
def test_an_attempt_far_ahead_is_refused_and_the_run_goes_on(client, maker, make, ahead):
    stranger = BatchMaker(maker.run_id, attempt=ahead, writer_id="stranger")
    arguments = {"start": [], "events": ["x"], "metrics": [("loss", 1, 1.0)]}[make]
    refused = ingest(client, getattr(stranger, make)(*arguments))
    assert refused.status_code == 422
    message = error_of(refused)["message"]
    assert f"attempt {ahead} of run {maker.run_id}, whose newest attempt is 0" in message
    assert ingest(client, maker.metrics(("loss", 0, 1.0))).status_code == 200
    check_goes_on(client, maker.run_id)


def test_a_run_does_not_begin_far_ahead(client):
    refused = ingest(client, BatchMaker("begins", attempt=LAST).start())
    assert refused.status_code == 422
    assert "which has none yet" in error_of(refused)["message"]
    assert ingest(client, BatchMaker("begins", attempt=7).start()).status_code == 200
    check_goes_on(client, "begins")


def test_attempts_that_come_late_and_out_of_order_are_taken(client, maker):
    for attempt in (3, 40, 10_040):
        rank = BatchMaker(maker.run_id, attempt=attempt, rank=1, writer_id=f"rank{attempt}")
        assert ingest(client, rank.events("x")).status_code == 200
        leader = BatchMaker(maker.run_id, attempt=attempt, writer_id=f"leader{attempt}")
        assert ingest(client, leader.start()).status_code == 200
    check_goes_on(client, maker.run_id)


def test_a_batch_far_ahead_is_refused_and_its_writer_goes_on(client, maker):
    for number in (2**42 + 1, LAST):
        batch = msgspec.structs.replace(maker.events("x"), number=number)
        refused = ingest(client, batch)
        assert (refused.status_code, error_of(refused)["field"]) == (422, "batches[0].number")
    last = msgspec.structs.replace(maker.events("x"), writer_id="other", number=2**42)
    assert ingest(client, last).status_code == 200
    check_goes_on(client, maker.run_id)


def test_a_version_far_ahead_is_refused(client, maker):
    refused = ingest(client, make_link(maker, LAST))
    assert refused.status_code == 422
    assert "version" in error_of(refused)["message"]
    assert ingest(client, make_link(maker, 2**53 - 1)).status_code == 200
    check_goes_on(client, maker.run_id)


@pytest.mark.sampled
@pytest.mark.parametrize("first", [LAST, LAST - 1, 2**62])
@pytest.mark.parametrize("counter", ["step", "epoch", "sequence", "rank", "from_step", "layer"])
def test_what_counts_to_the_end_is_read_and_gone_on_from(client, maker, counter, first):
    run_id = maker.run_id
    assert ingest(client, make_metric(maker, step=0, epoch=0)).status_code == 200
    assert ingest(client, maker.layers(0, {"a": 1.0})).status_code == 200
    other = BatchMaker(run_id, writer_id="other", rank=first if counter == "rank" else 0)
    if counter == "from_step":
        batch = BatchMaker(run_id, attempt=1, writer_id="other").start(from_step=first)
    elif counter == "layer":
        batch = other.layers(first, {"a": 1.0})
    elif counter == "sequence":
        batch = make_metric(other, sequence=first, step=1)
    elif counter == "rank":
        batch = make_metric(other, step=1)
    else:
        batch = make_metric(other, **{counter: first})
    assert ingest(client, batch).status_code == 200
    fork = {"project": "p", "parent_run_id": run_id, "fork_step": first}
    begun = client.post("/v1/runs", json=fork)
    assert begun.status_code == 201
    check_goes_on(client, begun.json()["run"]["id"])
    check_goes_on(client, run_id)


def test_claims_of_trials_count_as_they_are(client):
    for number, token in ((LAST, 1), (0, LAST)):
        trial = {"sweep_id": "s", "number": number, "token": token}
        begun = client.post("/v1/runs", json={"project": "p", "trial": trial})
        assert begun.status_code == 201
        check_goes_on(client, begun.json()["run"]["id"])
