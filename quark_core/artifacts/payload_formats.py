"""The formats of payloads: json, text, bytes and tables, and media types by the first bytes."""

from __future__ import annotations

import codecs
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import encode_json, normalize_json
from quark_core.records.schema import ARTIFACT_PAYLOAD_FORMATS

HEAD_BYTES = 4096
"""So much of a payload is looked at."""

UNKNOWN = "application/octet-stream"

# Where it stands, what stands there, and what the payload is then; the first that fits counts.
_SIGNS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (4, b"ftypavif", "image/avif"),
    (4, b"ftypM4A", "audio/mp4"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
    (0, b"OggS", "audio/ogg"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"\xff\xf3", "audio/mpeg"),
    (0, b"\xff\xf1", "audio/aac"),
    (0, b"fLaC", "audio/flac"),
    (0, b"%PDF-", "application/pdf"),
    (0, b"PK\x03\x04", "application/zip"),
    (0, b"\x1f\x8b\x08", "application/gzip"),
    (0, b"\x28\xb5\x2f\xfd", "application/zstd"),
    (0, b"\xfd7zXZ\0", "application/x-xz"),
    (0, b"BZh", "application/x-bzip2"),
    (257, b"ustar", "application/x-tar"),
    (0, b"\x89HDF\r\n\x1a\n", "application/x-hdf5"),
    (0, b"SQLite format 3\0", "application/vnd.sqlite3"),
    (0, b"PAR1", "application/vnd.apache.parquet"),
    (0, b"ARROW1\0", "application/vnd.apache.arrow.file"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# No text has these; form feed and escape stand in logs.
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
# What may stand before the first element of a document.
_PROLOGUE = re.compile(r"(?:\s|<!--.*?(?:-->|\Z)|<\?.*?(?:\?>|\Z))+", re.DOTALL)
_DOCTYPE = re.compile(r"<!doctype\s+(\w+)[^>\[]*(?:\[.*?\])?[^>]*>?", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<([a-z][\w:.-]*)(?=[\s/>]|\Z)", re.IGNORECASE)
_JSON = re.compile(r'\{\s*(?:"|\}|\Z)|\[\s*(?:["{\[\]\d-]|true\b|false\b|null\b|\Z)')
_HTML_TAGS = frozenset(
    "html head body script iframe style title table div span font h1 h2 h3 p a b i br img form "
    "meta link base object embed video audio input button".split()
)


def identify_media(head: bytes) -> str:
    """The media type of a payload that begins with these bytes.

    Never less than what a browser might make of it: a text in which an element of HTML comes
    first is HTML. Scripts and styles without a page about them are plain text.

    Args:
        head: The first `HEAD_BYTES` of it, or all of one that is shorter.
    """
    head = bytes(head[:HEAD_BYTES])
    for place, sign, media_type in _SIGNS:
        if head.startswith(sign, place):
            return media_type
    if head.startswith(b"RIFF") and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    text = _read_text(head)
    return UNKNOWN if text is None else _identify_text(text)


def _read_text(head: bytes) -> str | None:
    """The head as text; None where it is none."""
    if not head:
        return None
    encoding = "utf-16" if head.startswith(_BOMS) else "utf-8-sig"
    try:
        # A character may be cut at the end of the head.
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


def _identify_text(text: str) -> str:
    begin = text.lstrip("\ufeff \t\r\n\f")
    prologue = _PROLOGUE.match(begin)
    rest = begin if prologue is None else begin[prologue.end() :]
    is_xml = begin.startswith("<?xml")
    doctype = _DOCTYPE.match(rest)
    if doctype is not None:
        root = doctype[1].lower()
        if root == "html":
            return "text/html"
        behind = rest[doctype.end() :]
        prologue = _PROLOGUE.match(behind)
        rest = behind if prologue is None else behind[prologue.end() :]
    tag = _TAG.match(rest)
    name = "" if tag is None else tag[1].lower()
    if name == "svg" or name.endswith(":svg"):
        return "image/svg+xml"
    if name in _HTML_TAGS:
        return "text/html"
    if is_xml:
        return "application/xml"
    if begin.startswith("<!--"):
        # A browser takes it for a page, whatever follows.
        return "text/html"
    return "application/json" if _JSON.match(begin) else "text/plain"


EXTENSIONS = {"json": "json", "text": "txt", "bytes": "bin"}
"""Payload format -> what its file's name ends in, where nothing else is known."""

_HINT = (
    " (log_file stores a file such as torch.save makes, log_table a table, log_image an image; "
    "of what is in memory give the bytes)"
)
_BYTES_LIKE = (bytes, bytearray, memoryview)


def choose_format(payload: object, payload_format: object) -> str:
    """The format of a payload: the given one, or the one that fits its type.

    Raises:
        SchemaValidationError: `payload_format` is no format, or the payload is a path.
    """
    if isinstance(payload, os.PathLike):
        raise SchemaValidationError(
            f"payload is a path ({os.fspath(payload)!r:.120}). To store the file's content, "
            "call log_file or store_file"
        )
    if payload_format is None:
        if isinstance(payload, str):
            return "text"
        return "bytes" if isinstance(payload, _BYTES_LIKE) else "json"
    if not isinstance(payload_format, str) or payload_format not in ARTIFACT_PAYLOAD_FORMATS:
        raise SchemaValidationError(
            f"payload_format must be one of {', '.join(map(repr, ARTIFACT_PAYLOAD_FORMATS))}, "
            f"got {payload_format!r:.60}"
        )
    return payload_format


def encode_payload(payload: Any, payload_format: str) -> bytes | memoryview:
    """The bytes of a payload; those that are bytes already are not copied.

    In JSON, NaN and the infinities become the strings "NaN", "Infinity" and
    "-Infinity", and numpy and torch scalars plain numbers.

    Raises:
        SchemaValidationError: The payload does not fit its format.
    """
    if payload_format == "json":
        try:
            return encode_json(normalize_json(payload, "payload"))
        except SchemaValidationError as error:
            raise SchemaValidationError(f"{error}{_HINT}") from error
    if payload_format == "text":
        if not isinstance(payload, str):
            raise SchemaValidationError(
                f"payload must be a str for payload_format 'text', not {type(payload).__name__}"
            )
        return "".join(payload).encode("utf-8", "surrogatepass")
    try:
        view = memoryview(payload)
    except (TypeError, ValueError, BufferError) as error:
        reason = "" if isinstance(error, TypeError) else f": {error}"
        raise SchemaValidationError(
            "payload must be bytes-like for payload_format 'bytes', "
            f"not {type(payload).__name__}{reason}"
        ) from None
    if not view.c_contiguous:
        return view.tobytes()
    return view.cast("B") if view.nbytes else memoryview(b"")


def decode_payload(data: bytes, payload_format: str) -> Any:
    """The value that was stored; JSON as plain dicts and lists."""
    if payload_format == "json":
        return msgspec.json.decode(data)
    return data.decode("utf-8", "surrogatepass") if payload_format == "text" else data


# As they are; anything else is looked at, one by one.
_PLAIN = (int, bool, type(None))
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_IMAGE_KEYS = {"image", "width", "height"}
_TEXTS = (str, float, list, dict, tuple)


def encode_table(
    data: Any,
    columns: Sequence[str] | None,
    keep_cell: Callable[[Any], dict[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """A table as `{"columns": [names], "rows": [[values]]}`.

    Args:
        data: Rows (with `columns`), a mapping of columns, mappings as rows, or
            a table of pandas, Polars or pyarrow. What is missing in a pandas
            table becomes None; an index that is no mere numbering is a column.
        columns: Names of the columns; of a table that has names, which ones.
        keep_cell: Told of each value that is no JSON; what it returns stands for the value,
            unless that is None.

    Dates and times become ISO 8601, decimals texts; NaN and the infinities of
    plain rows become the strings that Quark's JSON has for them.

    Raises:
        SchemaValidationError: Nothing of these, names that repeat, rows of
            unequal length, or a value that JSON cannot hold; the message says where.
    """
    names = None if columns is None else _check_columns(columns)
    found, rows = _read(data, names)
    if names is not None and found != names:
        absent = [name for name in names if name not in found]
        if absent:
            raise SchemaValidationError(
                f"columns: {absent[0]!r:.60} is not a column. The columns are: "
                f"{', '.join(found):.200}"
            )
        places = [found.index(name) for name in names]
        rows = [[row[place] for place in places] for row in rows]
        found = names
    _check_columns(found)
    width = len(found)
    cells = []
    for index, row in enumerate(rows):
        if len(row) != width:
            raise SchemaValidationError(
                f"rows[{index}] has {len(row)} values, but there are {width} columns"
            )
        cells.append([value if type(value) in _PLAIN else None for value in row])
        for place, value in enumerate(row):
            if type(value) not in _PLAIN:
                kept = keep_cell(value) if keep_cell and type(value) not in _TEXTS else None
                cells[-1][place] = (
                    kept if kept is not None else _settle(value, f"rows[{index}].{found[place]}")
                )
    return {"columns": found, "rows": cells}


def _read(data: Any, names: list[str] | None) -> tuple[list[str], list[Sequence[Any]]]:
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and hasattr(data, "to_frame") and not hasattr(data, "columns"):
        data = data.to_frame()
    if library == "pandas" and hasattr(data, "itertuples"):
        if type(data.index).__name__ != "RangeIndex":
            # An index that says something is a column, such as the groups of a groupby.
            data = data.reset_index()
        missing = data.isna()
        return [str(name) for name in data.columns], [
            [None if gone else value for value, gone in zip(row, gaps, strict=True)]
            for row, gaps in zip(
                data.itertuples(index=False, name=None),
                missing.itertuples(index=False, name=None),
                strict=True,
            )
        ]
    if library == "polars" and hasattr(data, "rows"):
        return list(data.columns), list(data.rows())
    if library == "pyarrow" and hasattr(data, "to_pydict"):
        _check_columns(data.schema.names)
        data = data.to_pydict()
    if isinstance(data, Mapping):
        return _read_columns(data)
    if hasattr(data, "tolist"):
        data = data.tolist()
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise SchemaValidationError(
            "data must be rows, a mapping of columns, or a table of pandas, Polars or pyarrow, "
            f"not {type(data).__name__}"
        )
    rows = list(data)
    if rows and all(isinstance(row, Mapping) for row in rows):
        found = list(dict.fromkeys(str(name) for row in rows for name in row))
        named = [{str(name): value for name, value in row.items()} for row in rows]
        for index, row in enumerate(rows):
            if len(named[index]) != len(row):
                raise SchemaValidationError(f"rows[{index}] has two names that are equal as text")
        return found, [[row.get(name) for name in found] for row in named]
    if names is None:
        raise SchemaValidationError("columns is required, because the rows have no names")
    for index, row in enumerate(rows):
        rows[index] = row.tolist() if hasattr(row, "tolist") else row
        if isinstance(rows[index], (str, bytes, Mapping)) or not isinstance(rows[index], Sequence):
            raise SchemaValidationError(
                f"rows[{index}] must be a sequence of values, not {type(row).__name__}"
            )
    return names, rows


def _read_columns(data: Mapping[Any, Any]) -> tuple[list[str], list[Sequence[Any]]]:
    lists: dict[str, list[Any]] = {}
    for name, values in data.items():
        plain = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(plain, (str, bytes, Mapping)) or not isinstance(plain, Iterable):
            raise SchemaValidationError(
                f"data[{name!r:.60}] must be a column of values, not {type(values).__name__}"
            )
        if str(name) in lists:
            raise SchemaValidationError(f"data has two columns named {str(name)!r:.60}")
        lists[str(name)] = list(plain)
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        told = ", ".join(f"{name!r:.40}: {len(values)}" for name, values in lists.items())
        raise SchemaValidationError(f"data has columns of unequal length: {told:.300}")
    return list(lists), [list(row) for row in zip(*lists.values(), strict=True)]


def _check_columns(columns: Any) -> list[str]:
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Iterable):
        raise SchemaValidationError(
            f"columns must be a sequence of str, not {type(columns).__name__}"
        )
    names = list(columns)
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise SchemaValidationError(
                f"columns[{index}] must be a str, not {type(name).__name__}"
            )
        if name in names[:index]:
            raise SchemaValidationError(f"columns contains {name!r:.60} twice")
    return [str(name) for name in names]


def _settle(value: Any, where: str) -> Any:
    kind = type(value)
    if kind is str or kind is int or value is None or kind is bool:
        return normalize_json(value, where)
    if kind is float and math.isfinite(value):
        return value
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if type(value).__name__ == "Timedelta":
        return str(value)
    return str(value) if isinstance(value, Decimal) else normalize_json(value, where)


def list_column_types(table: Mapping[str, Any]) -> list[str]:
    """What each column holds: number, boolean, text, image, json or mixed; empty for nothing.

    Args:
        table: As `encode_table` returns it.
    """
    found: list[set[str]] = [set() for _ in table["columns"]]
    for row in table["rows"]:
        for place, value in enumerate(row):
            found[place].add(_name_type(value))
    names = []
    for kinds in found:
        kinds.discard("empty")
        names.append(kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "empty")
    return names


def _name_type(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)) or value in _NON_FINITE:
        return "number"
    if isinstance(value, str):
        return "text"
    is_image = isinstance(value, dict) and "image" in value and set(value) <= _IMAGE_KEYS
    return "image" if is_image else "json"
