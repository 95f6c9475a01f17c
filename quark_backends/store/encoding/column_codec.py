"""How a chunk keeps a column: what compresses best, and is decoded at once by numpy.

    c  every value is `head`
    a  integers `head[0] + row * head[1]`
    d  integers: `head` is [first, width]; `data` holds the differences, the first of them 0
    p  integers, compressed by pcodec
    f  floats of `head` bytes each
    q  floats of `head` bytes each, compressed by pcodec
    t  texts: `head` is the width of an index; `data` holds the texts and the indexes
    j  JSON: `data` holds the encoded values

Data of `d` and `f` is shuffled (all first bytes, then all second bytes …),
which zstd compresses far better. A float column whose values are all of single
precision is kept so. `nulls` is empty or has a bit a row, set where the value
is None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np

from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.codec import MISSING_INDEX, decompress_frame
from quark_core.records.columns import Array, fill_array
from quark_core.records.json_object import decode_json, encode_json
from quark_core.records.schema import column_types, default_value, restore_object, restorers

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODEC_ZSTD = 1
CODEC_PCODEC = 2

_LEVEL = 5
_MAX_COLUMN_BYTES = 1 << 30


class EncodedColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column of a chunk, still encoded; see the module."""

    name: str
    encoding: str
    head: Any = None
    nulls: bytes = b""
    # Not copied out of the chunk: most columns are never asked for.
    data: memoryview = memoryview(b"")


class MissingCodecError(SessionStoreError):
    """A chunk needs a library that is not installed here; the chunk is sound."""


@cache
def best_codec() -> int:
    """The codec for new chunks: pcodec where it is installed."""
    return CODEC_ZSTD if _import_pcodec() is None else CODEC_PCODEC


@cache
def _import_pcodec() -> Any:
    try:
        from pcodec import standalone  # type: ignore[import-untyped]
    except ImportError:
        return None
    return standalone


def encode_column(
    name: str, encoding: str, values: Array, is_null: Array | None, codec: int
) -> EncodedColumn:
    """Encode one column.

    Args:
        name: The field.
        encoding: Its type, as `column_types` says.
        values: At least one.
        is_null: Of floats: which of them are None.
        codec: How numbers are compressed.
    """
    if encoding == "i":
        return _encode_integers(name, values, codec)
    if encoding == "f":
        assert is_null is not None
        return _encode_floats(name, values, is_null, codec)
    return _encode_texts(name, values) if encoding == "t" else _encode_json(name, values)


def check_codec(columns: Iterable[EncodedColumn]) -> None:
    """See that what the columns need is installed.

    Raises:
        MissingCodecError: It is not.
    """
    if any(column.encoding in ("p", "q") for column in columns) and _import_pcodec() is None:
        raise MissingCodecError(
            "part of this run is compressed by pcodec, which is not installed here: "
            'pip install "quark-tracker[pcodec]"'
        )


def decode_column(kind: str, column: EncodedColumn, count: int, *, single: bool = False) -> Array:
    """Values of a column, as `Columns` has them.

    Args:
        kind: Kind of the records.
        column: The column.
        count: How many values it has.
        single: Leave floats in the precision that they are kept in.

    Raises:
        SchemaValidationError: The column is damaged, or needs pcodec.
    """
    try:
        return _decode(kind, column, count, single=single)
    except (SchemaValidationError, SessionStoreError):
        raise
    except (zstd.ZstdError, msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
        raise SchemaValidationError(f"column {column.name} is damaged: {error}") from error


def decode_codes(
    kind: str, column: EncodedColumn, count: int, read: dict[bytes, list[Any]]
) -> tuple[list[Any], Array]:
    """The different texts of a column, and which of them each row has.

    Args:
        kind: Kind of the records.
        column: The column.
        count: How many values it has.
        read: Texts that were read before, by their bytes; those of this column are added.

    Raises:
        SchemaValidationError: As `decode_column`.
    """
    if column.encoding == "c":
        return [column.head], np.zeros(count, dtype=np.uint8)
    if column.encoding != "t":
        texts = decode_column(kind, column, count).tolist()
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return list(places), np.array([places[text] for text in texts], dtype=np.int64)
    try:
        names, packed = msgspec.msgpack.decode(column.data, type=tuple[bytes, bytes])
        known = read.get(names)
        if known is None:
            known = msgspec.msgpack.decode(_decompress(names), type=list[Any])
            read[names] = known
        codes = _unpack(packed, f"<u{column.head}", count)
    except (zstd.ZstdError, msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
        raise SchemaValidationError(f"column {column.name} is damaged: {error}") from error
    if len(codes) and codes.max() >= len(known):
        raise SchemaValidationError(f"column {column.name} is damaged: it names no text")
    return known, codes


def _encode_integers(name: str, values: Array, codec: int) -> EncodedColumn:
    first = int(values[0])
    differences = np.diff(values)
    if not len(differences) or bool((differences == differences[0]).all()):
        step = int(differences[0]) if len(differences) else 0
        return EncodedColumn(name, "a", [first, step]) if step else EncodedColumn(name, "c", first)
    pcodec = _import_pcodec()
    if codec == CODEC_PCODEC and pcodec is not None:
        from pcodec import ChunkConfig

        return EncodedColumn(
            name, "p", None, b"", memoryview(pcodec.simple_compress(values, ChunkConfig()))
        )
    # Wraps round where a difference exceeds 64 bits, and back again when it is summed up.
    differences = np.concatenate((np.zeros(1, np.int64), differences))
    low, high = int(differences.min()), int(differences.max())
    width = next(w for w in (1, 2, 4, 8) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    return EncodedColumn(
        name, "d", [first, width], b"", memoryview(_pack(differences.astype(f"<i{width}")))
    )


def _encode_floats(name: str, values: Array, is_null: Array, codec: int) -> EncodedColumn:
    nulls = b""
    if is_null.any():
        if is_null.all():
            return EncodedColumn(name, "c", None)
        nulls = np.packbits(is_null).tobytes()
    bits = values.view(np.int64)
    if not nulls and bool((bits == bits[0]).all()) and np.isfinite(values[0]):
        return EncodedColumn(name, "c", float(values[0]))
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        exact = bool((single.astype(np.float64).view(np.int64) == bits).all())
    kept, width = (single, 4) if exact else (values, 8)
    pcodec = _import_pcodec()
    if codec == CODEC_PCODEC and pcodec is not None:
        from pcodec import ChunkConfig

        return EncodedColumn(
            name, "q", width, nulls, memoryview(pcodec.simple_compress(kept, ChunkConfig()))
        )
    return EncodedColumn(name, "f", width, nulls, memoryview(_pack(kept.astype(f"<f{width}"))))


def _encode_texts(name: str, values: Array) -> EncodedColumn:
    indexes: dict[Any, int] = {}
    codes = [indexes.setdefault(value, len(indexes)) for value in values.tolist()]
    if len(indexes) == 1:
        return EncodedColumn(name, "c", codes and next(iter(indexes)))
    width = 1 if len(indexes) < 1 << 8 else 2 if len(indexes) < 1 << 16 else 4
    texts = msgspec.msgpack.encode(list(indexes))
    packed = _pack(np.array(codes, dtype=f"<u{width}"))
    data = msgspec.msgpack.encode([zstd.compress(texts, _LEVEL), packed])
    return EncodedColumn(name, "t", width, b"", memoryview(data))


def _encode_json(name: str, values: Array) -> EncodedColumn:
    # As Python's: a broken client may have sent numbers under the name of this column.
    plain = values.tolist()
    if all(value is None for value in plain):
        return EncodedColumn(name, "c", None)
    items = [None if value is None else encode_json(value) for value in plain]
    return EncodedColumn(
        name, "j", None, b"", memoryview(zstd.compress(msgspec.msgpack.encode(items), _LEVEL))
    )


def _decode(kind: str, column: EncodedColumn, count: int, *, single: bool = False) -> Array:
    """Values of a column; floats as they are kept where single precision will do."""
    encoding, head = column.encoding, column.head
    if encoding == "c":
        if head is None:
            return fill_missing(kind, column.name, count)
        return fill_array(count, head)
    if encoding == "a":
        line: Array = count_up(count) * head[1] + head[0]
        return line
    if encoding == "d":
        first, width = head
        out = _unpack(column.data, f"<i{width}", count).cumsum(dtype=np.int64)
        out += first
        return out
    if encoding == "f":
        floats = _unpack(column.data, f"<f{head}", count)
        return floats if single and not column.nulls else _mask(_widen(floats), column, count)
    if encoding in ("p", "q"):
        check_codec([column])
        pcodec = _import_pcodec()
        values: Array = _decode_pcodec(pcodec, column.data)
        if len(values) != count:
            raise SchemaValidationError(f"{len(values)} values instead of {count}")
        if encoding == "p" or (single and not column.nulls):
            return values
        return _mask(_widen(values), column, count)
    if encoding == "t":
        texts, packed = msgspec.msgpack.decode(column.data, type=tuple[bytes, bytes])
        known = np.array(msgspec.msgpack.decode(_decompress(texts)), dtype=object)
        return np.asarray(known[_unpack(packed, f"<u{head}", count)])
    if encoding == "j":
        items = msgspec.msgpack.decode(_decompress(column.data), type=list[bytes | None])
        make: Callable[[Any], Any] = restorers(kind).get(column.name) or partial(
            restore_object, column.name
        )
        out = np.empty(len(items), dtype=object)
        out[:] = [None if item is None else make(decode_json(item)) for item in items]
        if len(out) != count:
            raise SchemaValidationError(f"{len(out)} values instead of {count}")
        return out
    raise SchemaValidationError(
        f"column {column.name} has the unknown encoding {encoding!r}; "
        "it was written by a newer version of Quark"
    )


def _decode_pcodec(pcodec: Any, data: memoryview) -> Array:
    try:
        return np.asarray(pcodec.simple_decompress(bytes(data)))
    except Exception as error:
        raise SchemaValidationError(f"pcodec: {error}") from error


def _widen(values: Array) -> Array:
    return values.astype(np.float64)


@cache
def count_up(count: int) -> Array:
    """0, 1, 2 …; shared, so not to be changed."""
    return np.arange(count, dtype=np.int64)


def _mask(values: Array, column: EncodedColumn, count: int) -> Array:
    if not column.nulls:
        return values
    bits = np.frombuffer(column.nulls, dtype=np.uint8)
    return np.where(np.unpackbits(bits, count=count).astype(np.bool_), np.nan, values)


def fill_missing(kind: str, name: str, count: int) -> Array:
    """What stands for a column that its writer did not know, or that holds nothing."""
    value, encoding = default_value(kind, name), column_types(kind)[name]
    if value is None and encoding == "i":
        value = MISSING_INDEX
    elif value is None and encoding == "f":
        value = float("nan")
    return fill_array(count, value)


def _pack(values: Array) -> bytes:
    """Compress an array, byte by byte of its values."""
    width = values.dtype.itemsize
    raw = np.ascontiguousarray(values).view(np.uint8)
    shuffled = raw.reshape(-1, width).T.tobytes() if width > 1 else raw.tobytes()
    return zstd.compress(shuffled, _LEVEL)


def _unpack(data: bytes | memoryview, dtype: str, count: int) -> Array:
    kind = np.dtype(dtype)
    raw = np.frombuffer(_decompress(data), dtype=np.uint8)
    if len(raw) != count * kind.itemsize:
        raise SchemaValidationError(f"{len(raw)} bytes instead of {count * kind.itemsize}")
    if kind.itemsize == 1:
        return raw.view(kind)
    out = np.empty((count, kind.itemsize), dtype=np.uint8)
    # Byte by byte takes a third of the time of a transposed copy.
    for place, part in enumerate(raw.reshape(kind.itemsize, count)):
        out[:, place] = part
    return out.view(kind)[:, 0]


def _decompress(data: bytes | memoryview) -> bytes:
    return decompress_frame(data, "a column", _MAX_COLUMN_BYTES)
