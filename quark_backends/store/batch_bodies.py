"""Opens the bodies of stored batches: what the checksum does not vouch for is not believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from quark_core.errors import SchemaValidationError
from quark_core.records.codec import MALFORMED, DecodedBody, decode_body, mend_body
from quark_core.records.json_object import count_values, encode_json
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from quark_core.records.columns import Columns

# Of an empty list or of a number of its own, with the place that it has in a list.
_VALUE_BYTES = 72


class DamagedError(SchemaValidationError):
    """Stored bytes are not those that were written."""


def digest_body(body: bytes) -> bytes:
    """The checksum that is stored beside a body."""
    return xxhash.xxh3_128_digest(body)


def open_body(body: bytes, digest: bytes) -> DecodedBody:
    """Open a stored body.

    Raises:
        DamagedError: It is not what was written.
        SchemaValidationError: It is sound, and of a version or kind that this
            Quark does not know.
    """
    if digest_body(body) != digest:
        raise DamagedError("its checksum is wrong")
    return decode_body(body)


def make_rows(
    body: DecodedBody, origin: Mapping[str, Any], equals: Mapping[str, str]
) -> tuple[Columns, int, Exception | None]:
    """The rows of a body whose texts are these, all of their columns made.

    A record whose JSON values are not what its fields hold is set aside alone.

    Args:
        body: The body.
        origin: Values of the fields that all its rows have in common.
        equals: Texts that the rows must have.

    Returns:
        The rows, how many records were set aside, and why.

    Raises:
        SchemaValidationError: More than single records is malformed, as for what of `MALFORMED`
            is raised.
    """
    from quark_core.records.columns import Columns

    try:
        # Made now: what is malformed must not come out of a column that somebody asks for.
        return Columns.from_body_where(body, origin, equals).make_all(), 0, None
    except (SchemaValidationError, *MALFORMED) as error:
        mended, sound = mend_body(body)
        count = body.count - int(sound.sum())
        if not count:
            raise
        rows = Columns.from_body(mended, origin)
        for name, value in equals.items():
            sound = sound & (rows[name] == value)
        return rows.take(sound).make_all(), count, error


def weigh_body(body: DecodedBody) -> int:
    """About how many bytes of memory the JSON values of a body take once they are made."""
    columns = (body.column(name) for name in _json_fields(body.kind) if name in body)
    return sum(_weigh(column.head) for column in columns if column.encoding == "j")


def weigh_rows(rows: Columns) -> int:
    """About how many bytes of memory the JSON values of rows take."""
    fields = (name for name in _json_fields(rows.kind) if rows.find_constant(name) is None)
    return sum(
        _weigh(None if value is None else encode_json(value) for value in rows[name].tolist())
        for name in fields
    )


def has_json(kind: str) -> bool:
    """Whether records of a kind have JSON values, which may be of any size."""
    return "j" in column_types(kind).values()


def _json_fields(kind: str) -> list[str]:
    return [name for name, encoding in column_types(kind).items() if encoding == "j"]


def _weigh(texts: Iterable[bytes | None]) -> int:
    return sum(len(t) + _VALUE_BYTES * count_values(t) for t in texts if t is not None)


def number_texts(body: DecodedBody, name: str, known: dict[str, int]) -> NDArray[Any]:
    """The place of each row's text among those that are known, which grow."""
    import numpy as np

    column = body.column(name)
    if column.encoding == "t":
        texts, width = column.head
        places = np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int64)
        return np.asarray(places[np.frombuffer(column.data, dtype=f"<i{width}")])
    if column.encoding == "c":
        return np.full(body.count, known.setdefault(column.head, len(known)))
    return np.array(
        [known.setdefault(text, len(known)) for text in body.to_list(name)], dtype=np.int64
    )
