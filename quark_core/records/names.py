"""Names of metrics and event types, and the reversible encoding of odd ones.

A metric key is a path of segments, `namespace/…/name`. Each segment begins
with an ASCII letter or digit and goes on with letters, digits, `.`, `_`, `-`.

A key outside this rule (`mean@1`) is stored encoded, never refused, unless
the run is strict. Each character that does not fit becomes `_x<hex>_` (or
`x<hex>_` at the start of a segment), an empty segment becomes `x_`. A key
within the rule that happens to look encoded has the first character of that
look-alike encoded, so that no two keys ever share an encoding:

    mean@1        -> mean_x40_1
    _step         -> x5f_step
    a//b          -> a/x_/b
    mean_x40_1    -> mean_x5f_x40_1
"""

from __future__ import annotations

import re
import sys

from quark_core.errors import SchemaValidationError

MAX_NAME_LENGTH = 250

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_ESCAPE = re.compile(r"(?:^|_)x([0-9a-f]{2,6})_")
# What decoding would take for an escape, the underscore of a following escape included.
_LOOK_ALIKE = re.compile(r"(?:^|_)x[0-9a-f]{2,6}(?=_|[^A-Za-z0-9._-])")
_FIRST = re.compile(r"[A-Za-z0-9]")
_NEXT = re.compile(r"[A-Za-z0-9._-]")


def is_plain_name(name: str) -> bool:
    """Whether a name is stored as it stands."""
    return _PLAIN.fullmatch(name) is not None and encode_name(name) == name


def encode_name(name: str) -> str:
    """Map any name to one within the rule; distinct names stay distinct."""
    return "/".join(map(_encode_segment, name.split("/")))


def decode_name(encoded: str) -> str:
    """Return the name that `encode_name` was given."""
    if "x" not in encoded:
        return encoded
    return "/".join(map(_decode_segment, encoded.split("/")))


def check_name(name: object, argument: str) -> str:
    """Return the name, or refuse one that no backend could hold.

    Raises:
        SchemaValidationError: Not a str, empty, or over `MAX_NAME_LENGTH` characters.
    """
    if not isinstance(name, str):
        raise SchemaValidationError(f"{argument} must be a str, not {type(name).__name__}")
    name = str.__str__(name) if type(name) is not str else name
    if not name.strip("/ \t\r\n"):
        raise SchemaValidationError(f"{argument} must not be empty")
    if len(name) > MAX_NAME_LENGTH:
        raise SchemaValidationError(
            f"{argument} has {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed"
        )
    return name


def check_key(key: object, argument: str) -> str:
    """Return a stored key, which may be longer than the name that it encodes.

    Raises:
        SchemaValidationError: `check_name` refuses that name.
    """
    if isinstance(key, str) and len(key) > MAX_NAME_LENGTH:
        check_name(decode_name(key), argument)
        return str.__str__(key)
    return check_name(key, argument)


def check_text(text: object, argument: str) -> str:
    """Return a free text as a plain str, with halves of surrogate pairs replaced.

    Raises:
        SchemaValidationError: Not a str.
    """
    if not isinstance(text, str):
        raise SchemaValidationError(f"{argument} must be a str, not {type(text).__name__}")
    # str.__str__ of a subclass may be anything; joining takes the characters.
    return "".join(text).encode("utf-8", "replace").decode()


def join_name(namespace: str | None, name: str) -> str:
    """Full key of a name in a namespace."""
    return name if namespace is None else f"{namespace}/{name}"


def split_name(key: str) -> tuple[str | None, str]:
    """Namespace (None for a bare name) and last segment of a key."""
    namespace, slash, name = key.rpartition("/")
    return (namespace if slash else None), name


def _encode_segment(segment: str) -> str:
    if segment == "":
        return "x_"
    if segment == "x_":
        return "x78__"
    look_alikes = {match.start() for match in _LOOK_ALIKE.finditer(segment)}
    out = []
    for position, character in enumerate(segment):
        allowed = _NEXT if position else _FIRST
        if allowed.fullmatch(character) and position not in look_alikes:
            out.append(character)
        else:
            out.append(f"{'_' if position else ''}x{ord(character):02x}_")
    return "".join(out)


def _decode_segment(segment: str) -> str:
    if segment == "x_":
        return ""
    return _ESCAPE.sub(_decode_escape, segment)


def _decode_escape(match: re.Match[str]) -> str:
    code = int(match[1], 16)
    return chr(code) if code <= sys.maxunicode else match[0]
