"""Tables and texts in payloads: pages of rows, sorted and searched within bounds."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quark.page.recent import Recent
from quark.page.routes.parameters import MAX_ROWS, Parameters
from quark.page.routes.records import find_artifact, open_artifact
from quark.page.routes.table_files import KINDS, TableFile, is_text, open_table
from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media
from quark_core.errors import SchemaValidationError
from quark_core.records.names import decode_name, is_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.routes.page_source import PageSource

_ROWS = 100
_MOST_OPEN = 4
_MOST_ORDERS = 4
# Of so many rows, and so much of the file, all are looked at to sort or to search.
_MOST_SEARCHED = 200_000
_MOST_SEARCHED_BYTES = 64 * 1024 * 1024
_MOST_CHARACTERS = 300
_SORTED_CHARACTERS = 64
_SAFE_INTEGER = 2**53
_TEXT_BYTES = 200_000
_LAID_OUT_DEPTH = 40
_PROSE = ("markdown", "html")
# What would not be seen, or would turn around what stands beside it, is shown as a sign.
_SIGNS = {code: 0x2400 + code for code in range(0x20)}
_SIGNS |= {0x7F: 0x2421, **dict.fromkeys((*range(0x80, 0xA0), *range(0x200E, 0x2010),
    *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF), 0xFFFD)}  # fmt: skip


_Key = tuple[str, str, str]
"""Run, hash and kind of a table."""


class TableDesk:
    """Answers pages of tables; every method may be called from any thread.

    The tables that were looked at last stay open, so that a page costs reading its rows alone.

    Args:
        source: What is looked at.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._open: OrderedDict[_Key, _OpenTable] = OrderedDict()

    def tell(self, run_id: str, parameters: Parameters) -> dict[str, Any]:
        """Some rows of a table.

        Raises:
            SchemaValidationError: A bad parameter, or the payload is no table.
            ArtifactNotFoundError: The run has no such artifact, or it is not kept.
            RunNotFoundError: There is no such run.
        """
        sha256 = parameters.get_text("sha256") or ""
        kind = parameters.get_word("kind", KINDS[0], KINDS)
        first = parameters.get_integer("first") or 0
        limit = parameters.get_bounded("limit", _ROWS, MAX_ROWS)
        column = parameters.get_integer("sort")
        ask = _Ask(
            column,
            parameters.get_flag("descending"),
            (parameters.get_text("text") or "").casefold(),
        )
        record = find_artifact(self._source, run_id, sha256)
        while True:
            opened = self._find((run_id, sha256, kind))
            with opened.lock:
                # Somebody else's table may have taken its place meanwhile.
                if not opened.is_closed:
                    found = opened.tell(self._source, ask, first, limit)
                    break
        name = decode_name(record.artifact_key)
        return {"name": name, "size_bytes": record.size_bytes, **found}

    def close(self) -> None:
        """Give up the files."""
        with self._lock:
            opened = list(self._open.values())
            self._open.clear()
        for each in opened:
            each.close()

    def _find(self, key: _Key) -> _OpenTable:
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                opened = self._open[key] = _OpenTable(*key)
            self._open.move_to_end(key)
            gone = []
            while len(self._open) > _MOST_OPEN:
                gone.append(self._open.popitem(last=False)[1])
        for each in gone:
            each.close()
        return opened


class _Ask(msgspec.Struct, frozen=True):
    """Which rows of a table, and in which order."""

    sort: int | None
    descending: bool
    text: str

    @property
    def is_plain(self) -> bool:
        return self.sort is None and not self.text


class _OpenTable:
    """One table with its file, opened when it is first asked; under its lock."""

    def __init__(self, run_id: str, sha256: str, kind: str) -> None:
        self.lock = threading.Lock()
        self.is_closed = False
        self._run_id = run_id
        self._sha256 = sha256
        self._kind = kind
        self._file: Any = None
        self._table: TableFile | None = None
        self._orders = Recent[_Ask, "tuple[NDArray[Any], int]"](_MOST_ORDERS)

    def tell(self, source: PageSource, ask: _Ask, first: int, limit: int) -> dict[str, Any]:
        table = self._table or self._look(source)
        if ask.sort is not None and ask.sort >= len(table.columns):
            raise SchemaValidationError(
                f"sort must be a column from 0 to {len(table.columns) - 1}, got {ask.sort}"
            )
        if ask.is_plain:
            rows: Sequence[int] = range(first, min(first + limit, table.count))
            count = searched = table.count
        else:
            order, searched = self._sort(table, ask)
            count = len(order)
            rows = order[first : first + limit].tolist()
        values = table.read(rows) if rows else []
        return {
            "columns": [_show_cell(name) for name in table.columns],
            "column_count": table.column_count,
            "rows": [[_show_cell(value) for value in row[: len(table.columns)]] for row in values],
            "numbers": list(rows),
            "count": count,
            "row_count": table.count,
            "is_whole": table.is_whole,
            "searched": searched,
        }

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            if self._file is not None:
                self._file.close()

    def _look(self, source: PageSource) -> TableFile:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_artifact(source, self._run_id, self._sha256))
            media_type = identify_media(file.read(HEAD_BYTES))
            if self._kind != "parquet" and not is_text(media_type):
                raise SchemaValidationError(f"this is not a table, but {media_type}")
            file.seek(0)
            self._table = open_table(file, self._kind)
            self._file = file
            stack.pop_all()
        return self._table

    def _sort(self, table: TableFile, ask: _Ask) -> tuple[NDArray[Any], int]:
        """Numbers of the rows that fit, in their order, and how many rows were looked at."""
        found = self._orders.get(ask)
        if found is None:
            found = _find_order(table, ask)
        self._orders[ask] = found
        return found


def _find_order(table: TableFile, ask: _Ask) -> tuple[NDArray[Any], int]:
    """Numbers first, then texts; what is missing last, either way."""
    import numpy as np

    fitting: list[int] = []
    numbers: list[tuple[float, int]] = []
    texts: list[tuple[str, int]] = []
    missing: list[int] = []
    searched = 0
    for row, values in enumerate(table.iterate(_MOST_SEARCHED, _MOST_SEARCHED_BYTES)):
        searched = row + 1
        if ask.text and not any(ask.text in _write(value).casefold() for value in values):
            continue
        if ask.sort is None:
            fitting.append(row)
            continue
        value = values[ask.sort] if ask.sort < len(values) else None
        number = _read_number(value)
        if number is not None:
            numbers.append((number, row))
        elif value is None or value == "":
            missing.append(row)
        else:
            texts.append((_write(value)[:_SORTED_CHARACTERS], row))
    for listed in (numbers, texts):
        listed.sort(key=lambda pair: pair[0], reverse=ask.descending)
    parts = (texts, numbers) if ask.descending else (numbers, texts)
    fitting += [row for listed in parts for _, row in listed]
    return np.array(fitting + missing, dtype=np.int64), searched


def _read_number(value: Any) -> float | None:
    """A value as a number that can be put in an order, or None."""
    if isinstance(value, (str, int, float)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return None if number != number else number
    return None


def _write(value: Any) -> str:
    """A value as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value[:_MOST_CHARACTERS].hex()
    try:
        return "" if value is None else msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, RecursionError, msgspec.EncodeError):
        return str(type(value).__name__)


def _show_cell(value: Any) -> Any:
    """A value as the page has it: short, and with signs for what is not seen."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and abs(value) <= _SAFE_INTEGER:
        return value
    if isinstance(value, dict) and is_sha256(str(value.get("image"))):
        # The payload itself says whether it is a picture.
        return {"image": value["image"]}
    text = _write(value)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}…"
    return text.translate(_SIGNS)


def read_text(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """The beginning of a payload that is a text; JSON that is there as a whole is laid out.

    Raises:
        SchemaValidationError: It is no text.
        ArtifactNotFoundError: The run has no such artifact, or it is not kept.
        RunNotFoundError: There is no such run.
    """
    sha256 = parameters.get_text("sha256") or ""
    record = find_artifact(source, run_id, sha256)
    with open_artifact(source, run_id, sha256) as file:
        data = file.read(_TEXT_BYTES)
    media_type = identify_media(data[:HEAD_BYTES])
    # As text a page of HTML is as harmless as any other.
    is_prose = record.artifact_type in _PROSE and media_type in ("text/html", "application/xml")
    if media_type not in ("text/plain", "application/json") and not is_prose:
        raise SchemaValidationError(f"{record.artifact_name!r:.80} is not a text, but {media_type}")
    is_cut = record.size_bytes > len(data)
    if media_type == "application/json" and not is_cut:
        data = _lay_out(data)
    is_utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = data.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")
    return {
        "text": text[:_TEXT_BYTES],
        "is_cut": is_cut or len(text) > _TEXT_BYTES,
        "size_bytes": record.size_bytes,
    }


def _lay_out(data: bytes) -> bytes:
    """JSON with line breaks; what is no JSON, or too deep for that, as it is."""
    depth = deepest = 0
    for byte in data:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    if deepest > _LAID_OUT_DEPTH:
        return data
    try:
        return msgspec.json.format(data, indent=2)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return data
