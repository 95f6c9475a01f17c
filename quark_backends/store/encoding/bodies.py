"""Opens the bodies of stored batches: what the checksum does not vouch for is not believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from quark_core.errors import SchemaValidationError
from quark_core.records.codec import DecodedBody, decode_body

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DamagedError", "digest_body", "number_texts", "open_body"]


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
