"""Which records were in each batch that compaction took apart: a mirror may want it again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from quark_core.compression import decompress_frame
from quark_core.errors import SchemaValidationError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["Frame", "decode_frames", "encode_frames"]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The sequences of one batch.

    Attributes:
        number: The batch's number.
        runs: First sequence, how many follow each other, first of the next run …
    """

    number: int
    runs: list[int]

    @classmethod
    def of(cls, number: int, sequences: Any) -> Frame:
        """The frame of a batch with these sequences, an array in the order of the batch."""
        runs: list[int] = []
        for sequence in sequences.tolist():
            if runs and sequence == runs[-2] + runs[-1]:
                runs[-1] += 1
            else:
                runs += [sequence, 1]
        return cls(number, runs)

    @property
    def sequences(self) -> list[int]:
        """The batch's sequences, in its order."""
        pairs = zip(self.runs[::2], self.runs[1::2], strict=True)
        return [first + index for first, count in pairs for index in range(count)]


def encode_frames(kind: str, frames: Sequence[Frame]) -> bytes:
    """Encode the frames of batches of one kind, in the order of their numbers."""
    return zstd.compress(msgspec.msgpack.encode((kind, list(frames))), 5)


def decode_frames(body: bytes) -> tuple[str, list[Frame]]:
    """The kind and the frames.

    Raises:
        SchemaValidationError: Damaged bytes.
    """
    try:
        return msgspec.msgpack.decode(
            decompress_frame(body, "frames"), type=tuple[str, list[Frame]]
        )
    except msgspec.DecodeError as error:
        raise SchemaValidationError(f"frames are damaged: {error}") from error
