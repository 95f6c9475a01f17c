"""What a payload is, out of its first bytes: a name may say anything, and so may who logs it."""

from __future__ import annotations

import codecs
import re

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
