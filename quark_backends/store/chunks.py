"""Chunks: many rows of one kind as columns that are compressed each on its own.

A chunk's body is the xxh3_64 of the rest, then a msgpack array `[version, count,
columns]`, a column `[name, encoding, head, nulls, data]` with one of these encodings:

    c  every value is `head`
    a  integers `head[0] + row * head[1]`
    d  integers: `head` is [first, width]; `data` holds the differences, the first of them 0
    p  integers, compressed by pcodec
    f  floats of `head` bytes each
    q  floats of `head` bytes each, compressed by pcodec
    t  texts: `head` is the width of an index; `data` holds the texts and the indexes
    j  JSON: `data` holds the encoded values

Data of `d` and `f` is shuffled (all first bytes, then all second bytes …),
which zstd compresses far better, and is decoded at once by numpy. A float
column whose values are all of single precision is kept so. `nulls` is empty or
has a bit a row, set where the value is None.

A column that nobody asks for costs its name only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec
import numpy as np
import xxhash

from quark_core.codec import MISSING_INDEX
from quark_core.columns import Array, Columns, fill_array
from quark_core.errors import SchemaValidationError
from quark_core.fields import column_types, default_value, tuple_fields
from quark_core.json_object import decode_json, encode_json

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = [
    "CODEC_PCODEC",
    "CODEC_ZSTD",
    "Chunk",
    "MissingCodecError",
    "best_codec",
    "decode_chunk",
    "encode_chunk",
]

CODEC_ZSTD = 1
CODEC_PCODEC = 2

_VERSION = 1
_LEVEL = 5
_CHECKSUM_BYTES = 8
_MAX_COLUMN_BYTES = 1 << 30
_ORIGIN = ("run_id", "writer_id", "attempt", "rank")


class _Column(msgspec.Struct, frozen=True, array_like=True):
    name: str
    encoding: str
    head: Any = None
    nulls: bytes = b""
    data: bytes = b""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    version: int
    count: int
    columns: list[_Column]


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


class MissingCodecError(SchemaValidationError):
    """A chunk needs a library that is not installed here; the chunk is sound."""


class Chunk:
    """A decoded chunk, whose columns are decoded one by one, when asked for."""

    __slots__ = ("_columns", "count", "kind")

    def __init__(self, kind: str, body: _Body) -> None:
        self.kind = kind
        self.count = body.count
        self._columns = {column.name: column for column in body.columns}

    def array(self, name: str) -> Array:
        """Values of a column, as `Columns` has them.

        Raises:
            SchemaValidationError: The column is damaged, or needs pcodec.
        """
        column = self._columns.get(name)
        if column is None:
            return _fill_missing(self.kind, name, self.count)
        try:
            return _decode_column(self.kind, column, self.count)
        except SchemaValidationError:
            raise
        except (zstd.ZstdError, msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
            raise SchemaValidationError(f"column {name} is damaged: {error}") from error

    def affine(self, name: str) -> tuple[int, int] | None:
        """First value and difference of a column of integers that is a straight line."""
        column = self._columns[name]
        if column.encoding == "a":
            return int(column.head[0]), int(column.head[1])
        if column.encoding == "c" and isinstance(column.head, int):
            return column.head, 0
        return None

    def nulls(self, name: str) -> Array | None:
        """Which values of a column of floats are None rather than NaN; None where none is."""
        column = self._columns.get(name)
        if column_types(self.kind)[name] != "f":
            return None
        if column is None or (column.encoding == "c" and column.head is None):
            return np.ones(self.count, dtype=np.bool_)
        if not column.nulls:
            return None
        bits = np.frombuffer(column.nulls, dtype=np.uint8)
        return np.unpackbits(bits, count=self.count).astype(np.bool_)

    def to_columns(self, origin: Mapping[str, Any], constants: Mapping[str, Any]) -> Columns:
        """The rows, with the fields that all of them share.

        Args:
            origin: Values of the origin fields.
            constants: Field name -> value, of fields that the chunk leaves out.
        """
        arrays: dict[str, Any] = {}
        nulls: dict[str, Array] = {}
        shared = {**{name: origin[name] for name in _ORIGIN}, **constants}
        for name in (*_ORIGIN, *column_types(self.kind)):
            if name in shared:
                arrays[name] = _lazily(fill_array, self.count, shared[name])
                continue
            arrays[name] = _lazily(self.array, name)
            is_null = self.nulls(name)
            if is_null is not None:
                nulls[name] = is_null
        return Columns(self.kind, self.count, arrays, nulls)


def encode_chunk(
    columns: Columns, *, leave_out: frozenset[str] = frozenset(), codec: int = CODEC_ZSTD
) -> bytes:
    """Encode rows of one writer and kind.

    Args:
        columns: The rows.
        leave_out: Fields that whoever reads them knows otherwise.
        codec: How integers and floats are compressed.
    """
    encoded = []
    for name, encoding in column_types(columns.kind).items():
        if name in leave_out:
            continue
        values = columns[name]
        if encoding == "i":
            encoded.append(_encode_integers(name, values, codec))
        elif encoding == "f":
            encoded.append(_encode_floats(name, values, columns.is_null(name), codec))
        elif encoding == "t":
            encoded.append(_encode_texts(name, values))
        else:
            encoded.append(_encode_json(name, values))
    body = msgspec.msgpack.encode(_Body(_VERSION, columns.count, encoded))
    return xxhash.xxh3_64_digest(body) + body


def decode_chunk(kind: str, body: bytes) -> Chunk:
    """Open a chunk of this version or an older one.

    Raises:
        SchemaValidationError: Damaged bytes, or a version that this Quark does not know.
    """
    checksum, rest = body[:_CHECKSUM_BYTES], memoryview(body)[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(rest) != checksum:
        raise SchemaValidationError("chunk is damaged: its checksum is wrong")
    try:
        decoded = msgspec.msgpack.decode(rest, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaValidationError(f"chunk is damaged: {error}") from error
    if decoded.version > _VERSION:
        raise SchemaValidationError(
            f"chunk has format version {decoded.version}; this Quark reads up to {_VERSION}"
        )
    return Chunk(kind, decoded)


def _encode_integers(name: str, values: Array, codec: int) -> _Column:
    first = int(values[0])
    differences = np.diff(values)
    if not len(differences) or bool((differences == differences[0]).all()):
        step = int(differences[0]) if len(differences) else 0
        return _Column(name, "a", [first, step]) if step else _Column(name, "c", first)
    pcodec = _import_pcodec()
    if codec == CODEC_PCODEC and pcodec is not None:
        from pcodec import ChunkConfig

        return _Column(name, "p", None, b"", pcodec.simple_compress(values, ChunkConfig()))
    # Wraps round where a difference exceeds 64 bits, and back again when it is summed up.
    differences = np.concatenate((np.zeros(1, np.int64), differences))
    low, high = int(differences.min()), int(differences.max())
    width = next(w for w in (1, 2, 4, 8) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    return _Column(name, "d", [first, width], b"", _pack(differences.astype(f"<i{width}")))


def _encode_floats(name: str, values: Array, is_null: Array, codec: int) -> _Column:
    nulls = b""
    if is_null.any():
        if is_null.all():
            return _Column(name, "c", None)
        nulls = np.packbits(is_null).tobytes()
    bits = values.view(np.int64)
    if not nulls and bool((bits == bits[0]).all()) and np.isfinite(values[0]):
        return _Column(name, "c", float(values[0]))
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        exact = bool((single.astype(np.float64).view(np.int64) == bits).all())
    kept, width = (single, 4) if exact else (values, 8)
    pcodec = _import_pcodec()
    if codec == CODEC_PCODEC and pcodec is not None:
        from pcodec import ChunkConfig

        return _Column(name, "q", width, nulls, pcodec.simple_compress(kept, ChunkConfig()))
    return _Column(name, "f", width, nulls, _pack(kept.astype(f"<f{width}")))


def _encode_texts(name: str, values: Array) -> _Column:
    indexes: dict[Any, int] = {}
    codes = [indexes.setdefault(value, len(indexes)) for value in values.tolist()]
    if len(indexes) == 1:
        return _Column(name, "c", codes and next(iter(indexes)))
    width = 1 if len(indexes) < 1 << 8 else 2 if len(indexes) < 1 << 16 else 4
    texts = msgspec.msgpack.encode(list(indexes))
    packed = _pack(np.array(codes, dtype=f"<u{width}"))
    data = msgspec.msgpack.encode([zstd.compress(texts, _LEVEL), packed])
    return _Column(name, "t", width, b"", data)


def _encode_json(name: str, values: Array) -> _Column:
    if all(value is None for value in values):
        return _Column(name, "c", None)
    items = [None if value is None else encode_json(value) for value in values]
    return _Column(name, "j", None, b"", zstd.compress(msgspec.msgpack.encode(items), _LEVEL))


def _decode_column(kind: str, column: _Column, count: int) -> Array:
    encoding, head = column.encoding, column.head
    if encoding == "c":
        if head is None:
            return _fill_missing(kind, column.name, count)
        return fill_array(count, head)
    if encoding == "a":
        line: Array = np.arange(count, dtype=np.int64) * head[1] + head[0]
        return line
    if encoding == "d":
        first, width = head
        out = _unpack(column.data, f"<i{width}", count).cumsum(dtype=np.int64)
        out += first
        return out
    if encoding == "f":
        floats = _unpack(column.data, f"<f{head}", count).astype(np.float64)
        return _mask(floats, column, count)
    if encoding in ("p", "q"):
        pcodec = _import_pcodec()
        if pcodec is None:
            raise MissingCodecError(
                f"column {column.name} is compressed by pcodec, which is not installed here: "
                'pip install "quark-tracker[pcodec]"'
            )
        values: Array = _decode_pcodec(pcodec, column.data)
        if len(values) != count:
            raise SchemaValidationError(f"{len(values)} values instead of {count}")
        return values if encoding == "p" else _mask(values.astype(np.float64), column, count)
    if encoding == "t":
        texts, packed = msgspec.msgpack.decode(column.data, type=tuple[bytes, bytes])
        known = np.array(msgspec.msgpack.decode(_decompress(texts)), dtype=object)
        return np.asarray(known[_unpack(packed, f"<u{head}", count)])
    if encoding == "j":
        items = msgspec.msgpack.decode(_decompress(column.data), type=list[bytes | None])
        make: Callable[[Any], Any] = tuple if column.name in tuple_fields(kind) else _keep
        out = np.empty(len(items), dtype=object)
        out[:] = [None if item is None else make(decode_json(item)) for item in items]
        if len(out) != count:
            raise SchemaValidationError(f"{len(out)} values instead of {count}")
        return out
    raise SchemaValidationError(
        f"column {column.name} has the unknown encoding {encoding!r}; "
        "it was written by a newer version of Quark"
    )


def _decode_pcodec(pcodec: Any, data: bytes) -> Array:
    try:
        return np.asarray(pcodec.simple_decompress(data))
    except Exception as error:
        raise SchemaValidationError(f"pcodec: {error}") from error


def _mask(values: Array, column: _Column, count: int) -> Array:
    if not column.nulls:
        return values
    bits = np.frombuffer(column.nulls, dtype=np.uint8)
    return np.where(np.unpackbits(bits, count=count).astype(np.bool_), np.nan, values)


def _fill_missing(kind: str, name: str, count: int) -> Array:
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
    shuffled = values.view(np.uint8).reshape(-1, width).T.tobytes() if width > 1 else values
    return zstd.compress(bytes(shuffled), _LEVEL)


def _unpack(data: bytes, dtype: str, count: int) -> Array:
    kind = np.dtype(dtype)
    raw = np.frombuffer(_decompress(data), dtype=np.uint8)
    if len(raw) != count * kind.itemsize:
        raise SchemaValidationError(f"{len(raw)} bytes instead of {count * kind.itemsize}")
    if kind.itemsize == 1:
        return raw.view(kind)
    return np.ascontiguousarray(raw.reshape(kind.itemsize, count).T).view(kind)[:, 0]


def _decompress(data: bytes) -> bytes:
    size = zstd.get_frame_info(data).decompressed_size
    if size is None or size > _MAX_COLUMN_BYTES:
        raise SchemaValidationError(f"a column claims {size} bytes; refused")
    return zstd.decompress(data)


def _lazily(make: Callable[..., Array], *arguments: Any) -> Callable[[], Array]:
    return lambda: make(*arguments)


def _keep(value: Any) -> Any:
    return value
