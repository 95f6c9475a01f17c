"""The positions of rows in the file of a text table, found without loading the file."""

from __future__ import annotations

import csv
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from quark_core.errors import SchemaValidationError

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


KINDS = ("csv", "lines", "json", "parquet")
"""How a table may be laid down."""

MOST_ROWS = 500_000
"""So many rows of a table are looked at."""

_MOST_BYTES = 256 * 1024 * 1024
_MOST_COLUMNS = 200
_MOST_ROW_BYTES = 64 * 1024
_MOST_GROUP_BYTES = 512 * 1024 * 1024
_HEAD_BYTES = 1024 * 1024
_SEEN_ROWS = 200
_BATCH_ROWS = 4_096
_PARQUET = "application/vnd.apache.parquet"
_BY_NAME = {".csv": "csv", ".tsv": "csv", ".jsonl": "lines", ".ndjson": "lines"}
_TEXTS = ("text/", "application/json", "application/octet-stream")
_DELIMITERS = ",;\t"
_COLUMNS_HEAD = re.compile(r'\s*\{\s*"columns"\s*:\s*(?=\[)')
_ROWS_HEAD = re.compile(r'\s*,\s*"rows"\s*:\s*\[')
_OBJECTS_HEAD = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?=\{)")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class TableFile(Protocol):
    """A table that is open; one thread at a time.

    Attributes:
        columns: Their names, at most 200.
        column_count: How many there are.
        count: How many rows can be read.
        is_whole: Whether these are all.
    """

    columns: Sequence[str]
    column_count: int
    count: int
    is_whole: bool

    def read(self, rows: Sequence[int]) -> list[list[Any]]:
        """The values of some rows, in the order in which they are asked for."""

    def iterate(self, most_rows: int, most_bytes: int) -> Iterator[list[Any]]:
        """The rows from the first on, until there are so many, or they were so long together."""


def identify_table(name: str, artifact_type: str, media_type: str | None) -> str | None:
    """Which kind of table a payload is shown as, or None.

    Args:
        name: Its name, whose end tells what no byte does.
        artifact_type: As it was logged.
        media_type: By its bytes.
    """
    if media_type is None:
        return None
    if media_type == _PARQUET:
        return "parquet"
    if not is_text(media_type):
        return None
    kind = _BY_NAME.get(posixpath.splitext(name.lower())[1])
    if kind is None and artifact_type == "table" and media_type == "application/json":
        return "json"
    return kind


def is_text(media_type: str) -> bool:
    """Whether a payload of this media type may be a table of text, control characters or not."""
    return media_type.startswith(_TEXTS)


def open_table(file: BinaryIO, kind: str) -> TableFile:
    """Look through a table; it keeps where its rows lie, not what they hold.

    Args:
        file: The payload; it must be one that can be read from any place.
        kind: As `identify_table` names it.

    Raises:
        SchemaValidationError: It is no such table.
    """
    if kind == "parquet":
        return _ParquetTable(file)
    if file.read(2).startswith(_UTF16):
        raise SchemaValidationError("this table is in UTF-16, which cannot be shown. Download it")
    if kind == "csv":
        return _CsvTable(file)
    return _JsonTable(file, kind)


class _TextTable:
    """Rows that are parts of a text."""

    columns: Sequence[str] = ()
    column_count = 0

    def __init__(self, file: BinaryIO, places: RowPlaces, skipped: int) -> None:
        self._file = file
        self._places = places
        self._skipped = skipped
        self.count = max(0, len(places) - skipped)
        self.is_whole = places.is_whole

    def parse(self, text: bytes) -> list[Any]:
        """The values of one row."""
        raise NotImplementedError

    def read(self, rows: Sequence[int]) -> list[list[Any]]:
        return [self.parse(self._read_row(row + self._skipped)) for row in rows]

    def iterate(self, most_rows: int, most_bytes: int) -> Iterator[list[Any]]:
        left = most_bytes
        for row in range(min(self.count, most_rows)):
            text = self._read_row(row + self._skipped)
            left -= len(text)
            if left < 0:
                return
            yield self.parse(text)

    def _read_row(self, place: int) -> bytes:
        start, end = int(self._places.starts[place]), int(self._places.ends[place])
        if self._file.tell() != start:
            self._file.seek(start)
        text = self._file.read(min(end - start, _MOST_ROW_BYTES))
        if len(text) < end - start:
            self._file.seek(end)
        return text


class _CsvTable(_TextTable):
    def __init__(self, file: BinaryIO) -> None:
        # One row is the header.
        places = find_lines(file, quoted=True, most_rows=MOST_ROWS + 1, most_bytes=_MOST_BYTES)
        super().__init__(file, places, 1)
        self._delimiter = ","
        head = self._read_row(0).removeprefix(b"\xef\xbb\xbf") if len(places) else b""
        counts = {each: head.count(each.encode()) for each in _DELIMITERS}
        self._delimiter = max(_DELIMITERS, key=lambda each: counts[each])
        names = self.parse(head)
        self.columns, self.column_count = names[:_MOST_COLUMNS], len(names)

    def parse(self, text: bytes) -> list[Any]:
        row = text.decode("utf-8", "replace").rstrip("\r\n")
        try:
            return next(csv.reader([row], delimiter=self._delimiter), [])
        except csv.Error:
            return [row]


class _JsonTable(_TextTable):
    """Objects, a line each or in an array, or arrays below their columns."""

    def __init__(self, file: BinaryIO, kind: str) -> None:
        names, start = (None, None) if kind == "lines" else _read_head(file)
        if start is None:
            places = find_lines(file, quoted=False, most_rows=MOST_ROWS, most_bytes=_MOST_BYTES)
        else:
            places = find_elements(file, start, most_rows=MOST_ROWS, most_bytes=_MOST_BYTES)
        super().__init__(file, places, 0)
        self._has_arrays = names is not None
        if names is None:
            rows = (self._decode(self._read_row(row)) for row in range(min(self.count, _SEEN_ROWS)))
            found = (_name_values(row) for row in rows)
            names = list(dict.fromkeys(name for row in found for name in row))
        self.columns, self.column_count = names[:_MOST_COLUMNS], len(names)

    def parse(self, text: bytes) -> list[Any]:
        row = self._decode(text)
        if self._has_arrays:
            return row if isinstance(row, list) else [row]
        values = _name_values(row)
        if not isinstance(row, dict) and values.keys() - set(self.columns):
            return [row]
        return [values.get(name) for name in self.columns]

    @staticmethod
    def _decode(text: bytes) -> Any:
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, ValueError):
            # Damaged, cut for its length, or too deep: as it stands.
            return text.decode("utf-8", "replace").strip()


def _name_values(row: Any) -> dict[str, Any]:
    """A row that is no object as one; of an empty line nothing."""
    if isinstance(row, dict):
        return row
    return {} if row == "" else {"value": row}


def _read_head(file: BinaryIO) -> tuple[list[str] | None, int]:
    """The columns before the rows, if there are any, and where the rows begin."""
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    objects = _OBJECTS_HEAD.match(head)
    if objects is not None:
        return None, objects.end()
    text = head.decode("utf-8", "ignore")
    begin = _COLUMNS_HEAD.match(text)
    names: Any = None
    if begin is not None:
        try:
            names, end = json.JSONDecoder().raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            names = None
        else:
            begin = _ROWS_HEAD.match(text, end)
    if begin is None or not isinstance(names, list):
        raise SchemaValidationError(
            'this is not a table: it must start with {"columns": [names], "rows": [ or be a '
            "list of objects. You can view it as text"
        )
    return [str(name) for name in names], len(text[: begin.end()].encode())


class _ParquetTable:
    columns: Sequence[str]

    def __init__(self, file: BinaryIO) -> None:
        try:
            parquet = import_module("pyarrow.parquet")
        except ImportError:
            raise SchemaValidationError(
                "this Parquet file requires pyarrow: install quark-tracker[arrow] on the "
                "machine that runs `quark ui`, or download the file"
            ) from None
        self._errors = (import_module("pyarrow").ArrowException, OSError, ValueError)
        try:
            self._file = parquet.ParquetFile(file)
            names = list(self._file.schema_arrow.names)
        except self._errors as error:
            raise SchemaValidationError(f"this Parquet file cannot be read: {error}") from None
        self.columns, self.column_count = names[:_MOST_COLUMNS], len(names)
        metadata = self._file.metadata
        groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
        self._ends: list[int] = []
        self.is_whole = True
        for group in groups:
            before = self._ends[-1] if self._ends else 0
            if before >= MOST_ROWS or group.total_byte_size > _MOST_GROUP_BYTES:
                self.is_whole = False
                break
            self._ends.append(before + group.num_rows)
        there = self._ends[-1] if self._ends else 0
        self.count = min(there, MOST_ROWS)
        self.is_whole = self.is_whole and there <= MOST_ROWS

    def read(self, rows: Sequence[int]) -> list[list[Any]]:
        wanted = set(rows)
        found: dict[int, list[Any]] = {}
        before = 0
        for group, end in enumerate(self._ends):
            inside = {row for row in wanted if before <= row < end}
            if inside:
                found.update(self._read_group(group, before, inside))
            before = end
        return [found.get(row, []) for row in rows]

    def _read_group(
        self, group: int, first: int, wanted: set[int]
    ) -> Iterator[tuple[int, list[Any]]]:
        last = max(wanted)
        for batch in self._iterate_batches([group]):
            for place in sorted(row - first for row in wanted if 0 <= row - first < batch.num_rows):
                yield first + place, _take_row(batch, place)
            first += batch.num_rows
            if first > last:
                return

    def iterate(self, most_rows: int, most_bytes: int) -> Iterator[list[Any]]:
        left_rows, left_bytes = min(most_rows, self.count), most_bytes
        for batch in self._iterate_batches(list(range(len(self._ends)))):
            left_bytes -= batch.nbytes
            if left_bytes < 0:
                return
            columns = [column.to_pylist() for column in batch.columns]
            for place in range(min(batch.num_rows, left_rows)):
                yield [column[place] for column in columns]
            left_rows -= batch.num_rows
            if left_rows <= 0:
                return

    def _iterate_batches(self, groups: list[int]) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=groups, columns=list(self.columns),
                use_threads=False,
            )  # fmt: skip
        except self._errors as error:
            raise SchemaValidationError(f"this Parquet file cannot be read: {error}") from None


def _take_row(batch: Any, place: int) -> list[Any]:
    return [column[place].as_py() for column in batch.columns]
