"""Bodies of batches: every record comes back bit by bit, and damage is told from data."""

from __future__ import annotations

import dataclasses
import math
import struct
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from golden import ASSETS, ORIGIN, RECORDS, write_files
from hypothesis import example, given
from hypothesis import strategies as st
from record_strategies import ANY_BATCH, BATCHES, TEXTS

from quark_core.delivery.channel import MetricKey, encode_items, expand_row
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, MetricRecord
from quark_core.records.codec import (
    BODY_VERSION,
    MISSING_INDEX,
    compress_frame,
    decode_body,
    decompress_frame,
    encode_columns,
    encode_records,
)
from quark_core.records.schema import CURRENT_SCHEMA_VERSION, ORIGIN_FIELDS, column_types


def metrics(values, **fields):
    return [
        MetricRecord(*ORIGIN.values(), i, i, "loss", None, "loss", value, step=i, **fields)
        for i, value in enumerate(values)
    ]


def bits(value):
    """A float as its bits, so that NaN equals itself and -0.0 differs from 0.0."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def as_bits(record):
    return {name: bits(getattr(record, name)) for name in record.__struct_fields__}


def pack(version, kind, count, *columns):
    return b"\x00" + msgspec.msgpack.encode([version, kind, count, list(columns)])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_a_batch_of_every_kind_comes_back_as_it_was(kind):
    @given(st.lists(BATCHES[kind], min_size=1, max_size=20))
    def check(records):
        decoded = decode_body(encode_records(records))

        assert (decoded.kind, decoded.count) == (kind, len(records))
        back = decoded.to_records(**ORIGIN)
        assert list(map(as_bits, back)) == list(map(as_bits, records))
        assert [type(record) for record in back] == [type(record) for record in records]

    check()


@given(st.integers(0, 2**64 - 1), st.integers(1, 3))
@example(0x7FF8000000000001, 1)
@example(0xFFF0000000000001, 2)
@example(0x8000000000000000, 3)
def test_every_pattern_of_64_bits_is_kept_as_a_value(pattern, count):
    (value,) = struct.unpack("<d", struct.pack("<Q", pattern))
    decoded = decode_body(encode_records(metrics([value] * count)))

    assert [bits(found) for found in decoded.to_list("value")] == [bits(value)] * count
    assert decoded.to_array("value").tobytes() == bits(value) * count


@pytest.mark.parametrize("values", [[0.0, -0.0], [-0.0, 0.0, 0.0], [1.0, -1.0], [math.nan, 1.0]])
def test_values_that_are_almost_equal_stay_apart(values):
    decoded = decode_body(encode_records(metrics(values)))

    assert list(map(bits, decoded.to_list("value"))) == list(map(bits, values))


@pytest.mark.long
@given(ANY_BATCH)
def test_arrays_agree_with_lists(records):
    decoded = decode_body(encode_records(records))
    dtypes = {"i": np.int64, "f": np.float64, "t": object, "j": object}
    for name, encoding in column_types(decoded.kind).items():
        array, values = decoded.to_array(name), decoded.to_list(name)
        missing = {"i": MISSING_INDEX, "f": math.nan}.get(encoding)
        expected = [missing if v is None else v for v in values]
        nulls = decoded.nulls(name)
        if encoding == "f":
            is_null = [False] * len(records) if nulls is None else nulls.tolist()
            assert is_null == [value is None for value in values]

        assert array.dtype == dtypes[encoding]
        assert array.shape == (len(records),)
        assert list(map(bits, array.tolist())) == list(map(bits, expected))


@pytest.mark.long
@given(ANY_BATCH, TEXTS)
def test_rows_that_equal_a_text_are_those_that_hold_it(records, absent):
    decoded = decode_body(encode_records(records))
    for name, encoding in column_types(decoded.kind).items():
        if encoding != "t":
            continue
        values = decoded.to_list(name)
        for text in {absent, *values} - {None}:
            found = np.full(decoded.count, decoded.column(name).equals(text, decoded.count))
            assert found.tolist() == [value == text for value in values]


@pytest.mark.parametrize("distinct", [1, 127, 128, 129, 40_000])
def test_any_number_of_distinct_texts_fits(distinct):
    records = [
        dataclasses.replace(record, metric_key=f"layer{i}/norm")
        for i, record in enumerate(metrics([1.0] * distinct))
    ]

    assert decode_body(encode_records(records)).to_records(**ORIGIN) == records


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "empty"),
        ([*metrics([1.0]), RECORDS["event"][0]], "one kind"),
        ([*metrics([1.0]), dataclasses.replace(metrics([1.0])[0], rank=0)], "same rank"),
        ([*metrics([1.0]), dataclasses.replace(metrics([1.0])[0], run_id=None)], "same run_id"),
    ],
)
def test_records_that_are_no_batch_are_refused(records, message):
    with pytest.raises(SchemaValidationError, match=f"^records must .*{message}"):
        encode_records(records)


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_every_truncation_is_refused(kind):
    body = encode_records(RECORDS[kind])
    for size in range(len(body)):
        with pytest.raises(SchemaValidationError):
            decode_body(body[:size])


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_no_single_wrong_byte_raises_anything_else(kind):
    body = encode_records(RECORDS[kind])
    plain = b"\x00" + msgspec.msgpack.encode([1, kind, 1, [["x", "t", [["a"], 1], b"", b"\x00"]]])
    for original, values in ((plain, range(256)), (body, (0, 1, 0x7F, 0x80, 0xC7, 0xFF))):
        for position in range(len(original)):
            for value in values:
                damaged = original[:position] + bytes([value]) + original[position + 1 :]
                assert_decodes_or_is_refused(damaged)


@given(st.data())
def test_no_handful_of_wrong_bytes_raises_anything_else(data):
    body = bytearray(encode_records(RECORDS[data.draw(st.sampled_from(sorted(RECORDS)))]))
    positions = st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(positions, max_size=6)):
        body[position] = value
    assert_decodes_or_is_refused(bytes(body))


def assert_decodes_or_is_refused(body):
    with suppress(SchemaValidationError):
        decode_body(body)


def test_a_newer_version_is_refused_with_both_versions():
    with pytest.raises(SchemaValidationError, match=rf"{BODY_VERSION + 1}.*up to {BODY_VERSION}$"):
        decode_body(pack(BODY_VERSION + 1, "metric", 0))


def test_an_unknown_marker_is_refused():
    with pytest.raises(SchemaValidationError, match="unknown marker"):
        decode_body(b"\x07" + pack(1, "metric", 0)[1:])


def test_of_an_unknown_kind_only_the_order_and_the_times_are_read():
    columns = [["sequence", "i", [4, 1], b"", b"\0\1"], ["time_us", "c", 7], ["size", "c", 3]]
    body = decode_body(pack(1, "hologram", 2, *columns))
    assert (body.to_list("sequence"), body.to_list("time_us")) == ([4, 5], [7, 7])
    for read in (lambda: body.to_list("size"), lambda: body.to_records(**ORIGIN)):
        with pytest.raises(SchemaValidationError, match="kind 'hologram' are unknown here"):
            read()


def test_a_column_of_a_newer_writer_is_skipped():
    names = [name for name in MetricRecord.__struct_fields__ if name not in ORIGIN_FIELDS]
    (record,) = metrics([0.5])
    known = [[name, "c", getattr(record, name)] for name in names]
    unknown = ["flavour", "q", {"any": "thing"}, b"", b"", "one more"]

    assert decode_body(pack(1, "metric", 1, unknown, *known)).to_records(**ORIGIN) == [record]


def test_an_unknown_encoding_is_refused_only_where_it_is_asked_for():
    decoded = decode_body(pack(1, "metric", 1, ["value", "q"], ["step", "c", 4]))

    assert decoded.to_list("step") == [4]
    for read in (decoded.to_list, decoded.to_array):
        with pytest.raises(SchemaValidationError, match=r"'value'.*'q'"):
            read("value")


def test_a_column_that_an_older_writer_did_not_know_holds_its_default():
    decoded = decode_body(encode_columns("metric", 2, {"value": [1.0, 2.0]}))

    assert decoded.to_list("step") == decoded.to_list("metadata") == [None, None]
    assert decoded.to_array("step").tolist() == [MISSING_INDEX, MISSING_INDEX]
    assert decoded.to_array("description").tolist() == [None, None]


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_the_stored_file_of_every_kind_still_decodes(kind):
    (path,) = ASSETS.glob(f"*/{kind}_batch.body")
    assert path.parent.name == str(CURRENT_SCHEMA_VERSION)
    back = decode_body(path.read_bytes()).to_records(**ORIGIN)
    assert list(map(as_bits, back)) == list(map(as_bits, RECORDS[kind])), path


def test_a_stored_file_is_never_replaced(tmp_path):
    path = tmp_path / "event_batch.body"
    path.write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        write_files(tmp_path)
    assert path.read_bytes() == b"kept"


ROW_TIMES = st.integers(-(2**40), 2**50) | st.just(7)
ROWS = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.integers(0, 3),
            ROW_TIMES,
            st.none() | st.integers(0, 2**62) | st.just(0),
            st.none() | st.integers(0, 3),
            st.lists(
                st.floats() | st.sampled_from([0.0, -0.0, 1.5]), min_size=width, max_size=width
            ),
        ),
        min_size=1,
        max_size=12,
    )
)


@given(ROWS)
def test_rows_come_back_as_the_records_that_they_stand_for(rows):
    keys = tuple(MetricKey(f"a/m{n}", "a", f"m{n}") for n in range(len(rows[0][4])))
    items, sequence = [], 0
    for gap, time_us, step, epoch, values in rows:
        items.append((sequence + gap, time_us, step, epoch, keys, values))
        sequence += gap + len(values)
    count, body = encode_items(items)
    expected = [record for item in items for record in expand_row(item, tuple(ORIGIN.values()))]
    assert count == len(expected)
    assert list(map(as_bits, decode_body(body).to_records(**ORIGIN))) == list(
        map(as_bits, expected)
    )


def test_a_second_frame_behind_the_first_is_refused():
    good = encode_columns("metric", 100, {"value": [0.5 + i for i in range(100)]})
    assert good[:1] == b"\x01"
    bomb = compress_frame(bytes(1 << 20))
    with pytest.raises(SchemaValidationError, match="extra bytes after its end"):
        decode_body(good + bomb)


def test_a_frame_over_the_limit_is_refused_by_its_claim():
    frame = compress_frame(bytes(1000))
    assert decompress_frame(frame, "it", 1000) == bytes(1000)
    with pytest.raises(SchemaValidationError, match="states 1000 bytes"):
        decompress_frame(frame, "it", 999)


@pytest.mark.parametrize("count", [1 << 40, (1 << 26) + 1])
def test_rows_that_no_column_carries_are_refused(count):
    body = b"\x00" + msgspec.msgpack.encode([1, "metric", count, [["value", "c", 1.5, b"", b""]]])
    with pytest.raises(SchemaValidationError, match="records, more than allowed"):
        decode_body(body)
