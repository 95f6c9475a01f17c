"""What comes back: runs by pages, rows in frames, curves, searches, outputs."""

import contextlib
import math
import socket
import time

import msgspec
import numpy as np
import pytest
from service_fixtures import ask, call, error_of, ingest, serving

from quark_backends.service.calls import decode_value, find_result
from quark_backends.service.protocol import MSGPACK, NEXT_PAGE, ROWS, GenerationRequest, OutputBody
from quark_backends.service.row_frames import End, Rows, decode_frame, encode_columns
from quark_backends.service.server.read_routes import iterate_newest
from quark_backends.service.server.stores import WorkspaceReader
from quark_backends.store.databases.sqlite import ensure_store
from quark_backends.store.run_store import SqliteRunStore
from quark_core.backends.contract import Capability
from quark_core.backends.registry import PROTOCOLS
from quark_core.records.codec import encode_records
from quark_core.records.columns import Columns
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("reads"), limits={"page_runs": 7}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        maker = BatchMaker("run1")
        points = [("loss", step, math.sin(step)) for step in range(50_000)]
        assert ingest(client, maker.start(tags=["a"])).status_code == 200
        for start in range(0, len(points), 5000):
            assert ingest(client, maker.metrics(*points[start : start + 5000])).status_code == 200
        odd = maker.metrics(("odd", 0, math.nan), ("odd", None, math.inf), ("odd", 2, -1.0))
        assert ingest(client, odd, maker.events("one", "two", severity="error")).status_code == 200
        other = BatchMaker("run1", writer_id="rank1", rank=1, started_us=FIRST_TIME_US + 10)
        assert ingest(client, other.metrics(("loss", 0, 9.0))).status_code == 200
        yield client


def read_frames(data):
    frames = []
    while data:
        size = int.from_bytes(data[:4], "little")
        frames.append(decode_frame(data[4 : 4 + size]))
        assert len(data) >= 4 + size
        data = data[4 + size :]
    return frames


def read_rows(client, kind="metric", run_id="run1", **query):
    reply = call(client, "read", accept=ROWS, run_id=run_id, kind=kind, query=query)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == ROWS
    *rows, end = read_frames(reply.content)
    assert all(isinstance(frame, Rows) for frame in rows)
    columns = Columns.concatenate(kind, [frame.to_columns() for frame in rows])
    assert end == End(columns.count)
    return columns


def decode(reply, method):
    """What a reply in msgpack is to the client."""
    assert reply.status_code == 200, reply.text
    return decode_value(reply.content, MSGPACK, find_result(method))


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({}, 50_004),
        ({"limit": 0}, 0),
        ({"limit": 3}, 3),
        ({"limit": 20_000}, 20_000),
        ({"limit": 10**12}, 50_004),
        ({"step_min": 10, "step_max": 19}, 10),
        ({"equals": {"metric_key": "odd"}}, 3),
        ({"any_of": {"metric_key": ["odd", "none"]}, "include_non_finite": False}, 1),
        ({"equals": {"metric_key": "odd"}, "limit": 2}, 2),
        ({"step": 0}, 3),
        ({"equals": {"metric_key": "nothing"}}, 0),
    ],
)
def test_queries(client, query, count):
    assert read_rows(client, **query).count == count


def test_the_newest_are_kept_in_their_order(client):
    everything = read_rows(client)
    for limit in (1, 2, 16_384, 16_385, 40_000):
        found = read_rows(client, limit=limit)
        assert found["step"].tolist() == everything["step"][-limit:].tolist()


@pytest.mark.long
def test_the_newest_of_many_are_read_twice_and_not_kept():
    parts = [
        Columns.from_records(
            "metric",
            BatchMaker("r").metrics(*(("m", i + j, 0.0) for i in range(1000))).to_records(),
        )
        for j in range(0, 140_000, 1000)
    ]

    class Store:
        def iterate(self, run_id, kind, query, *, rows):
            assert query.limit is None
            yield from parts

    for limit in (131_072, 131_073, 139_999, 140_000, 10**9):
        found = [
            part["step"] for part in iterate_newest(Store(), "r", "metric", Query(limit=limit))
        ]
        steps = np.concatenate(found)
        assert steps.tolist() == list(range(140_000))[-limit:]


@pytest.mark.parametrize(
    ("kind", "query", "field"),
    [
        ("nonsense", {}, "kind"),
        ("metric", {"equals": {"nonsense": "x"}}, "equals"),
        ("metric", {"equals": {"value": "x"}}, "equals"),
        ("metric", {"any_of": {"step": ["1"]}}, "any_of"),
        ("lifecycle", {"step": 1}, "step"),
        ("metric", {"limit": -1}, "limit"),
        ("metric", {"step": 2**64}, "step"),
        ("metric", {"step": "x"}, "step"),
    ],
)
def test_queries_that_make_no_sense(client, kind, query, field):
    for accept in (ROWS, "application/json"):
        reply = call(client, "read", accept=accept, run_id="run1", kind=kind, query=query)
        assert reply.status_code == 400, reply.text
        told = error_of(reply)
        assert field in (told.get("field") or told["message"]), reply.text


def test_curves(client):
    asked = {"run_id": "run1", "key": "loss", "max_points": 100}
    series = decode(call(client, "read_series", accept=MSGPACK, **asked), "read_series")
    assert len(series) <= 100
    assert series.count.sum() == 50_001
    assert series.low.min() == pytest.approx(-1, abs=1e-6)
    assert series.ranks == (0, 1)
    one = ask(client, "read_series", **{**asked, "max_points": None, "rank": 1})
    assert (one["ranks"], one["last"]) == ([1], [9.0])
    told = ask(client, "read_series", **{**asked, "key": "odd"})
    assert told["exact"] is True
    assert told["last"] == [None, None, -1.0]
    assert told["step"] == [0, -1, 2]
    assert ask(client, "read_series", **{**asked, "key": "none"})["step"] == []
    for wrong in (
        {"key": ""},
        {"key": ["a", "b"]},
        {"max_points": "x"},
        {"max_points": 0},
        {"max_points": 2**63},
        {"all_attempts": 2},
    ):
        assert call(client, "read_series", **{**asked, **wrong}).status_code == 400, wrong


def test_windows_of_many_curves(client):
    asked = {"keys": ["loss", "odd", "none"], "entries": 100, "window": {"low": 10, "high": 40_000}}
    reply = call(client, "read_series_many", accept=MSGPACK, run_id="run1", query=asked)
    found = decode(reply, "read_series_many")
    (curve,) = found.curves
    assert (curve.key, curve.attempt, curve.rank, curve.ranks) == ("loss", 0, None, (0,))
    assert curve.count.sum() == 39_991
    assert curve.low.min() == pytest.approx(-1, abs=1e-6)
    asked = {"keys": ["odd"], "entries": None, "ranks": "each"}
    told = ask(client, "read_series_many", run_id="run1", query=asked)
    assert told["cursor"] == found.cursor
    assert told["curves"][0]["last"] == [None, None, -1.0]
    assert told["curves"][0]["non_finite_step"] == [-1, 0, -1]
    for wrong in (
        {"keys": "loss"},
        {"window": {"axis": "value"}},
        {"entries": 0},
        {"window": {"low": 5, "high": 4}},
        {"ranks": "all"},
        {"since_start": True},
        {"keys": ["a"] * 1_001},
    ):
        reply = call(client, "read_series_many", run_id="run1", query={**asked, **wrong})
        assert reply.status_code == 400, (wrong, reply.text)


def test_what_came_since_a_cursor(client):
    maker = BatchMaker("followed", writer_id="followed")
    ingest(client, maker.start(), maker.metrics(("m", 0, 0.0)))
    heads = ask(client, "read_heads", run_id="followed")
    assert heads["outputs"] == 0
    asked = {"run_id": "followed", "cursor": heads["cursor"], "kinds": ["metric", "event"]}
    asked["max_rows"] = 10_000
    nothing = ask(client, "read_changes", **asked)
    assert (nothing["records"], nothing["more"], nothing["stale"]) == ({}, False, False)
    ingest(client, maker.metrics(("m", 1, math.inf), ("n", 1, 2.0)), maker.events("saved"))
    told = ask(client, "read_changes", **asked)
    assert [record["step"] for record in told["records"]["metric"]] == [1, 1]
    assert [record["event_type"] for record in told["records"]["event"]] == ["saved"]
    reply = call(client, "read_changes", accept=MSGPACK, **asked, keys=["n"])
    packed = decode(reply, "read_changes")
    assert packed.records["metric"]["value"].tolist() == [2.0]
    assert packed.cursor == told["cursor"]
    assert ask(client, "read_changes", **{**asked, "cursor": {"followed": 99}})["stale"] is True
    for wrong in ({"kinds": ["no"]}, {"cursor": {"followed": "x"}}, {"max_rows": 0}):
        reply = call(client, "read_changes", **{**asked, **wrong})
        assert reply.status_code == 400, (wrong, reply.text)


@pytest.mark.long
def test_pages_show_every_run_once_while_others_are_started(tmp_path):
    with serving(tmp_path, limits={"page_runs": 4}) as server, server.client() as client:

        def start(name, number):
            maker = BatchMaker(name, started_us=FIRST_TIME_US + number * 1_000_000)
            project = "even" if number % 2 == 0 else "odd"
            assert ingest(client, maker.start(project=project)).status_code == 200

        for number in range(18):
            start(f"run{number:02}", number)
        start("twin", 17)  # two of one moment
        seen, after = [], None
        while True:
            page = call(client, "list_runs", limit=100, after=after)
            assert len(page.json()) <= 4
            seen += [run["run"]["id"] for run in page.json()]
            after = page.headers.get(NEXT_PAGE)
            if after is None:
                break
            start(f"late{len(seen)}", 100 + len(seen))
        assert sorted(seen) == sorted([*(f"run{number:02}" for number in range(18)), "twin"])
        assert seen[2:] == [f"run{number:02}" for number in reversed(range(17))]
        even = ask(client, "list_runs", project="even", limit=2)
        assert [run["run"]["id"] for run in even][-1].startswith(("late", "run"))
        few = call(client, "list_runs", limit=5)
        rest = call(client, "list_runs", limit=5, after=few.headers[NEXT_PAGE])
        assert (len(few.json()), len(rest.json()), NEXT_PAGE in rest.headers) == (4, 1, False)
        assert ask(client, "list_runs", limit=0) == []
        for bad in ({"limit": -1}, {"limit": "x"}, {"after": "!!!"}, {"after": "abc"}):
            reply = call(client, "list_runs", **bad)
            assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_argument"), bad


def test_searches_and_their_messages(client):
    def search(**search):
        return call(client, "search", search=search)

    found = search(where="last(loss) == 9 and 'a' in tags").json()
    assert [run["stored"]["run"]["id"] for run in found] == ["run1"]
    assert search(where="loss > 100").json() == []
    wrong = search(where="lss > 1", where_argument="--where")
    assert error_of(wrong)["message"].startswith("--where, column 1: no run has the metric")
    for bad in ({"order_by": ["loss", "-"]}, {"where": "(" * 9_000}, {"where": "x" * 10_001}):
        wrong = search(**bad)
        assert (wrong.status_code, error_of(wrong)["code"]) == (400, "invalid_argument")
    assert len(search(order_by=["-loss"], limit=1).json()) == 1
    assert ask(client, "search", search={}, store="elsewhere") == []


def test_generations_of_outputs(server, client):
    empty = GenerationRequest("analyzer", True, [OutputBody("alert", 0, b"")])
    reply = client.post(
        "/v1/runs/run1/generations",
        content=msgspec.msgpack.encode(empty),
        headers={"Content-Type": MSGPACK},
    )
    assert reply.json() == {"number": 1}
    assert ask(client, "read_outputs", run_id="run1", kind="alert") == []
    rows = call(client, "read_outputs", accept=ROWS, run_id="run1", kind="alert")
    assert read_frames(rows.content) == [End(0)]
    body = encode_records(BatchMaker("run1").metrics(("m", 0, 0.0)).to_records())
    for kind, content in (("lifecycle", body), ("alert", body), ("alert", b"nonsense")):
        request = GenerationRequest("analyzer", True, [OutputBody(kind, 1, content)])
        reply = client.post(
            "/v1/runs/run1/generations",
            content=msgspec.msgpack.encode(request),
            headers={"Content-Type": MSGPACK},
        )
        assert reply.status_code in (400, 422), reply.text


def test_batches_come_back_in_parts(client):
    def read(**asked):
        return ask(client, "read_batches", run_id="run1", **asked)

    assert [b["number"] for b in read(writer_id="writer0", start=2, limit=3)] == [2, 3, 4]
    assert read(writer_id="nobody", start=0, limit=9) == []
    assert read(writer_id="writer0", start=0, limit=0) == []


@pytest.mark.long
def test_a_reader_that_takes_nothing_is_let_go(tmp_path):
    limits = {"reader_stall_s": 0.5}
    with serving(tmp_path, limits=limits) as server, server.client() as client:
        maker = BatchMaker("run1")
        ingest(client, maker.start())
        for start in range(0, 300_000, 10_000):
            values = [("loss", step, math.sin(step)) for step in range(start, start + 10_000)]
            ingest(client, maker.metrics(*values))
        body = b'{"run_id": "run1", "kind": "metric", "query": {}}'
        key = client.headers["Authorization"]
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(
                f"POST /v1/call/read HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: {key}\r\nAccept: {ROWS}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            reader.settimeout(60)
            assert reader.recv(1, socket.MSG_PEEK)  # it is answered
            deadline = time.monotonic() + 60
            while server.service.working:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            found = b""
            while piece := reader.recv(65_536):
                found += piece
        assert b"200 OK" in found
        assert not found.endswith(b"0\r\n\r\n")  # cut off, which is told by that
        assert read_rows(client, limit=5).count == 5


def test_figures_health_and_descriptions(server, client):
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").json()["status"] == "ready"
    text = client.get("/metrics").text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
    assert "quark_ingested_rows_total 50" in text
    assert "quark_requests_in_flight 1" in text
    described = client.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    assert set(described["components"]["schemas"]) >= {"ErrorReply", "IngestRequest", "JsonIngest"}
    page = client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert "src=" not in page.text
    assert "server" not in page.headers


@pytest.mark.parametrize("frame_bytes", [1, 2000, 5000, 10**9])
def test_frames_have_a_size_that_clients_take(frame_bytes):
    batch = BatchMaker("r").metrics(*(("m", step, step / 7) for step in range(1000)))
    rows = Columns.from_records("metric", batch.to_records())
    frames = list(encode_columns(rows, frame_bytes=frame_bytes))
    decoded = [decode_frame(frame[4:]) for frame in frames]
    assert [value for part in decoded for value in part.to_columns()["value"].tolist()] == rows[
        "value"
    ].tolist()
    assert all(len(part.body) <= frame_bytes or part.to_columns().count == 1 for part in decoded)
    assert (len(frames) == 1) == (frame_bytes > 10_000)


@pytest.mark.parametrize("equals", ["m", "other"])
def test_a_name_that_all_rows_have_is_not_looked_at_row_by_row(equals):
    batch = BatchMaker("r").metrics(*(("m", step, 1.0) for step in range(9)))
    rows = Columns.from_records("metric", batch.to_records())
    rows = Columns("metric", rows.count, dict(rows), constants={"metric_key": "m"})
    found = rows.select(Query(equals={"metric_key": equals}, step_min=4))
    assert found["step"].tolist() == (list(range(4, 9)) if equals == "m" else [])


def test_a_page_has_the_columns_that_were_asked_for(client):
    for place in range(9):
        maker = BatchMaker(f"p{place}", writer_id=f"p{place}", started_us=FIRST_TIME_US + place)
        start = maker.start(project="pages")
        points = maker.metrics(("pm", 0, math.nan if place == 3 else float(place)))
        assert ingest(client, start, points).status_code == 200
    asked = {"project": "pages", "order_by": ["-pm"], "columns": ["pm", "tags"], "count": True}
    first = ask(client, "search_page", search=asked)
    # The server's pages are of 7 runs.
    assert [row["run_id"] for row in first["rows"]] == [f"p{n}" for n in (8, 7, 6, 5, 4, 2, 1)]
    assert first["rows"][0]["values"] == [8.0, None]
    assert first["count"] == 9
    second = ask(client, "search_page", search={**asked, "after": first["next"]})
    assert [(row["run_id"], row["values"]) for row in second["rows"]] == [
        ("p0", [0.0, None]),
        ("p3", [None, None]),
    ]
    assert second["next"] is None
    for wrong, message in (
        ({"after": "AAAA"}, "after must be"),
        ({"columns": ["a ="]}, "columns, column 3"),
        ({"limit": -1}, "limit"),
        ({"where": "absent > 1"}, "no run has the metric"),
    ):
        reply = call(client, "search_page", search={**asked, **wrong})
        assert reply.status_code == 400
        assert message in reply.text
    names = ask(client, "list_names", project="pages", text="p", limit=100)
    assert (names["metrics"], names["complete"]) == (["pm"], True)
    assert call(client, "list_names", project=None, text="", limit="x").status_code == 400


def test_a_grid_as_json_and_as_bytes(client):
    maker = BatchMaker("g0", writer_id="g0")
    start = maker.start()
    steps = [maker.layers(step, {"a": 1.0 + step, "b": math.inf}) for step in range(3)]
    assert ingest(client, start, *steps).status_code == 200
    asked = {"kind": "layer", "field": "norm", "summary_type": "gradient", "low": 1}
    grid = ask(client, "read_grid", run_id="g0", query=asked)
    assert (grid["names"], grid["starts"]) == (["a", "b"], [1, 2])
    assert grid["values"] == [[2.0, 3.0], [None, None]]
    assert grid["marks"] == [[1, 1], [2, 2]]
    packed = call(client, "read_grid", accept=MSGPACK, run_id="g0", query=asked)
    assert decode(packed, "read_grid").values[0].tolist() == [2.0, 3.0]
    for wrong in ({"kind": "metric"}, {"field": "x"}, {"bins": 0}, {"rows": 10_000}, {"by": "x"}):
        assert call(client, "read_grid", run_id="g0", query={**asked, **wrong}).status_code == 400
    assert call(client, "read_grid", run_id="absent", query=asked).status_code == 404


def test_what_a_team_page_reads_with_has_each_capability_that_reads(tmp_path):
    """A method added to the contract would otherwise make the page read in a slower way."""
    writing = {Capability.PRIMARY, Capability.GROUPS, Capability.REPLAY, Capability.REMOVAL}
    writing |= {Capability.EDITS, Capability.BELONGING, Capability.COORDINATION}
    with contextlib.closing(SqliteRunStore(ensure_store(tmp_path))) as store:
        reader = WorkspaceReader(store, None, "default")
        lacks = {name for name, each in PROTOCOLS.items() if not isinstance(reader, each)}
    assert lacks == writing
