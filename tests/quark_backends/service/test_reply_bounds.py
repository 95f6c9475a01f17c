"""Records and runs with large JSON values: each reply and each read is bounded by bytes."""

import re
from pathlib import Path

import msgspec
import pytest
from service_fixtures import call, ingest, serving_process

from quark_backends.service.protocol import JSON, MSGPACK, NEXT_PAGE, ROWS
from quark_backends.service.server.responses import REPLY_BYTES
from quark_core.records.json_object import JsonObject
from quark_core.testing.fakes import BatchMaker

MEMORY_BYTES = 300 * 2**20
# A list of these takes 24 times as much memory as its text.
EMPTY = [{} for _ in range(1_000)]
ROWS_OF_ONE, BATCHES, RUNS = 400, 12, 24

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server with a run of 14 MB of payloads, and with runs whose configurations are 24 MB.

    As values each of both is more than the server may take.
    """
    with serving_process(tmp_path_factory.mktemp("bounds")) as running, running.client() as client:
        maker = BatchMaker("many")
        payload = JsonObject({"values": EMPTY})
        assert ingest(client, maker.start()).status_code == 200
        for _ in range(BATCHES):
            types = [f"t{number}" for number in range(ROWS_OF_ONE)]
            assert ingest(client, maker.events(*types, payload=payload)).status_code == 200
        config = {"values": {"a": EMPTY * 200, "text": "x" * 400_000}, "notes": []}
        for number in range(RUNS):
            maker = BatchMaker(f"run{number}")
            assert ingest(client, maker.start()).status_code == 200
            assert ingest(client, maker.lifecycle(("config", config))).status_code == 200
        yield running


@pytest.fixture(scope="module")
def client(process):
    with process.client(timeout=300) as client:
        yield client


def find_peak_bytes(process):
    """The most memory that the server's processes have had."""
    peaks = [Path(f"/proc/{pid}/status").read_text() for pid in process.find_pids()]
    return sum(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", peak)[1]) for peak in peaks)


def ask(process, client, method, accept=JSON, after=None, **arguments):
    reply = call(client, method, accept=accept, after=after, **arguments)
    assert reply.status_code == 200, reply.text[:300]
    assert find_peak_bytes(process) < MEMORY_BYTES, (method, arguments, accept)
    return reply


def read_pages(process, client, method, **arguments):
    """All that a method returns, page after page."""
    found, after = [], None
    while not found or after is not None:
        reply = ask(process, client, method, after=after, **arguments)
        assert len(reply.content) < REPLY_BYTES
        found += reply.json()
        after = reply.headers.get(NEXT_PAGE)
    return found


def test_a_list_has_all_runs_in_pages(process, client):
    found = [run["run"]["id"] for run in read_pages(process, client, "list_runs")]
    assert found == [f"run{number}" for number in reversed(range(RUNS))] + ["many"]


@pytest.mark.parametrize(
    "question", [{}, {"order_by": ["name"]}, {"where": "state != 'failed'"}], ids=str
)
def test_a_search_has_all_runs_in_parts(process, client, question):
    found = read_pages(process, client, "search", search=question)
    assert len(found) == len({run["stored"]["run"]["id"] for run in found}) == RUNS + 1
    assert len(read_pages(process, client, "search", search={**question, "limit": 3})) == 3


@pytest.mark.parametrize("limit", [None, 10, 3_000], ids=str)
@pytest.mark.parametrize("accept", [JSON, ROWS])
def test_records_are_read_in_parts(process, client, accept, limit):
    asked = {"run_id": "many", "kind": "event", "query": {"limit": limit}}
    reply = ask(process, client, "read", accept, **asked)
    if accept == JSON:
        records = reply.json()
        assert len(reply.content) < 1.1 * REPLY_BYTES
        sequences = [record["sequence"] for record in records]
        last = BATCHES * ROWS_OF_ONE
        assert sequences == list(range(last - len(records), last))
        assert len(records) == limit if limit else len(records) == last


@pytest.mark.parametrize("accept", [JSON, MSGPACK])
def test_changes_are_given_in_parts(process, client, accept):
    cursor, more, rows, replies = {}, True, 0, 0
    while more and replies < 8:
        asked = {"run_id": "many", "cursor": cursor, "kinds": ["event"], "max_rows": 100_000}
        reply = ask(process, client, "read_changes", accept, **asked)
        assert len(reply.content) < REPLY_BYTES
        changes = (msgspec.msgpack if accept == MSGPACK else msgspec.json).decode(reply.content)
        cursor, more = changes["cursor"], changes["more"]
        replies += 1
        rows += len(changes["records"]["event"]) if accept == JSON else ROWS_OF_ONE
    assert rows == replies * ROWS_OF_ONE
    assert more


def test_batches_are_given_back_up_to_so_many_bytes(process, client):
    asked = {"run_id": "many", "writer_id": "writer0", "start": 0, "limit": 1000}
    reply = ask(process, client, "read_batches", MSGPACK, **asked)
    assert len(reply.content) < REPLY_BYTES
