"""Names of metrics, event types and artifacts, their encoding, and where artifacts are stored.

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

import os
import re
import sys
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from quark_core.errors import SchemaValidationError

MAX_NAME_LENGTH = 250
"""A name has so many characters at most."""

# Where the modules of the core are; a warning points at whoever called them.
_CORE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

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


def keep_encoded(name: str, stored: str, argument: str, noun: str, *, strict: bool) -> str:
    """The name that is stored, after a warning where it is not the one that was given.

    Args:
        name: What was given.
        stored: What `encode_name` makes of it.
        argument: What the name was given as, for an error.
        noun: What is named, for the warning.
        strict: Refuse what is outside the rule.

    Raises:
        SchemaValidationError: It is, and `strict`.
    """
    if stored == name:
        return name
    if strict:
        raise SchemaValidationError(
            f"{argument} {name!r} breaks the naming rule: each segment must start with a letter "
            "or digit and continue with letters, digits, '.', '_' or '-'"
        )
    warnings.warn(
        f"{noun} {name!r} breaks Quark's naming rule and is stored as {stored!r}. Both names "
        "can be read",
        RuntimeWarning,
        stacklevel=_find_caller(),
    )
    return stored


def _find_caller() -> int:
    """How many calls within the core lie above the one that warns, for `stacklevel`."""
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(_CORE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


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


ARTIFACT_STORAGE_LAYOUT: Mapping[str, str] = MappingProxyType(
    {
        "root": "artifacts",
        "object": "artifacts/.objects/{sha256_head}/{sha256}",
        "payload": "artifacts/{artifact_type}/{artifact_key}/{stem}.{extension}",
        "metadata": "artifacts/{artifact_type}/{artifact_key}/{stem}.metadata.json",
        "partial": "artifacts/.partial",
    }
)
"""Templates of artifact paths under a run's directory.

- `root`: folder of the run's artifacts
- `object`: payload, named by its SHA-256, so that equal payloads are stored once. `sha256_head`
  is the first two digits.
- `payload`: readable name, a relative link to the object. Without links in the file system, the
  record has the path of the object. `stem` is the step (or epoch) and a few random digits.
- `metadata`: the record as JSON, next to the payload
- `partial`: payloads that are being written

Artifact names do not begin with a dot, so they cannot collide with these folders.
"""

KEPT_SOURCES = "kept_sources"
"""Type of the artifacts that hold what a run was made of; a hidden one, in no list of artifacts."""

SOURCE_TEXTS = frozenset({"sources/pack", "sources/git.diff"})
"""Keys of those of them that hold text of the code, and not its hashes alone."""

_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_TYPE_LENGTH = 100
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_PATH_LENGTH = 1024
# What a file system takes as one name.
_MAX_PART_BYTES = 255


def is_sha256(text: str) -> bool:
    """Whether a text is a SHA-256 in hexadecimal, as payloads are named."""
    return _SHA256.fullmatch(text) is not None


def object_path(sha256: str) -> str:
    """Relative path of the payload that has this hash.

    Raises:
        SchemaValidationError: It is no hash, and might name any file.
    """
    if not is_sha256(sha256):
        raise SchemaValidationError(
            f"sha256 must be 64 lowercase hexadecimal digits, got {sha256!r:.80}"
        )
    return ARTIFACT_STORAGE_LAYOUT["object"].format(sha256_head=sha256[:2], sha256=sha256)


def split_path(path: str) -> tuple[str, ...] | None:
    """The parts of a relative path with slashes; None for one that may lead elsewhere.

    What a record says of files is taken from nowhere else: it may be anybody's.
    Neither absolute nor with `.` or `..` or nothing as a part, no backslash, no
    colon, nothing that cannot be printed, no part or whole that is too long.
    """
    parts = tuple(path.split("/"))
    if len(path) > _MAX_PATH_LENGTH or not path.isprintable() or "\\" in path or ":" in path:
        return None
    for part in parts:
        if part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > _MAX_PART_BYTES:
            return None
    return parts


def check_artifact_path(path: str | None, argument: str) -> None:
    """Refuse the path of an artifact's file that leads out of where artifacts lie.

    Raises:
        SchemaValidationError: Neither None nor a relative path as `split_path` says.
    """
    if path is not None and split_path(path) is None:
        raise SchemaValidationError(
            f"{argument} must be a relative path inside its folder, got {path!r:.120}"
        )


def check_artifact_type(artifact_type: object, argument: str = "artifact_type") -> str:
    """Return the type, or refuse it.

    Raises:
        SchemaValidationError: Not a letter or digit followed by letters,
            digits, `.`, `_` or `-`, or longer than 100 characters.
    """
    name = check_name(artifact_type, argument)
    if _TYPE.fullmatch(name) is None or len(name) > _MAX_TYPE_LENGTH:
        raise SchemaValidationError(
            f"{argument} must start with a letter or digit and continue with at most "
            f"{_MAX_TYPE_LENGTH - 1} letters, digits, '.', '_' or '-', got {name!r:.120}"
        )
    return name


def check_artifact_key(name: object, namespace: object, *, strict: bool) -> str:
    """The stored key of an artifact: within the naming rule of metrics, or encoded into it.

    Args:
        name: A name, or a whole key.
        namespace: What stands before it, or None.
        strict: Refuse what is outside the rule.

    Raises:
        SchemaValidationError: Not a str, empty or too long; a path that leads
            elsewhere (`..`, `.`, a leading `/`, a backslash, a NUL); with
            `strict`, anything else outside the rule.
    """
    key = check_name(name, "name")
    _refuse_paths(key, "name")
    if namespace is not None:
        prefix = check_name(namespace, "namespace")
        _refuse_paths(prefix, "namespace")
        key = check_name(join_name(prefix, key), "name")
    stored = key if is_plain_name(key) else check_name(encode_name(key), "name")
    return keep_encoded(key, stored, "name", "artifact", strict=strict)


def encode_artifact_key(name: str | None, argument: str) -> tuple[str, ...] | None:
    """The stored forms that a name to filter by may mean: it may be one itself.

    Raises:
        SchemaValidationError: Not a str, empty or too long.
    """
    if name is None:
        return None
    checked = check_name(name, argument)
    encoded = encode_name(checked)
    return (encoded,) if encoded == checked or not checked.isascii() else (encoded, checked)


def choose_stem(step: int | None, epoch: int | None, token: str) -> str:
    """First part of the file names of one artifact; sorts by step where there is one."""
    if step is not None:
        return f"step-{step:08d}-{token}"
    return f"epoch-{epoch:06d}-{token}" if epoch is not None else token


def _refuse_paths(key: str, argument: str) -> None:
    segments = key.split("/")
    if ".." in segments or "." in segments or key.startswith("/"):
        raise SchemaValidationError(
            f"{argument} must not start with '/' or have segments '.' or '..', got {key!r:.120}"
        )
    if "\\" in key or "\0" in key:
        raise SchemaValidationError(
            f"{argument} must not contain a backslash or a NUL, got {key!r:.120}"
        )


LATEST = "latest"
"""The alias of the newest version, which nobody sets."""

MOST_PINNED = 2**53 - 1
"""The last number that a link keeps; versions after it are counted each time."""

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"v([0-9]{1,18})")
_MOST_LENGTH = 1_200


class ArtifactName(NamedTuple):
    """What a text such as `model:best` names.

    Attributes:
        key: The artifact's whole name.
        version: The number, where it says one.
        alias: The alias, where it says no number; `latest` where it says nothing.
    """

    key: str
    version: int | None
    alias: str | None

    def __str__(self) -> str:
        return f"{self.key}:{self.alias if self.version is None else f'v{self.version}'}"


def check_alias(alias: object) -> str:
    """Return an alias, or refuse it.

    Raises:
        SchemaValidationError: No letters, digits, `.`, `_`, `-`; `latest`; or like a number.
    """
    if not isinstance(alias, str) or _ALIAS.fullmatch(alias) is None:
        raise SchemaValidationError(
            f"an alias must be a str of letters, digits, '.', '_' or '-', got {alias!r:.120}"
        )
    if alias == LATEST or _VERSION.fullmatch(alias):
        raise SchemaValidationError(
            f"an alias must not be {alias!r}: '{LATEST}' is reserved for the newest version, "
            "and v0, v1 and so on for version numbers"
        )
    return str(alias)


def parse_artifact_name(text: object) -> ArtifactName:
    """What `model:best`, `model:v3` or `model` names.

    Raises:
        SchemaValidationError: Not such a text.
    """
    if not isinstance(text, str) or not text or len(text) > _MOST_LENGTH:
        raise SchemaValidationError(
            f"an artifact name must be a string such as 'model:best', got {text!r:.120}"
        )
    key, colon, selector = text.rpartition(":")
    if not colon:
        return ArtifactName(text, None, LATEST)
    number = _VERSION.fullmatch(selector)
    if number is not None:
        return ArtifactName(key, int(number[1]), None)
    if not key or (selector != LATEST and _ALIAS.fullmatch(selector) is None):
        raise SchemaValidationError(
            f"an artifact name must be like 'model:best' or 'model:v3', got {text!r:.120}"
        )
    return ArtifactName(key, None, selector)
