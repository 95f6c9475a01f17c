"""Chunks: many rows of one kind as columns that are compressed each on its own.

A chunk's body is the xxh3_64 of the rest, then a msgpack array `[version, count,
columns]`, a column `[name, encoding, head, nulls, data]` as `column_codec` says.
A column that nobody asks for costs its name only. Beside it lies which records were
in each batch that was taken apart for it: a mirror may want the batch again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from quark_backends.store.encoding.bodies import DamagedError
from quark_backends.store.encoding.column_codec import (
    CODEC_ZSTD,
    EncodedColumn,
    check_codec,
    count_up,
    decode_codes,
    decode_column,
    encode_column,
    fill_missing,
)
from quark_core.errors import SchemaValidationError
from quark_core.records.codec import decompress_frame
from quark_core.records.columns import Array, Columns, MakeArray, fill_array
from quark_core.records.schema import ORIGIN_FIELDS, column_types, default_value, optional_fields

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
            f"chunk has format version {decoded.version}; this Quark reads up to {_VERSION}"
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
