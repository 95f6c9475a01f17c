"""Where the rows of a text table lie in its file: found in pieces, never all of it in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PART_BYTES = 1024 * 1024
_NEWLINE, _QUOTE = 10, 34
_OPENING, _CLOSING = b"[{", b"]}"
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
# A quotation mark that nobody closes would make one row of all that follows.
_LONGEST_ROW_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rows by their bytes.

    Attributes:
        starts, ends: int64 offsets in the file, in the order of the rows.
        is_whole: Whether these are all rows; else a bound was reached.
    """

    starts: NDArray[Any]
    ends: NDArray[Any]
    is_whole: bool

    def __len__(self) -> int:
        return len(self.starts)


def find_lines(file: BinaryIO, *, quoted: bool, most_rows: int, most_bytes: int) -> RowPlaces:
    """The lines of a file, each with its end of line.

    Args:
        file: Read from its beginning.
        quoted: Whether a line break between quotation marks is part of a row, as in CSV.
        most_rows, most_bytes: Where looking ends.
    """
    import numpy as np

    found = _find_lines(file, quoted=quoted, most_rows=most_rows, most_bytes=most_bytes)
    if quoted and len(found) and int(np.max(found.ends - found.starts)) > _LONGEST_ROW_BYTES:
        return _find_lines(file, quoted=False, most_rows=most_rows, most_bytes=most_bytes)
    return found


def _find_lines(file: BinaryIO, *, quoted: bool, most_rows: int, most_bytes: int) -> RowPlaces:
    import numpy as np

    found: list[NDArray[Any]] = []
    rows, place, inside = 0, 0, 0
    file.seek(0)
    while rows < most_rows and place < most_bytes and (part := file.read(_PART_BYTES)):
        data = np.frombuffer(part, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        if quoted and (inside or b'"' in part):
            quotes = np.flatnonzero(data == _QUOTE)
            ends = ends[(np.searchsorted(quotes, ends) + inside) % 2 == 0]
            inside = (inside + len(quotes)) % 2
        found.append(ends.astype(np.int64) + place + 1)
        rows += len(ends)
        place += len(part)
    is_whole = rows <= most_rows and not file.read(1)
    ends = np.concatenate(found) if found else np.zeros(0, np.int64)
    if is_whole and place and (not len(ends) or ends[-1] < place):
        # The last line needs no end.
        ends = np.append(ends, place)
    ends = ends[:most_rows]
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    return RowPlaces(starts, ends, is_whole)


def find_elements(file: BinaryIO, start: int, *, most_rows: int, most_bytes: int) -> RowPlaces:
    """The arrays and objects that are elements of an array of JSON; what else is in it is left out.

    Args:
        file: The document.
        start: Just behind the bracket that opens the array.
        most_rows, most_bytes: Where looking ends.
    """
    import numpy as np

    starts: list[NDArray[Any]] = []
    ends: list[NDArray[Any]] = []
    depth, rows, is_over = 0, 0, False
    for place, data, marks in _read_marks(file, start, most_bytes):
        steps = np.where(np.isin(data[marks], np.frombuffer(_OPENING, np.uint8)), 1, -1)
        after = depth + np.cumsum(steps)
        over = np.flatnonzero(after < 0)
        if is_over := len(over) > 0:
            marks, steps, after = (each[: over[0]] for each in (marks, steps, after))
        starts.append(marks[(steps == 1) & (after == 1)].astype(np.int64) + place)
        ends.append(marks[(steps == -1) & (after == 0)].astype(np.int64) + place + 1)
        rows += len(ends[-1])
        depth = int(after[-1]) if len(after) else depth
        if is_over or rows > most_rows:
            break
    last = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    # Of an element that is not closed within the bounds nothing is known.
    first = (np.concatenate(starts) if starts else last)[: len(last)]
    is_whole = is_over and len(last) <= most_rows
    return RowPlaces(first[:most_rows], last[:most_rows], is_whole)


def _read_marks(
    file: BinaryIO, start: int, most_bytes: int
) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Of each part of a file its place, its bytes, and where brackets outside of texts stand."""
    import numpy as np

    brackets = np.zeros(256, bool)
    brackets[list(_OPENING + _CLOSING)] = True
    place, inside = start, 0
    file.seek(start)
    while place - start < most_bytes and (part := file.read(_PART_BYTES)):
        plain = part
        if b"\\" in part:
            plain = _ESCAPED.sub(b"__", part)
            if plain.endswith(b"\\"):
                part += file.read(1)
                plain = _ESCAPED.sub(b"__", part)
        data = np.frombuffer(plain, np.uint8)
        quotes = np.flatnonzero(data == _QUOTE)
        marks = np.flatnonzero(brackets[data])
        yield place, data, marks[(np.searchsorted(quotes, marks) + inside) % 2 == 0]
        inside = (inside + len(quotes)) % 2
        place += len(part)
