"""Opens the bodies of stored batches: what the checksum does not vouch for is not believed."""

from __future__ import annotations

import xxhash

from quark_core.codec import DecodedBody, decode_body
from quark_core.errors import SchemaValidationError

__all__ = ["DamagedError", "digest_body", "open_body"]


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
