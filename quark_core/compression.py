"""Compresses what is stored and sent, and opens it within bounds: zstd, one whole frame each."""

from __future__ import annotations

import sys
import threading

from quark_core.errors import SchemaValidationError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["MAX_DECODED_BYTES", "compress_frame", "decompress_frame"]

MAX_DECODED_BYTES = 256 * 1024 * 1024
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
    data: bytes | memoryview, what: str, limit_bytes: int = MAX_DECODED_BYTES
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
            raise SchemaValidationError(f"{what} claims {size} bytes; refused")
        if zstd.get_frame_size(data) != len(data):
            raise SchemaValidationError(f"{what} has more behind its end; refused")
        decompressed: bytes = zstd.decompress(data)
    except zstd.ZstdError as error:
        raise SchemaValidationError(f"{what} is damaged: {error}") from error
    return decompressed
