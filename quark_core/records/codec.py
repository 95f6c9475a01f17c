"""Batches of records as columns and bytes: the only place that knows the wire form.

A body is one marker byte (0: plain, 1: zstd) and a msgpack array
`[version, kind, count, columns]`. A column is
`[name, encoding, head, nulls, data]` with one of these encodings:

    c  every value is `head` (null, bool, int, float or text)
    i  integers: `head` is [first value, width in bytes of the differences];
       `data` holds little-endian differences, the first of them 0
    f  `data` holds little-endian float64
    t  texts: `head` is [the distinct texts, width of an index]; `data` holds indexes
    j  JSON: `head` is a list of encoded values, null for None

`nulls` is empty, or one byte a row, 1 where the value is None. Columns are
found by name: a reader skips those it does not know and fills in defaults
for those that an older writer did not know.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import sub as subtract
from typing import TYPE_CHECKING, Any

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, StreamRecord
from quark_core.records.json_object import decode_json, encode_json
from quark_core.records.names import check_text
from quark_core.records.schema import (
    ORIGIN_FIELDS,
    boolean_fields,
    column_types,
    default_value,
    restore_object,
    restorers,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BODY_VERSION = 1
MISSING_INDEX = -1
"""What stands in an integer array where a record has None; no valid value is negative."""

_COMMON_FIELDS = frozenset({"sequence", "time_us"})
_COMPRESS_FROM_BYTES = 256
_MAX_ROWS = 1 << 26
_PLAIN = b"\x00"
_ZSTD = b"\x01"
_WIDTHS = ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
_TYPECODES = dict(_WIDTHS)


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One column of a body, still encoded."""

    name: str
    encoding: str
    head: Any = None
    nulls: bytes = b""
    data: bytes = b""

    def to_list(self, count: int) -> list[Any]:
        """Python values, None where there is none. Needs no numpy."""
        if self.encoding == "c":
            return [self.head] * count
        if self.encoding == "j":
            return [None if item is None else decode_json(item) for item in self.head]
        values: list[Any]
        if self.encoding == "i":
            first, width = self.head
            values = list(accumulate(_unpack(_TYPECODES[width], self.data), initial=first))[1:]
        elif self.encoding == "f":
            values = _unpack("d", self.data).tolist()
        elif self.encoding == "t":
            texts, width = self.head
            values = [texts[index] for index in _unpack(_TYPECODES[width], self.data)]
        else:
            raise SchemaValidationError(
                f"column {self.name!r} has the unknown encoding {self.encoding!r}, which a "
                "newer version of Quark wrote"
            )
        if self.nulls:
            values = [
                None if null else value for null, value in zip(self.nulls, values, strict=True)
            ]
        return values

    def to_array(self, count: int, rows: NDArray[np.int64] | None = None) -> NDArray[Any]:
        """A numpy array: int64 with `MISSING_INDEX` for None, float64 with NaN, or objects.

        Args:
            count: How many rows the column has.
            rows: The places of those that are wanted; all by default.
        """
        import numpy as np

        out: NDArray[Any]
        if self.encoding == "c":
            return _fill(count if rows is None else len(rows), self.head)
        if self.encoding == "t":
            texts, width = self.head
            indexes = np.frombuffer(self.data, dtype=f"<i{width}")
            known = np.array(texts, dtype=object)
            return np.asarray(known[indexes if rows is None else indexes[rows]])
        if self.encoding == "i":
            first, width = self.head
            out = np.frombuffer(self.data, dtype=f"<i{width}").cumsum(dtype=np.int64)
            out += first
            if self.nulls:
                out[np.frombuffer(self.nulls, dtype=np.bool_)] = MISSING_INDEX
        elif self.encoding == "f":
            out = np.frombuffer(self.data, dtype="<f8")
            if self.nulls:
                out = np.where(np.frombuffer(self.nulls, dtype=np.bool_), np.nan, out)
        else:
            out = np.empty(count, dtype=object)
            out[:] = self.to_list(count)
        return out if rows is None else np.asarray(out[rows])

    def equals(self, value: str, count: int) -> NDArray[np.bool_] | bool:
        """Which rows of a text column hold `value`; a bool where all or none do."""
        import numpy as np

        if self.encoding == "c":
            return bool(self.head == value)
        if self.encoding == "t":
            texts, width = self.head
            if value not in texts:
                return False
            found = np.frombuffer(self.data, dtype=f"<i{width}") == texts.index(value)
            return np.asarray(found, dtype=np.bool_)
        return np.asarray(self.to_array(count) == value, dtype=np.bool_)


class _Body(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: str
    count: int
    columns: list[Column]


class DecodedBody:
    """A body whose columns are decoded one by one, when asked for.

    Of a kind that is not known here, as of a plugin that is not installed, only `_COMMON_FIELDS`
    can be read: whoever recovers or delivers records needs no more.
    """

    __slots__ = ("_columns", "count", "kind", "version")

    def __init__(self, version: int, kind: str, count: int, columns: Iterable[Column]) -> None:
        self.version = version
        self.kind = kind
        self.count = count
        self._columns = {column.name: column for column in columns}

    def __contains__(self, name: str) -> bool:
        """Whether the writer knew a column."""
        return name in self._columns

    def column(self, name: str) -> Column:
        """The column, or one of its default where the writer did not know it."""
        found = self._columns.get(name)
        if found is None:
            found = Column(name, "c", default_value(self.kind, name))
        return found

    def to_list(self, name: str) -> list[Any]:
        """Values of a column as Python objects, as the records have them.

        Raises:
            SchemaValidationError: The kind is not known here, and not all kinds have the column.
        """
        if name in _COMMON_FIELDS and name in self:
            return self._columns[name].to_list(self.count)
        values = self.column(name).to_list(self.count)
        restore = bool if name in boolean_fields(self.kind) else restorers(self.kind).get(name)
        if restore is None and column_types(self.kind)[name] == "j":
            restore = partial(restore_object, name)
        if restore is not None:
            values = [None if value is None else restore(value) for value in values]
        return values

    def to_array(self, name: str, rows: NDArray[np.int64] | None = None) -> NDArray[Any]:
        """Values of a column as a numpy array, as `Column.to_array` says."""
        import numpy as np

        column = self.column(name)
        if column.encoding == "c" and column.head is None:
            encoding, count = column_types(self.kind)[name], self.count
            if encoding in ("i", "f"):
                missing = MISSING_INDEX if encoding == "i" else np.nan
                return np.full(count if rows is None else len(rows), missing)
        if column_types(self.kind)[name] == "j":
            out = np.empty(self.count, dtype=object)
            out[:] = self.to_list(name)
            return out if rows is None else out[rows]
        return column.to_array(self.count, rows)

    def nulls(self, name: str) -> NDArray[np.bool_] | None:
        """Which values of a column of floats are None rather than NaN; None where none is."""
        import numpy as np

        column = self.column(name)
        if column_types(self.kind)[name] != "f":
            return None
        if column.encoding == "c" and column.head is None:
            return np.ones(self.count, dtype=np.bool_)
        return np.frombuffer(column.nulls, dtype=np.bool_) if column.nulls else None

    def to_records(
        self, *, run_id: str | None, writer_id: str, attempt: int, rank: int
    ) -> list[StreamRecord]:
        """Record objects, in the order in which they were encoded."""
        record_type: Any = RECORD_TYPES[self.kind]
        columns = [
            self.to_list(name)
            for name in record_type.__struct_fields__
            if name not in ORIGIN_FIELDS
        ]
        return [
            record_type(run_id, writer_id, attempt, rank, *values)
            for values in zip(*columns, strict=True)
        ]


def encode_records(records: Sequence[StreamRecord]) -> bytes:
    """Encode records of one kind and one origin into a body.

    Raises:
        SchemaValidationError: No records, or records of several kinds or origins.
    """
    if not records:
        raise SchemaValidationError("records must not be empty")
    first = records[0]
    if any(type(record) is not type(first) for record in records):
        raise SchemaValidationError("records must all be of one kind")
    for name in ORIGIN_FIELDS:
        if any(getattr(record, name) != getattr(first, name) for record in records):
            raise SchemaValidationError(f"records must all have the same {name}")
    columns = {
        name: [getattr(record, name) for record in records] for name in column_types(first.KIND)
    }
    return encode_columns(first.KIND, len(records), columns)


def encode_columns(
    kind: str, count: int, columns: Mapping[str, Sequence[Any] | Column], compress: bool = True
) -> bytes:
    """Encode columns of Python values, or encoded ones; one left out is read as its default."""
    types, booleans = column_types(kind), boolean_fields(kind)
    encoded = []
    for name, given in columns.items():
        if isinstance(given, Column):
            encoded.append(given)
            continue
        values = given
        if name in booleans:
            values = [None if value is None else int(value) for value in given]
        encoded.append(_encode_column(name, types[name], values))
    try:
        body = msgspec.msgpack.encode(_Body(BODY_VERSION, kind, count, encoded))
    except UnicodeEncodeError:
        # One text that is no Unicode must not cost the others that are with it.
        encoded = [_clean(column) for column in encoded]
        body = msgspec.msgpack.encode(_Body(BODY_VERSION, kind, count, encoded))
    if not compress or len(body) < _COMPRESS_FROM_BYTES:
        return _PLAIN + body
    return _ZSTD + compress_frame(body)


def encode_repeated(name: str, texts: tuple[str | None, ...], times: int) -> Column:
    """A column of texts in which the same few follow each other again and again.

    Raises:
        SchemaValidationError: More than 127 different ones.
    """
    indexes: dict[str | None, int] = {}
    pattern = [indexes.setdefault(text, len(indexes)) for text in texts]
    if len(indexes) == 1:
        return Column(name, "c", texts[0])
    width, packed = _pack_narrow(pattern)
    return Column(name, "t", [list(indexes), width], b"", packed * times)


def encode_spread(name: str, values: list[int], times: int) -> Column:
    """A column of integers, without None, in which each follows itself so many times."""
    first = values[0]
    if first and values.count(first) == len(values):
        return Column(name, "c", first)
    width, packed = _pack_narrow([0, *map(subtract, values[1:], values)])
    data = bytearray(len(packed) * times)
    for place in range(width):
        data[place :: width * times] = packed[place::width]
    return Column(name, "i", [first, width], b"", bytes(data))


def encode_floats(name: str, values: array[float]) -> Column:
    """A column of floats, without None."""
    first = values[0]
    # As `_encode_column` tells a constant; most columns show that they are none at their end.
    if (
        first == first
        and first != 0.0
        and values[-1] == first
        and values.count(first) == len(values)
    ):
        return Column(name, "c", first)
    return Column(name, "f", None, b"", _pack("d", values))


def encode_float_array(name: str, values: NDArray[np.float64]) -> Column:
    """A column of floats, without None, of a numpy array."""
    return Column(name, "f", None, b"", values.astype("<f8", copy=False).tobytes())


def encode_integer_array(
    name: str, values: NDArray[np.int64], missing: NDArray[np.bool_] | None = None
) -> Column:
    """A column of integers of a numpy array that is not empty.

    Args:
        name: The column's.
        values: The integers. A difference of neighbours that leaves 64 bits wraps round, and so
            does the sum that takes it back.
        missing: Which of them are None.
    """
    import numpy as np

    if missing is not None and missing.any():
        if missing.all():
            return Column(name, "c", None)
        nulls = missing.astype(np.uint8).tobytes()
        # The last value over each gap, as `_fill_nulls` does.
        places = np.maximum.accumulate(np.where(missing, -1, np.arange(len(values))))
        values = values[np.where(places < 0, int(np.argmin(missing)), places)]
    else:
        nulls = b""
    differences = np.diff(values, prepend=values[0])
    low, high = int(differences.min()), int(differences.max())
    width = next(
        width
        for width, _ in _WIDTHS
        if -(1 << (8 * width - 1)) <= low and high < 1 << (8 * width - 1)
    )
    return Column(
        name, "i", [int(values[0]), width], nulls, differences.astype(f"<i{width}").tobytes()
    )


def encode_indexes(name: str, texts: Sequence[str | None], indexes: NDArray[np.int64]) -> Column:
    """A column of texts, each given by its place among the distinct ones."""
    width = next(width for width, _ in _WIDTHS if len(texts) <= 1 << (8 * width - 1))
    return Column(name, "t", [list(texts), width], b"", indexes.astype(f"<i{width}").tobytes())


def decode_body(body: bytes) -> DecodedBody:
    """Open a body of this version or an older one.

    Raises:
        SchemaValidationError: Damaged bytes, or a version that this Quark does not know.
    """
    try:
        decoded = msgspec.msgpack.decode(unpack_body(body), type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaValidationError(f"body is damaged: {error}") from error
    if decoded.version > BODY_VERSION:
        raise SchemaValidationError(
            f"body has format version {decoded.version}, but this Quark reads up to {BODY_VERSION}"
        )
    if decoded.count > _MAX_ROWS:
        # A column of one value is as long as the body says, whatever it weighs.
        raise SchemaValidationError(f"body states {decoded.count} records, more than allowed")
    return DecodedBody(decoded.version, decoded.kind, decoded.count, decoded.columns)


BODY_HEAD_BYTES = 32
"""So much of the beginning of a body says how large it is."""


def measure_body(head: bytes, stored_bytes: int) -> int:
    """How many bytes a body has once it is decompressed, by its beginning.

    Args:
        head: Its first `BODY_HEAD_BYTES` bytes.
        stored_bytes: How many it has as it is stored.
    """
    try:
        size = zstd.get_frame_info(head[1:]).decompressed_size if head[:1] == _ZSTD else None
    except zstd.ZstdError:
        size = None
    return stored_bytes if size is None else int(size)


def unpack_body(body: bytes) -> bytes:
    """The msgpack of a body.

    Raises:
        SchemaValidationError: Its marker or its frame is none.
    """
    marker, rest = body[:1], body[1:]
    if marker == _ZSTD:
        return decompress_frame(rest, "body")
    if marker != _PLAIN:
        raise SchemaValidationError(f"body starts with the unknown marker {marker!r}")
    return rest


def _encode_column(name: str, encoding: str, values: Sequence[Any]) -> Column:
    if encoding == "j":
        if all(value is None for value in values):
            return Column(name, "c", None)
        return Column(name, "j", [None if v is None else encode_json(v) for v in values])
    if encoding == "f":
        if None in values:
            values = [None if value is None else float(value) for value in values]
        else:
            values = list(map(float, values))
    first = values[0]
    # NaN differs from itself, and must not be taken for a constant because it is one object.
    if first == first and first != 0.0 and values.count(first) == len(values):
        return Column(name, "c", first)
    if encoding == "t":
        indexes: dict[Any, int] = {}
        data = [indexes.setdefault(value, len(indexes)) for value in values]
        width, packed = _pack_narrow(data)
        return Column(name, "t", [list(indexes), width], b"", packed)
    nulls = b""
    if None in values:
        nulls = bytes(value is None for value in values)
        present: Any = next(value for value in values if value is not None)
        values = _fill_nulls(values, present)
    if encoding == "f":
        return Column(name, "f", None, nulls, _pack("d", values))
    start = values[0]
    width, packed = _pack_narrow([0, *map(subtract, values[1:], values)])
    return Column(name, "i", [start, width], nulls, packed)


def _clean(column: Column) -> Column:
    """A column of texts in which halves of surrogate pairs are replaced."""

    def clean(text: Any) -> Any:
        return check_text(text, column.name) if isinstance(text, str) else text

    head = column.head
    if column.encoding == "t":
        # Two texts may become the same one: each keeps its place, which rows refer to.
        head = [[clean(text) for text in head[0]], head[1]]
    return msgspec.structs.replace(column, head=clean(head))


def _fill_nulls(values: Sequence[Any], present: Any) -> list[Any]:
    """Repeat the last value over each gap, which keeps differences small."""
    out = []
    for value in values:
        if value is not None:
            present = value
        out.append(present)
    return out


def _pack_narrow(values: list[int]) -> tuple[int, bytes]:
    low, high = min(values), max(values)
    for width, typecode in _WIDTHS:
        bound = 1 << (8 * width - 1)
        if -bound <= low and high < bound:
            return width, _pack(typecode, values)
    raise SchemaValidationError(f"integers from {low} to {high} do not fit in 64 bits")


def _pack(typecode: str, values: Iterable[Any]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _fill(count: int, value: Any) -> NDArray[Any]:
    import numpy as np

    if isinstance(value, (bool, float, int)):
        return np.full(count, value)
    out: NDArray[Any] = np.empty(count, dtype=object)
    out.fill(value)
    return out


_MAX_DECODED_BYTES = 256 * 1024 * 1024
"""No body of ours is longer than this once it is decompressed."""


class _Compressors(threading.local):
    """A compressor for each thread: making one takes longer than a small body does."""

    def __init__(self) -> None:
        self.body = zstd.ZstdCompressor(level=3)


_compressors = _Compressors()


def compress_frame(data: bytes) -> bytes:
    """One whole frame, which says how long the data is."""
    compressed: bytes = _compressors.body.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return compressed


def decompress_frame(
    data: bytes | memoryview, what: str, limit_bytes: int = _MAX_DECODED_BYTES
) -> bytes:
    """Open one whole frame that says how long it is.

    Args:
        data: The frame, and nothing behind it.
        what: What messages call it.
        limit_bytes: More than this is refused, before any of it is decompressed.

    Raises:
        SchemaValidationError: It is damaged, claims more than the limit, or is
            followed by something: a second frame would not be held to the first's claim.
    """
    try:
        size = zstd.get_frame_info(data).decompressed_size
        if size is None or size > limit_bytes:
            raise SchemaValidationError(f"{what} states {size} bytes, more than allowed")
        if zstd.get_frame_size(data) != len(data):
            raise SchemaValidationError(f"{what} has extra bytes after its end")
        decompressed: bytes = zstd.decompress(data)
    except zstd.ZstdError as error:
        raise SchemaValidationError(f"{what} is damaged: {error}") from error
    return decompressed


MALFORMED = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What decoding makes of bodies that somebody has malformed, beside `SchemaValidationError`."""


def mend_body(body: DecodedBody) -> tuple[DecodedBody, NDArray[Any]]:
    """A body without those JSON values that cannot be made, and which records had none of them."""
    import numpy as np

    sound = np.ones(body.count, dtype=np.bool_)
    columns = [body.column(name) for name in column_types(body.kind) if name in body]
    for place, column in enumerate(columns):
        if column.encoding != "j" or len(column.head) != body.count:
            continue
        texts = list(column.head)
        for row, text in enumerate(texts):
            one = DecodedBody(body.version, body.kind, 1, [Column(column.name, "j", [text])])
            try:
                one.to_list(column.name)
            except (SchemaValidationError, *MALFORMED):
                texts[row], sound[row] = None, False
        columns[place] = Column(column.name, "j", texts)
    return DecodedBody(body.version, body.kind, body.count, columns), sound
