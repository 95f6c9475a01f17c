"""The frames of TFRecord files, as event files are made of them.

A frame is the length of its data in 8 bytes, a checksum of these, the data and a checksum of
it (CRC-32C, masked). Checksums of many frames of one length are computed at once, one byte
of each after the other: one by one in Python, they would take longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK_BYTES = 4 * 2**20
_HEADER = Struct("<QI")
_FOOTER_BYTES = 4
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
# Of a frame of its own length only, each byte costs a call of numpy.
_MAX_CHECKED_BYTES = 16 * 1024
_MAX_FRAME_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames that follow each other.

    Attributes:
        data: What is in each.
        end: Offset behind each.
    """

    data: list[bytes]
    end: list[int]


class FrameReader:
    """Reads a file that may still be written.

    Args:
        path: The file.
        offset: Where to begin; a frame begins there.

    Attributes:
        offset: Behind the last frame that was given.
        damage: Why nothing behind the offset can be read, or None.
        rest: Bytes behind the offset that are no whole frame yet.
    """

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self.offset = offset
        self.damage: str | None = None
        self.rest = 0

    def read(self) -> Iterator[Frames]:
        """What there is now, a few megabytes at a time.

        Raises:
            OSError: The file cannot be read.
        """
        wanted = _CHUNK_BYTES
        with self._path.open("rb") as file:
            file.seek(self.offset)
            held = b""
            while True:
                piece = file.read(wanted)
                held += piece
                frames, used = self._cut(held)
                if frames.data:
                    yield frames
                held = held[used:]
                if self.damage is not None:
                    return
                if len(piece) < wanted:
                    self.rest = len(held)
                    return
                # A frame that is larger than a piece is read as a whole, not again and again.
                wanted = max(_CHUNK_BYTES, self._measure(held) - len(held))

    def _measure(self, held: bytes) -> int:
        if len(held) < _HEADER.size:
            return 0
        return int(_HEADER.unpack_from(held)[0]) + _HEADER.size + _FOOTER_BYTES

    def _cut(self, held: bytes) -> tuple[Frames, int]:
        """The whole frames at the beginning of bytes, and how many bytes they take."""
        data: list[bytes] = []
        begins: list[int] = []
        at, end, header_bytes = 0, len(held), _HEADER.size
        unpack = _HEADER.unpack_from
        while at + header_bytes <= end:
            (length, _) = unpack(held, at)
            behind = at + header_bytes + length + _FOOTER_BYTES
            if behind > end:
                # A length that is damaged must not be waited for.
                if length > _MAX_FRAME_BYTES or not _is_header_right(held[at : at + header_bytes]):
                    self.damage = "a frame's length is damaged"
                break
            data.append(held[at + header_bytes : behind - _FOOTER_BYTES])
            begins.append(at)
            at = behind
        right = _count_right(held, begins, data)
        if right < len(data):
            self.damage = "a frame's checksum is wrong"
            at = begins[right]
            del data[right:], begins[right:]
        ends = [*begins[1:], at] if data else []
        frames = Frames(data, [self.offset + one for one in ends])
        self.offset += at
        return frames, at


def _is_header_right(header: bytes) -> bool:
    import numpy as np

    rows = np.frombuffer(header[:8], np.uint8).reshape(1, 8)
    return bool(_checksum(rows)[0] == _HEADER.unpack(header)[1])


def _count_right(held: bytes, begins: list[int], data: list[bytes]) -> int:
    """How many frames, from the first on, have the checksums that they say."""
    import numpy as np

    if not data:
        return 0
    whole = np.frombuffer(held, np.uint8)
    starts = np.array(begins, np.int64)
    lengths = np.array([len(one) for one in data], np.int64)
    wrong = _find_wrong(whole, starts, 8)
    for length in np.unique(lengths).tolist():
        if length <= _MAX_CHECKED_BYTES:
            rows = np.flatnonzero(lengths == length)
            wrong[rows] |= _find_wrong(whole, starts[rows] + _HEADER.size, length)
    return int(np.argmax(wrong)) if wrong.any() else len(data)


def _find_wrong(
    whole: NDArray[np.uint8], starts: NDArray[np.int64], length: int
) -> NDArray[np.bool_]:
    """Which of the stretches of one length differ from the checksums behind them."""
    import numpy as np

    rows = whole[starts[:, None] + np.arange(length + 4)]
    said: Any = np.ascontiguousarray(rows[:, length:]).view("<u4")[:, 0]
    return np.asarray(_checksum(rows[:, :length]) != said)


def _checksum(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The masked CRC-32C of each row."""
    import numpy as np

    table = _make_table()
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        crc = table[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc ^= np.uint32(0xFFFFFFFF)
    return np.asarray(((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK))


@cache
def _make_table() -> NDArray[np.uint32]:
    import numpy as np

    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)
