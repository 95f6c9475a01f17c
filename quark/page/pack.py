"""The wire form: JSON, and packs of a JSON head with arrays behind it.

docs/contributing/page-api.md describes both for whoever reads them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACK_TYPE = "application/vnd.quark.pack"
"""Media type of a pack."""

_ALIGNMENT = 8
_DTYPES = {"f4": "<f4", "f8": "<f8", "i4": "<i4", "u1": "|u1"}
_LENGTH = struct.Struct("<I")
# Asked about first: most of what a long answer holds, and dear to tell from a mapping.
_ALWAYS_PLAIN = frozenset((int, bool, type(None)))
# A difference shows from a pixel on, of a chart that is at most so many pixels high.
_SHOWN_LEVELS = 4096


def make_plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite as texts, halves of pairs replaced."""
    if type(value) in _ALWAYS_PLAIN:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        # What is half of a surrogate pair has no form in UTF-8.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {make_plain(str(key)): make_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_plain(item) for item in value]
    return value


def encode_json(value: Any) -> bytes:
    """JSON in UTF-8; what is not finite is a text, see `make_plain`."""
    return msgspec.json.encode(make_plain(value))


def encode_pack(head: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> bytes:
    """A head and its columns as one pack.

    Args:
        head: JSON-like values; `cols` is added to it.
        columns: Name -> array of one dimension or more (then row after row), of a dtype
            that numpy calls f4, f8, i4 or u1; booleans become u1.
    """
    import numpy as np

    listed: list[tuple[str, str, int, int]] = []
    parts: list[bytes] = []
    offset = 0
    for name, array in columns.items():
        plain = array.view(np.uint8) if array.dtype == np.bool_ else array
        dtype = plain.dtype.str[1:]
        data = np.ascontiguousarray(plain, dtype=_DTYPES[dtype]).tobytes()
        listed.append((name, dtype, offset, plain.size))
        padding = -len(data) % _ALIGNMENT
        parts += [data, bytes(padding)]
        offset += len(data) + padding
    text = encode_json({**head, "cols": listed})
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode_pack(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The head and the columns of a pack, for tests and programs.

    Raises:
        ValueError: It is none, or not whole.
    """
    import numpy as np

    if len(data) < _LENGTH.size:
        raise ValueError("a pack starts with the length of its head")
    (size,) = _LENGTH.unpack_from(data)
    body = _LENGTH.size + size
    try:
        head = msgspec.json.decode(data[_LENGTH.size : body])
        columns = {
            name: np.frombuffer(data, dtype=_DTYPES[dtype], count=length, offset=body + offset)
            for name, dtype, offset, length in head["cols"]
        }
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"this is not a pack: {error!r}") from error
    return head, columns


def choose_floats(*arrays: NDArray[Any]) -> str:
    """The dtype in which values of one curve travel: f4, or f8 where f4 would lose what shows.

    That is where their range is small beside their size, or they are too large for f4.
    """
    import numpy as np

    finite = [kept for array in arrays if (kept := array[np.isfinite(array)]).size]
    if not finite:
        return "f4"
    low = min(float(array.min()) for array in finite)
    high = max(float(array.max()) for array in finite)
    largest = max(abs(low), abs(high))
    if largest > float(np.finfo(np.float32).max) or 0.0 < largest < float(
        np.finfo(np.float32).tiny
    ):
        return "f8"
    lost = largest * float(np.finfo(np.float32).eps)
    return "f8" if high > low and (high - low) / _SHOWN_LEVELS < lost else "f4"
