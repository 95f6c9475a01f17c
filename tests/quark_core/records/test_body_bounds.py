"""Bodies that claim more than they may are refused before anything is allocated."""

import msgspec
import pytest

from quark_core.errors import SchemaValidationError
from quark_core.records.codec import compress_frame, decode_body, decompress_frame, encode_columns


def test_a_second_frame_behind_the_first_is_refused():
    good = encode_columns("metric", 100, {"value": [0.5 + i for i in range(100)]})
    assert good[:1] == b"\x01"
    bomb = compress_frame(bytes(1 << 20))
    with pytest.raises(SchemaValidationError, match="more behind its end"):
        decode_body(good + bomb)


def test_a_frame_over_the_limit_is_refused_by_its_claim():
    frame = compress_frame(bytes(1000))
    assert decompress_frame(frame, "it", 1000) == bytes(1000)
    with pytest.raises(SchemaValidationError, match="claims 1000 bytes"):
        decompress_frame(frame, "it", 999)


@pytest.mark.parametrize("count", [1 << 40, (1 << 26) + 1])
def test_rows_that_no_column_carries_are_refused(count):
    body = b"\x00" + msgspec.msgpack.encode([1, "metric", count, [["value", "c", 1.5, b"", b""]]])
    with pytest.raises(SchemaValidationError, match="records; refused"):
        decode_body(body)
