"""Whatever is sent, the server neither fails nor hangs.

Bodies that once did harm lie under seeds/ and are sent first.
"""

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from service_fixtures import call, encode_ingest, ingest, serving
from tiers import count_examples

from quark_backends.service.protocol import MSGPACK, IngestRequest, WireBatch
from quark_core.records import RECORD_TYPES
from quark_core.testing.fakes import BatchMaker

SEEDS = sorted((Path(__file__).parent / "seeds").glob("*.bin"))
EXAMPLES = 150
LIMITS = {"requests_per_s": 1e6, "rows_per_s": 1e9, "body_timeout_s": 5.0}

MAKER = BatchMaker("run1")
SENT = [
    MAKER.start(tags=["a"]),
    MAKER.metrics(("loss", 0, 1.0), ("loss", 1, float("nan")), metadata=None),
    MAKER.events("hello", payload=None),
]
VALID = encode_ingest(*SENT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fuzzing"), limits=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        assert ingest(client, *SENT).status_code == 200
        yield client


def send(client, body, media=MSGPACK, encoding="identity"):
    reply = client.post(
        "/v1/runs/run1/batches",
        content=body,
        headers={"Content-Type": media, "Content-Encoding": encoding},
    )
    assert reply.status_code < 500, (reply.text, body)
    return reply


def check_readable(client):
    """What was taken in must not break reading."""
    assert call(client, "list_runs").status_code == 200
    assert call(client, "summarize", run_id="run1").status_code == 200
    assert call(client, "read_series", run_id="run1", key="loss", max_points=10).status_code == 200
    for kind in RECORD_TYPES:
        reply = call(client, "read", run_id="run1", kind=kind, query={})
        assert reply.status_code == 200, (kind, reply.text)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.stem)
def test_seeds(client, seed):
    send(client, seed.read_bytes())
    check_readable(client)


bounded = settings(
    max_examples=count_examples(EXAMPLES),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@bounded
@given(st.binary(max_size=300), st.sampled_from(["identity", "zstd", "gzip"]))
def test_any_bytes(client, body, encoding):
    assert send(client, body, encoding=encoding).status_code >= 400


@bounded
@given(st.data())
def test_a_good_body_with_other_bytes(client, data):
    body = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(body) - 1))
        what = data.draw(st.sampled_from(["change", "cut", "repeat"]))
        if what == "change":
            body[where] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del body[where : where + data.draw(st.integers(1, 20))]
        else:
            body[where:where] = body[where : where + data.draw(st.integers(1, 20))]
        if not body:
            break
    send(client, bytes(body))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=9),
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
columns = st.tuples(
    st.sampled_from(
        [
            *("sequence", "time_us", "metric_key", "namespace", "metric_name", "value", "step"),
            *("epoch", "metadata", "payload", "event_type", "severity", "action", "data"),
        ]
    ),
    st.sampled_from(["c", "i", "f", "t", "j", "z"]),
    anything,
    st.one_of(st.just(b""), st.binary(max_size=4)),
    st.one_of(st.just(b""), st.binary(max_size=24)),
)
numbers = iter(range(10**9))


@pytest.mark.long
@bounded
@example([], "metric", 1, 1)
@example([("value", "c", 1.0, b"", b"")], "metric", 2**31, 2**31)
@given(
    st.lists(columns, max_size=8),
    st.sampled_from(sorted(RECORD_TYPES)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1, 2, 3, 2**40]),
)
def test_bodies_of_any_columns(client, made, kind, count, inner_count):
    full = {
        "sequence": ("sequence", "c", 0, b"", b""),
        "time_us": ("time_us", "c", 1_767_225_600_000_000, b"", b""),
        **{column[0]: column for column in made},
    }
    body = b"\x00" + msgspec.msgpack.encode([1, kind, inner_count, list(full.values())])
    batch = msgspec.structs.replace(
        SENT[1], writer_id=f"odd{next(numbers)}", number=0, kind=kind, count=count, body=body
    )
    reply = send(client, msgspec.msgpack.encode(IngestRequest([WireBatch.of(batch)])))
    if reply.status_code == 200:
        check_readable(client)


@pytest.mark.long
@bounded
@given(
    st.sampled_from(sorted(RECORD_TYPES)),
    st.lists(
        st.dictionaries(
            st.sampled_from(
                [
                    *("metric_key", "value", "step", "epoch", "timestamp", "time_us", "sequence"),
                    *("event_type", "severity", "payload", "metadata", "status", "description"),
                    *("action", "data", "id", "x"),
                ]
            ),
            anything.filter(lambda value: not isinstance(value, bytes)),
        ),
        max_size=3,
    ),
)
def test_json_of_any_records(client, kind, records):
    body = {
        "batches": [
            {"writer_id": f"j{next(numbers)}", "number": 0, "kind": kind, "records": records}
        ]
    }
    reply = send(client, msgspec.json.encode(body), media="application/json")
    if reply.status_code == 200:
        check_readable(client)


@pytest.mark.long
@pytest.mark.hypothesis  # drawn inside, for each route
@pytest.mark.filterwarnings("default")
def test_the_description_holds(server, client):
    import schemathesis

    key = client.headers["Authorization"].removeprefix("Bearer ")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.startswith("/v1/keys"):
            continue  # it would revoke its own key

        @settings(
            max_examples=count_examples(25),
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def try_one(case):
            reply = case.call(headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code < 500, (case.as_curl_command(), reply.text)
            assert reply.headers["quark-protocol"] == ["1"]
            if reply.status_code >= 400 and case.method != "HEAD":
                assert set(reply.json()) == {"error"}

        try_one()
        tried += 1
    assert tried > 20
    check_readable(client)
