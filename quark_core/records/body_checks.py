"""Holds the bodies of batches from outside to what they promise, before anything believes them.

A body says how many records it holds, and a column of one value is as long as the body says,
whatever it weighs. So nothing here is made larger than the bytes that came, a column of one value
is looked at once, and each text and each JSON value once, however many records share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from itertools import accumulate, compress
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES
from quark_core.records.base import StreamRecord
from quark_core.records.codec import BODY_VERSION, Column, DecodedBody, unpack_body
from quark_core.records.json_object import JsonObject, check_plain, count_values
from quark_core.records.kinds.basic import EventRecord, MetricRecord
from quark_core.records.names import split_name
from quark_core.records.schema import boolean_fields, column_types, default_value, optional_fields

_MOST_COLUMNS = 256
_MOST_UNKNOWN_BYTES = 64 * 1024
# Values within the JSON of one batch: each may take 72 bytes of memory, and 2 bytes of a body.
_MOST_JSON_VALUES = 1_000_000
_WIDTHS = (1, 2, 4, 8)
_INT64 = 2**63
_FEW_ROWS = 64
_NOT_NULL = bytes((1, 0)) + bytes(254)
# The years 1 to 9999, which is what a time can be written as.
_FIRST_US = -62_135_596_800_000_000
_LAST_US = 253_402_300_799_999_999


class _RawColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column that is bytes still: nobody knows yet how much it would become."""

    name: str
    encoding: str
    head: msgspec.Raw = msgspec.Raw(b"\xc0")
    nulls: memoryview = memoryview(b"")
    data: memoryview = memoryview(b"")


class _RawBody(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: str
    count: int
    columns: list[_RawColumn]


_decode_raw = msgspec.msgpack.Decoder(_RawBody).decode
_decode_anything = msgspec.msgpack.Decoder().decode
_decode_json = msgspec.json.Decoder().decode
_HEADS: dict[str, Callable[[msgspec.Raw], Any]] = {
    "c": msgspec.msgpack.Decoder(None | bool | int | float | str).decode,
    "i": msgspec.msgpack.Decoder(tuple[int, int]).decode,
    "f": msgspec.msgpack.Decoder(None).decode,
    "t": msgspec.msgpack.Decoder(tuple[list[str | None], int]).decode,
    "j": msgspec.msgpack.Decoder(list[bytes | None]).decode,
}


def open_body_of(body: bytes, kind: str, count: int) -> DecodedBody:
    """Open a body that must hold so many records of a known kind.

    Raises:
        SchemaValidationError: It holds something else, or more than it says.
    """
    try:
        raw = _decode_raw(unpack_body(body))
        if raw.version > BODY_VERSION:
            raise SchemaValidationError(
                f"it has format version {raw.version}, but this Quark reads up to {BODY_VERSION}"
            )
        if (raw.kind, raw.count) != (kind, count):
            raise SchemaValidationError(
                f"it contains {raw.count} {raw.kind:.60} records, not {count} {kind} ones"
            )
        if len(raw.columns) > _MOST_COLUMNS:
            raise SchemaValidationError(f"it has {len(raw.columns)} columns")
        if len({column.name for column in raw.columns}) < len(raw.columns):
            raise SchemaValidationError("two of its columns have one name")
        columns = [_open_column(column, kind, count) for column in raw.columns]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SchemaValidationError(f"it is damaged: {error}") from None
    except RecursionError:
        raise SchemaValidationError("it is nested too deeply") from None
    return DecodedBody(raw.version, kind, count, columns)


def _open_column(column: _RawColumn, kind: str, count: int) -> Column:
    encoding, head = column.encoding, memoryview(column.head)
    if encoding in "tj" and _count_items(head, 1 if encoding == "t" else 0) > count:
        raise _bad(column.name, "contains more values than there are records")
    if len(column.data) > count * _WIDTHS[-1] or len(column.nulls) > count:
        raise _bad(column.name, f"has {len(column.data)} bytes for {count} records")
    decode = _HEADS.get(encoding)
    if decode is None:
        if column.name in column_types(kind):
            raise _bad(column.name, f"is encoded as {encoding!r:.40}")
        # What only a newer Quark knows is kept as it is.
        if len(head) > _MOST_UNKNOWN_BYTES:
            raise _bad(column.name, f"has a head of {len(head)} bytes")
        decode = _decode_anything
    try:
        found = decode(column.head)
    except msgspec.ValidationError as error:
        raise _bad(column.name, f"has a head of a wrong form: {error}") from None
    return Column(column.name, encoding, found, bytes(column.nulls), bytes(column.data))


def _count_items(packed: memoryview, place: int) -> int:
    """How many items the msgpack array has that begins there; 0 for what is none."""
    mark = packed[place] if place < len(packed) else 0
    if mark & 0xF0 == 0x90:
        return mark & 0x0F
    size = {0xDC: 2, 0xDD: 4}.get(mark, 0)
    return int.from_bytes(packed[place + 1 : place + 1 + size])


def check_body(body: DecodedBody) -> None:
    """Refuse a body that a reader could fail on.

    Raises:
        SchemaValidationError: A column has not the length or the values that its encoding and
            its field promise, or a record is none of its kind.
    """
    kind, count = body.kind, body.count
    optional, words = optional_fields(kind), RECORD_TYPES[kind].RULES.words
    values = 0
    for name, encoding in column_types(kind).items():
        if name not in body:
            # Records of an older Quark lack fields that are asked for today.
            if name not in optional and default_value(kind, name) is None:
                raise _bad(name, "is missing")
            continue
        column = body.column(name)
        _check_column(column, encoding, count, is_optional=name in optional)
        if column.encoding == "j":
            texts = [item for item in column.head if item is not None]
            values += count_values(b"".join(texts)) + len(texts)
            if values > _MOST_JSON_VALUES:
                raise _bad(name, f"contains more than {_MOST_JSON_VALUES} values in its JSON")
            _check_json(column, kind)
        elif column.encoding == "i" or (encoding == "i" and column.head is not None):
            _check_integers(column, count, is_boolean=name in boolean_fields(kind))
        if name in words:
            _check_words(column, words[name])
    _check_sequence(body)
    _check_records(body)


def _check_column(column: Column, encoding: str, count: int, *, is_optional: bool) -> None:
    """Hold a column to its encoding and to the field that it is of."""
    found, head = column.encoding, column.head
    if found == "c":
        if not _fits(head, encoding, is_optional=is_optional):
            raise _bad(column.name, f"cannot be {head!r:.60}")
        return
    if found != encoding:
        raise _bad(column.name, f"is encoded as {found!r:.40}, its field as {encoding!r}")
    if found == "j":
        if len(head) != count or (None in head and not is_optional):
            raise _bad(column.name, "does not have a JSON text for each record")
        return
    width = 8 if found == "f" else head[1]
    if width not in _WIDTHS or (found == "i" and not -_INT64 <= head[0] < _INT64):
        raise _bad(column.name, "has a head of a wrong form")
    if len(column.data) != count * width:
        raise _bad(column.name, f"has {len(column.data)} bytes for {count} records of {width}")
    if found == "t":
        if None in head[0] and not is_optional:
            raise _bad(column.name, "lacks a text")
        indexes = np.frombuffer(column.data, dtype=f"<i{width}")
        if count and not 0 <= int(indexes.min()) <= int(indexes.max()) < len(head[0]):
            raise _bad(column.name, "refers to a text that it does not contain")
    if column.nulls:
        if len(column.nulls) != count or not is_optional or found == "t":
            raise _bad(column.name, "has nulls of a wrong form")
        if column.nulls.translate(None, b"\x00\x01"):
            raise _bad(column.name, "has nulls that are neither 0 nor 1")


def _fits(value: Any, encoding: str, *, is_optional: bool) -> bool:
    """Whether a value may stand in all rows of a column."""
    if value is None:
        return is_optional
    if encoding == "i":
        return type(value) is int and -_INT64 <= value < _INT64
    return type(value) in ((int, float) if encoding == "f" else (str,)) and encoding != "j"


def _check_integers(column: Column, count: int, *, is_boolean: bool) -> None:
    """Refuse integers that leave 64 bits, and such as no field of their name holds."""
    if column.encoding == "c":
        low = high = int(column.head)
    else:
        first, width = column.head
        values: Any
        if count <= _FEW_ROWS or abs(first) + (count << (8 * width - 1)) >= _INT64:
            # Numpy would not tell that a sum leaves 64 bits, and takes longer for a few.
            deltas = np.frombuffer(column.data, dtype=f"<i{width}").tolist()
            values = list(accumulate(deltas, initial=first))[1:]
            if values and not -_INT64 <= min(values) <= max(values) < _INT64:
                raise _bad(column.name, "leaves 64 bits")
            if column.nulls:
                values = list(compress(values, column.nulls.translate(_NOT_NULL)))
        else:
            values = column.to_array(count)
            if column.nulls:
                values = values[np.frombuffer(column.nulls, dtype=np.uint8) == 0]
        if not len(values):
            return
        low, high = (
            (min(values), max(values))
            if isinstance(values, list)
            else (int(values.min()), int(values.max()))
        )
    if column.name == "time_us":
        if not _FIRST_US <= low <= high <= _LAST_US:
            raise _bad(column.name, "contains a time outside the years 1 to 9999")
    elif low < 0:
        raise _bad(column.name, f"contains {low}, but must not be negative")
    elif is_boolean and high > 1:
        raise _bad(column.name, "contains a value that is neither true nor false")


def _check_words(column: Column, allowed: tuple[str, ...]) -> None:
    """Refuse a text that is none of the few that a field may hold."""
    texts: Iterable[Any] = column.head[0] if column.encoding == "t" else [column.head]
    for text in texts:
        if text is not None and text not in allowed:
            raise _bad(
                column.name, f"must be one of {', '.join(map(repr, allowed))}, not {text!r:.60}"
            )


def _check_json(column: Column, kind: str) -> None:
    hint = _json_types(kind)[column.name]
    try:
        for item in set(column.head):
            if item is not None:
                value = _decode_json(item)
                check_plain(value, item)
                if hint is None and type(value) is not dict:
                    raise _bad(column.name, f"contains {value!r:.40}, which is not a JSON object")
                if hint is not None:
                    msgspec.convert(value, hint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(column.name, f"contains a JSON text that cannot be read: {error}") from None


@cache
def _json_types(kind: str) -> Mapping[str, Any]:
    """Field -> the type that its JSON values have; None for any object."""
    hints = get_type_hints(RECORD_TYPES[kind])
    relaxed = {name: _relax(hints[name]) for name, e in column_types(kind).items() if e == "j"}
    return {name: None if hint == dict[str, Any] else hint for name, hint in relaxed.items()}


def _relax(hint: Any) -> Any:
    """A field's type as its JSON has it: an object is a dict, and NaN among numbers is null."""
    if get_origin(hint) in (Union, UnionType):
        relaxed = {_relax(option) for option in get_args(hint)} - {type(None)}
        return reduce(or_, relaxed)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple[item | None if item is float else item, ...]  # type: ignore[misc]
    return dict[str, Any] if hint is JsonObject else hint


def _check_sequence(body: DecodedBody) -> None:
    """Refuse records that have one id: it is made of their writer, kind and sequence."""
    column = body.column("sequence")
    if body.count < 2:
        return
    if column.encoding == "c":
        raise _bad("sequence", f"is {column.head} of all {body.count} records")
    _, width = column.head
    # As a writer numbers them each is larger than the one before.
    if int(np.frombuffer(column.data, dtype=f"<i{width}")[1:].min()) > 0:
        return
    if len(np.unique(column.to_array(body.count))) < body.count:
        raise _bad("sequence", "has the same value in two records")


def _check_records(body: DecodedBody) -> None:
    """Refuse records whose fields do not fit together."""
    record_type = RECORD_TYPES[body.kind]
    if record_type is MetricRecord:
        _check_names(body)
    elif record_type is not EventRecord and record_type.check is not StreamRecord.check:
        for record in body.to_records(run_id=None, writer_id="", attempt=0, rank=0):
            record.check()


def _check_names(body: DecodedBody) -> None:
    """Refuse metrics whose key is not their namespace and name joined."""
    keys, codes = _number_texts(body, "metric_key")
    split = [split_name(key) for key in keys]
    known = body.column("metric_key")
    for place, field in enumerate(("namespace", "metric_name")):
        column, parts_of_all = body.column(field), [parts[place] for parts in split]
        if column.encoding == "c" and parts_of_all.count(column.head) == len(parts_of_all):
            continue
        texts, found = _number_texts(body, field)
        if texts == parts_of_all and (column.encoding, column.data) == (known.encoding, known.data):
            continue
        places = {text: number for number, text in enumerate(texts)}
        wanted = np.array([places.get(part, -1) for part in parts_of_all])
        if not np.array_equal(wanted[codes], found):
            raise _bad("metric_key", f"is not {field} joined with the rest, as in {keys[0]!r:.60}")


def _number_texts(body: DecodedBody, name: str) -> tuple[list[Any], Any]:
    """The different texts of a column, and which of them each record has."""
    column = body.column(name)
    if column.encoding == "c":
        return [column.head], np.zeros(body.count, dtype=np.int8)
    texts, width = column.head
    if len(set(texts)) < len(texts):
        raise _bad(name, "contains a text twice")
    return texts, np.frombuffer(column.data, dtype=f"<i{width}")


def _bad(name: str, reason: str) -> SchemaValidationError:
    return SchemaValidationError(f"column {name!r:.60} {reason}")
