"""Payloads that do not fit: one clear error, and nothing is written."""

import array
import math
import mmap
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quark
from quark_core.records.schema import ARTIFACT_PAYLOAD_FORMATS


@pytest.fixture
def refused(artifacts, session):
    """Asserts that a call is refused by the name of an argument, and leaves nothing."""

    def check(call, match):
        with pytest.raises(quark.SchemaValidationError, match=f"^{match}"):
            call()
        assert artifacts.read() == ()
        assert not (session.run_path / "artifacts").exists()

    return check


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def released():
    view = memoryview(b"abc")
    view.release()
    return view


class Hostile:
    def __getattr__(self, name):
        raise ZeroDivisionError(name)


class HostileMapping(dict):
    def items(self):
        raise ZeroDivisionError


UNFIT = [
    (5, "text"),
    (b"bytes", "text"),
    (None, "text"),
    ({"a": 1}, "text"),
    ("text", "bytes"),
    (5, "bytes"),
    ([1, 2], "bytes"),
    (None, "bytes"),
    (np.zeros(2, "M8[s]"), "bytes"),
    (released(), "bytes"),
    (released(), None),
    (object(), None),
    (object(), "json"),
    ({1, 2}, None),
    (b"bytes", "json"),
    (1j, None),
    (np.zeros(3), None),
    (torch.zeros(3), None),
    (array.array("d", [1.0]), "json"),
    ({"a": {"b": [1, object()]}}, None),
    ({(1, 2): 3}, None),
    ({None: 3}, None),
    (lambda: None, None),
    (nest(200), None),
    (10**5000, None),
    ({10**5000: 1}, None),
    (Hostile(), None),
    (HostileMapping(a=1), None),
]


def test_a_payload_that_does_not_fit_its_format(artifacts, refused):
    for payload, payload_format in UNFIT:
        refused(
            partial(artifacts.store, "t", "n", payload, payload_format=payload_format), "payload"
        )


def test_a_payload_within_itself_is_refused(artifacts, refused):
    endless = []
    endless.append({"me": endless})
    refused(lambda: artifacts.store("t", "n", endless), "payload.*nested deeper")


@pytest.mark.parametrize("payload_format", ["yaml", "", "JSON", 5, ["json"], b"json", object()])
def test_an_unknown_format_is_refused(artifacts, refused, payload_format):
    refused(lambda: artifacts.store("t", "n", 1, payload_format=payload_format), "payload_format")
    refused(lambda: artifacts.log_snapshot("n", 1, payload_format=payload_format), "payload_format")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"step": -1}, "step"),
        ({"epoch": -1}, "epoch"),
        ({"metadata": [1]}, "metadata"),
        ({"timestamp": "yesterday"}, "timestamp"),
    ],
)
def test_another_bad_argument_is_refused_before_the_payload(artifacts, refused, arguments, named):
    refused(lambda: artifacts.store("t", "n", object(), **arguments), named)


@pytest.mark.parametrize(
    ("payload", "loaded"),
    [
        (math.nan, "NaN"),
        ([math.inf, -math.inf], ["Infinity", "-Infinity"]),
        (2**63 - 1, 2**63 - 1),
        (2**64, str(2**64)),
        ("a\ud800b", "a?b"),
        ({"\udfff": "\ud800"}, {"?": "?"}),
        ({1: 2, -7: 3}, {"1": 2, "-7": 3}),
        ({"a": np.int64(5), "b": torch.tensor(2.5)}, {"a": 5, "b": 2.5}),
        ("\0\x7f\u2028", "\0\x7f\u2028"),
        (nest(60), nest(60)),
    ],
)
def test_what_json_can_hold_in_some_way_is_held(artifacts, payload, loaded):
    assert artifacts.load(artifacts.store("t", "n", payload, payload_format="json")) == loaded


def test_any_text_comes_back_as_it_was(artifacts):
    for text in (
        "\ud800",
        "a\udfffb",
        "\0",
        "\ufeffbom",
        "line\r\nline\r",
        "\U0001d4b3" * 1000,
        "",
    ):
        record = artifacts.store("t", "n", text)
        assert artifacts.load(record) == text
        assert record.size_bytes == len(text.encode("utf-8", "surrogatepass"))


def test_bytes_of_any_kind(artifacts):
    mapped = mmap.mmap(-1, 10)
    mapped.write(b"0123456789")
    numbers = array.array("i", [1, -2])
    for payload in (
        mapped,
        numbers,
        np.arange(3.0),
        np.array(5),
        np.zeros((0, 3)),
        np.zeros(2, "?"),
    ):
        record = artifacts.store("t", "n", payload, payload_format="bytes")
        assert artifacts.load(record) == memoryview(payload).tobytes()
    structured = np.zeros(3, [("a", "i4"), ("b", "f8")])
    complexes = np.ones(3, complex)
    for payload in (structured, complexes, np.float16([1, 2])):
        record = artifacts.store("t", "n", payload, payload_format="bytes")
        assert artifacts.load(record) == payload.tobytes()


def test_an_empty_payload_of_each_format(artifacts, session, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    records = [
        artifacts.store("t", "n", "", payload_format="text"),
        artifacts.store("t", "n", b"", payload_format="bytes"),
        artifacts.store_file("t", "n", empty),
    ]
    assert [artifacts.load(record) for record in records] == ["", b"", b""]
    assert {record.size_bytes for record in records} == {0}
    assert len({record.sha256 for record in records}) == 1
    for record in records:
        assert (session.run_path / record.payload_relative_path).read_bytes() == b""
        assert artifacts.load_file(record, tmp_path / "copy").read_bytes() == b""
    assert {r.payload_format for r in records} <= set(ARTIFACT_PAYLOAD_FORMATS)


LARGE = {"text": "x" * 1001, "bytes": bytes(1001), "json": "x" * 999}


@pytest.mark.parametrize("payload_format", LARGE)
def test_a_payload_over_the_limit(artifacts, refused, monkeypatch, payload_format):
    monkeypatch.setenv("QUARK_ARTIFACT_MAX_BYTES", "1000")
    payload = LARGE[payload_format]
    refused(
        lambda: artifacts.store("t", "n", payload, payload_format=payload_format),
        r"payload has 1001 bytes.*limit is 1000.*QUARK_ARTIFACT_MAX_BYTES",
    )
    refused(lambda: artifacts.log_table("n", [["x" * 2000]], columns=["a"]), "payload has .* bytes")
    record = artifacts.store("t", "n", payload[:-1], payload_format=payload_format)
    assert record.size_bytes == 1000
    assert artifacts.load(record) == payload[:-1]


def test_a_file_over_the_limit(artifacts, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("QUARK_ARTIFACT_MAX_BYTES", "1000")
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(1001))
    refused(lambda: artifacts.store_file("t", "n", path), r"path .*large\.bin has 1001 bytes")
    refused(lambda: artifacts.log_file(path), r"path .*large\.bin has 1001 bytes")
    path.write_bytes(bytes(1000))
    assert artifacts.store_file("t", "n", path).size_bytes == 1000


def test_a_limit_that_is_no_number_is_told_where_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_ARTIFACT_MAX_BYTES", "50 GB")
    with pytest.raises(quark.SchemaValidationError, match=r"^QUARK_ARTIFACT_MAX_BYTES"):
        quark.start_run(project="p", storage_dir=tmp_path)


MISFITS = [
    ([0, 1, 2], [1], "bins must have one more edge"),
    ([0, 1], [1, 2], "bins must have one more edge"),
    ([0, 1], [], "bins must have one more edge"),
    ([], [], "counts must not be empty"),
    ([1], [], "counts must not be empty"),
    ([0, 0], [1], "bins must ascend"),
    ([1, 0], [1], "bins must ascend"),
    ([0, math.nan], [1], r"bins\[1\]"),
    ([0, math.inf], [1], r"bins\[1\]"),
    ([-(10**400), 0], [1], r"bins\[0\]"),
    ([0, 1], [math.nan], r"counts\[0\]"),
    ([0, 1], [-1], r"counts\[0\]"),
    ([0, 1], [10**400], r"counts\[0\]"),
    ([0, 1], [True], r"counts\[0\]"),
    ([0, "1"], [1], r"bins\[1\]"),
    ([0, 1], [None], r"counts\[0\]"),
    ("01", [1], "bins must be a sequence"),
    (b"01", [1], "bins must be a sequence"),
    ({0: 1, 1: 1}, [1], "bins must be a sequence"),
    ([0, 1], 5, "counts must be a sequence"),
    (None, [1], "bins must be a sequence"),
    ([[0, 1]], [1], r"bins\[0\]"),
    ([np.array([0, 1]), 2], [1], r"bins\[0\]"),
    (np.zeros((2, 2)), [1], r"bins\[0\]"),
    ([0, 1j], [1], r"bins\[1\]"),
]


@pytest.mark.long
def test_bins_and_counts_that_do_not_fit(artifacts, refused):
    for bins, counts, named in MISFITS:
        refused(partial(artifacts.log_histogram, "h", bins=bins, counts=counts), named)


@pytest.mark.parametrize(
    ("bins", "counts"),
    [
        ([0, 1, 2], [3, 4]),
        (np.array([0.0, 1.0, 2.0]), np.array([3, 4])),
        (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3, 4])),
        (np.array([0.0, 1.0, 2.0], "f4"), [np.int32(3), torch.tensor(4)]),
        ((float(n) for n in range(3)), iter([3, 4])),
        (range(3), (3.0, 4.0)),
    ],
)
def test_bins_and_counts_of_many_kinds(artifacts, bins, counts):
    record = artifacts.log_histogram("h", bins=bins, counts=counts)
    assert artifacts.load(record) == {"bins": [0, 1, 2], "counts": [3, 4]}


def test_counts_beyond_64_bits_stay_numbers(artifacts):
    record = artifacts.log_histogram("h", bins=[-(2**80), 2**80], counts=[2**70])
    assert artifacts.load(record) == {"bins": [-(2.0**80), 2.0**80], "counts": [2.0**70]}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.long
@given(payload=JSON)
def test_json_comes_back_as_it_was(artifacts, payload):
    record = artifacts.store("t", "n", payload, payload_format="json")
    loaded = artifacts.load(record)
    assert loaded == payload
    assert type(loaded) is type(payload)


@pytest.mark.long
@given(payload=st.one_of(st.text(st.characters(codec=None)), st.binary()))
def test_text_and_bytes_come_back_as_they_were(artifacts, payload):
    assert artifacts.load(artifacts.store("t", "n", payload)) == payload


def test_a_path_is_no_payload(session, tmp_path):
    with pytest.raises(quark.SchemaValidationError, match=r"^payload is a path .*log_file"):
        quark.ArtifactStore(session).store("checkpoint", "c", tmp_path / "model.pt")
