"""Payloads as values and as bytes: json, text and bytes."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import encode_json, normalize_json
from quark_core.records.schema import ARTIFACT_PAYLOAD_FORMATS

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
            f"payload is a path ({os.fspath(payload)!r:.120}): log_file or store_file stores what "
            "is in the file"
        )
    if payload_format is None:
        if isinstance(payload, str):
            return "text"
        return "bytes" if isinstance(payload, _BYTES_LIKE) else "json"
    if not isinstance(payload_format, str) or payload_format not in ARTIFACT_PAYLOAD_FORMATS:
        raise SchemaValidationError(
            f"payload_format must be one of {', '.join(ARTIFACT_PAYLOAD_FORMATS)}, "
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
