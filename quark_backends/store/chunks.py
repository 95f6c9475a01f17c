"""Chunks: many rows of one kind as columns, each encoded and compressed on its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from quark_backends.store.batch_bodies import DamagedError
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.codec import MISSING_INDEX, decompress_frame
from quark_core.records.columns import Array, Columns, MakeArray, fill_array
from quark_core.records.json_object import decode_json, encode_json
from quark_core.records.schema import (
    ORIGIN_FIELDS,
    column_types,
    default_value,
    optional_fields,
    restore_object,
    restorers,
)

# How a chunk keeps a column: what compresses best, and is decoded at once by numpy.
#
# c  every value is `head`
# a  integers `head[0] + row * head[1]`
# d  integers: `head` is [first, width]; `data` holds the differences, the first of them 0
# p  integers, compressed by pcodec
# f  floats of `head` bytes each
# q  floats of `head` bytes each, compressed by pcodec
# t  texts: `head` is the width of an index; `data` holds the texts and the indexes
# j  JSON: `data` holds the encoded values
#
# Data of `d` and `f` is shuffled (all first bytes, then all second bytes …),
# which zstd compresses far better. A float column whose values are all of single
# precision is kept so. `nulls` is empty or has a bit a row, set where the value
# is None.

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
            "part of this run is compressed with pcodec, which is not installed: pip install "
            '"quark-tracker[pcodec]"'
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
        raise SchemaValidationError(f"column {column.name} is damaged: it refers to a missing text")
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
        f"column {column.name} has the unknown encoding {encoding!r}, which a newer version of "
        "Quark wrote"
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


# Chunks: many rows of one kind as columns that are compressed each on its own.
#
# A chunk's body is the xxh3_64 of the rest, then a msgpack array `[version, count,
# columns]`, a column `[name, encoding, head, nulls, data]` as `column_codec` says.
# A column that nobody asks for costs its name only. Beside it lies which records were
# in each batch that was taken apart for it: a mirror may want the batch again.

_VERSION = 1
_CHECKSUM_BYTES = 8
_PLAIN = (int, float, list)
_DTYPES: Mapping[str, type] = {"i": np.int64, "f": np.float64}


class _Body(msgspec.Struct, frozen=True, array_like=True):
    version: int
    count: int
    columns: list[EncodedColumn]


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
            return fill_missing(self.kind, name, self.count)
        return decode_column(self.kind, column, self.count)

    def codes(self, name: str, read: dict[bytes, list[Any]]) -> tuple[list[Any], Array]:
        """The different texts of a column, and which of them each row has; see `decode_codes`.

        Raises:
            SchemaValidationError: As `array`.
        """
        column = self._columns.get(name)
        if column is None:
            column = EncodedColumn(name, "c", default_value(self.kind, name))
        return decode_codes(self.kind, column, self.count, read)

    def fill(self, name: str, out: Array) -> None:
        """Write the values of a column of numbers into an array of `count` places.

        Raises:
            SchemaValidationError: As `array`.
        """
        column = self._columns.get(name)
        if column is not None and column.encoding in ("a", "c") and type(column.head) in _PLAIN:
            if column.encoding == "c":
                out[:] = column.head
            else:
                first, step = column.head
                np.multiply(count_up(self.count), step, out=out)
                out += first
            return
        # float32 becomes float64 on the way, without an array in between.
        out[:] = (
            self.array(name)
            if column is None
            else decode_column(self.kind, column, self.count, single=True)
        )

    def constant(self, name: str) -> tuple[Any] | None:
        """The value of a column that is the same in every row, in a tuple; None for another."""
        column = self._columns.get(name)
        return (column.head,) if column is not None and column.encoding == "c" else None

    def affine(self, name: str) -> tuple[int, int] | None:
        """First value and difference of a column of integers that is a straight line."""
        column = self._columns.get(name)
        if column is None:
            return None
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


def join_chunks(
    chunks: Sequence[Chunk], origin: Mapping[str, Any], constants: Mapping[str, Any]
) -> Columns:
    """The rows of chunks of one kind, one chunk after the other.

    Args:
        chunks: At least one.
        origin: Values of the origin fields.
        constants: Field name -> value, of fields that the chunks leave out.
    """
    kind, kept = chunks[0].kind, tuple(chunks)
    count = sum(chunk.count for chunk in kept)

    def join(name: str, dtype: Any) -> Array:
        if dtype is object:
            return np.concatenate([chunk.array(name) for chunk in kept])
        line = _find_line(kept, name) if dtype is np.int64 else None
        if line is not None:
            return line
        out = np.empty(count, dtype=dtype)
        place = 0
        for chunk in kept:
            chunk.fill(name, out[place : place + chunk.count])
            place += chunk.count
        return out

    arrays: dict[str, Array | MakeArray] = {}
    nulls: dict[str, Array] = {}
    shared = {**{name: origin[name] for name in ORIGIN_FIELDS}, **constants}
    for name, value in shared.items():
        arrays[name] = partial(fill_array, count, value)
    optional = optional_fields(kind)
    for name, encoding in column_types(kind).items():
        if name in constants:
            continue
        found = [chunk.constant(name) for chunk in kept]
        if found[0] is not None and all(each == found[0] for each in found):
            shared[name] = found[0][0]
        arrays[name] = partial(join, name, _DTYPES.get(encoding, object))
        if encoding == "f" and name in optional:
            parts = [chunk.nulls(name) for chunk in kept]
            if any(part is not None for part in parts):
                nulls[name] = np.concatenate(
                    [
                        np.zeros(chunk.count, dtype=np.bool_) if part is None else part
                        for chunk, part in zip(kept, parts, strict=True)
                    ]
                )
    return Columns(kind, count, arrays, nulls, shared)


def _find_line(chunks: Sequence[Chunk], name: str) -> Array | None:
    """A column of integers that is one straight line over all chunks; None where it is not."""
    wanted: tuple[int, int] | None = None
    for chunk in chunks:
        found = chunk.affine(name)
        if found is None or wanted not in (None, found):
            return None
        wanted = (found[0] + chunk.count * found[1], found[1])
    first, step = chunks[0].affine(name) or (0, 0)
    # Wraps round where a line leaves 64 bits, as its differences did when they were taken.
    line: Array = np.arange(sum(chunk.count for chunk in chunks), dtype=np.int64)
    line *= np.int64(step)
    line += np.int64(first)
    return line


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
        constant = columns.find_constant(name)
        if constant is not None and (encoding == "t" or (encoding == "j" and constant[0] is None)):
            encoded.append(EncodedColumn(name, "c", constant[0]))
            continue
        is_null = columns.is_null(name) if encoding == "f" else None
        encoded.append(encode_column(name, encoding, columns[name], is_null, codec))
    body = msgspec.msgpack.encode(_Body(_VERSION, columns.count, encoded))
    return xxhash.xxh3_64_digest(body) + body


def decode_chunk(kind: str, body: bytes) -> Chunk:
    """Open a chunk of this version or an older one.

    Raises:
        DamagedError: It is not what was written.
        SchemaValidationError: A version that this Quark does not know.
        MissingCodecError: It needs a library that is not installed here.
    """
    checksum, rest = body[:_CHECKSUM_BYTES], memoryview(body)[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(rest) != checksum:
        raise DamagedError("its checksum is wrong")
    try:
        decoded = msgspec.msgpack.decode(rest, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaValidationError(f"chunk is damaged: {error}") from error
    if decoded.version > _VERSION:
        raise SchemaValidationError(
            f"chunk has format version {decoded.version}, but this Quark reads up to {_VERSION}"
        )
    check_codec(decoded.columns)
    return Chunk(kind, decoded)


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class BatchSpan(msgspec.Struct, frozen=True, array_like=True):
    """The sequences of one batch.

    Attributes:
        number: The batch's number.
        runs: First sequence, how many follow each other, first of the next run …
    """

    number: int
    runs: list[int]

    @classmethod
    def of(cls, number: int, sequences: Any) -> BatchSpan:
        """The span of a batch with these sequences, an array in the order of the batch."""
        if not len(sequences):
            return cls(number, [])
        starts = np.concatenate(([0], np.flatnonzero(np.diff(sequences) != 1) + 1))
        counts = np.diff(starts, append=len(sequences))
        return cls(number, np.column_stack((sequences[starts], counts)).ravel().tolist())

    @property
    def sequences(self) -> list[int]:
        """The batch's sequences, in its order."""
        pairs = zip(self.runs[::2], self.runs[1::2], strict=True)
        return [first + index for first, count in pairs for index in range(count)]


def encode_spans(kind: str, spans: Sequence[BatchSpan]) -> bytes:
    """Encode the spans of batches of one kind, in the order of their numbers."""
    return zstd.compress(msgspec.msgpack.encode((kind, list(spans))), 5)


def decode_spans(body: bytes) -> tuple[str, list[BatchSpan]]:
    """The kind and the spans.

    Raises:
        SchemaValidationError: Damaged bytes.
    """
    try:
        return msgspec.msgpack.decode(
            decompress_frame(body, "frames"), type=tuple[str, list[BatchSpan]]
        )
    except msgspec.DecodeError as error:
        raise SchemaValidationError(f"frames are damaged: {error}") from error
