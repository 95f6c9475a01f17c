"""How records of each kind stand in the mirror's tables: one row per record.

A cell is empty where the record has None. A text that may be None and is
empty, or made of quotes alone, has two quotes more in its cell. Floats are
spelled so that they come back bit by bit, NaN and the infinities as `nan`,
`inf` and `-inf`; times are ISO 8601 in UTC; truth values `true` and `false`;
everything that is no plain value is JSON.

The writer is the last column of every table: it has no line break, so that a
row that was cut off is never taken for a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from quark_core.api import (
    RECORD_TYPES,
    DecodedBody,
    EventRecord,
    MetricRecord,
    RecordField,
    StreamRecord,
    decode_json,
    describe_fields,
    encode_json,
    format_time,
    parse_time,
    split_name,
)

_WRITER = "writer"
_ORIGIN_COLUMNS = {"writer_id": _WRITER, "attempt": "attempt", "rank": "rank"}
# Tables that are older than the rule for all others.
_SPECIAL_HEADERS = {
    MetricRecord.KIND: (
        *("step", "epoch", "key", "value", "timestamp", "attempt", "rank", "sequence"),
        *("description", "metadata", _WRITER),
    ),
    EventRecord.KIND: (
        *("step", "epoch", "event_type", "severity", "status", "payload"),
        *("timestamp", "attempt", "rank", "sequence", _WRITER),
    ),
}
_RENAMED = {"time_us": "timestamp", "metric_key": "key", **_ORIGIN_COLUMNS}
_FIELDS = {column: field for field, column in _RENAMED.items()}


class RowForm:
    """The columns of one kind's table, and the way there and back.

    Args:
        kind: Kind of the records.

    Attributes:
        header: Names of the columns.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # In the order of the record's fields, after those of its origin.
        own = describe_fields(kind)
        self.header: tuple[str, ...] = _SPECIAL_HEADERS.get(kind) or (
            *(_RENAMED.get(name, name) for name in own if name != "sequence"),
            *("attempt", "rank", "sequence", _WRITER),
        )
        # A record may have a field of a name that a table gives to another one.
        self._fields = [
            column if column in own else _FIELDS.get(column, column) for column in self.header
        ]
        self._type: Any = RECORD_TYPES[kind]
        self._parsers = [
            (_RENAMED.get(name, name), _make_parser(name, field), field.default)
            for name, field in own.items()
        ]
        names = list(own)
        self._key = names.index("metric_key") if kind == MetricRecord.KIND else None

    def encode(
        self, body: DecodedBody, *, writer_id: str, attempt: int, rank: int
    ) -> Iterable[Sequence[str]]:
        """Rows of a batch.

        Raises:
            ValueError: What is in the batch cannot be read.
            OverflowError: A time that no calendar has.
        """
        origin = {"writer_id": writer_id, "attempt": attempt, "rank": rank}
        columns = [
            [str(origin[name])] * body.count if name in origin else _format_column(body, name)
            for name in self._fields
        ]
        return zip(*columns, strict=True)

    def decode(self, run_id: str, row: Mapping[str, str]) -> StreamRecord:
        """The record of a row; a column that an older table lacks is read as its default.

        Raises:
            ValueError: A cell that holds something else.
            KeyError: A column is missing that every table has.
        """
        values = [
            parse(row[column]) if column in row else default
            for column, parse, default in self._parsers
        ]
        if self._key is not None:
            # What follows the key in the record is made of it.
            values[self._key + 1 : self._key + 3] = split_name(values[self._key])
        return self._type(  # type: ignore[no-any-return]
            run_id, row[_WRITER], int(row["attempt"]), int(row["rank"]), *values
        )


@cache
def find_form(kind: str) -> RowForm:
    """The form of a kind's rows."""
    return RowForm(kind)


def _format_column(body: DecodedBody, name: str) -> list[str]:
    """A column's cells."""
    field = describe_fields(body.kind)[name]
    column = body.column(name)
    if field.encoding == "j":
        if column.encoding == "j":
            return ["" if item is None else str(item, "utf-8") for item in column.head]
        spell: Callable[[Any], str] = _spell_json
    elif name == "time_us":
        spell = format_time
    elif field.encoding == "f":
        spell = repr
    elif field.is_boolean:
        spell = _spell_truth
    elif field.encoding == "t" and field.is_optional:
        spell = _spell_optional_text
    else:
        spell = str
    values = column.to_list(body.count) if field.encoding == "j" else body.to_list(name)
    if column.encoding == "c":
        return [spell(value) if value is not None else "" for value in values[:1]] * body.count
    if name == "time_us":
        # What is logged by one call has one time.
        spelled = {time_us: format_time(time_us) for time_us in dict.fromkeys(values)}
        return [spelled[time_us] for time_us in values]
    if spell is str and None not in values:
        return list(map(str, values))
    return ["" if value is None else spell(value) for value in values]


def _spell_json(value: Any) -> str:
    return encode_json(value).decode()


def _spell_truth(value: bool) -> str:
    return str(value).lower()


def _spell_optional_text(value: str) -> str:
    return value if value.strip('"') else f'{value}""'


def _make_parser(name: str, field: RecordField) -> Callable[[str], Any]:
    parse = _choose_parser(name, field)
    if not field.is_optional:
        return parse
    return lambda text: parse(text) if text else None


def _choose_parser(name: str, field: RecordField) -> Callable[[str], Any]:
    if name == "time_us":
        return parse_time
    if field.is_boolean:
        return _parse_truth
    if field.encoding == "i":
        return int
    if field.encoding == "f":
        return float
    if field.encoding == "j":
        restore = field.restore
        if restore is not None:
            return lambda text: restore(decode_json(text.encode()))
        return lambda text: decode_json(text.encode())
    return _parse_optional_text if field.is_optional else str


def _parse_optional_text(text: str) -> str:
    return text if text.strip('"') else text[:-2]


def _parse_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"
