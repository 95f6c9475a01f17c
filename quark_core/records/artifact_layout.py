"""Where the files of a run's artifacts lie, and which names they may have."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType

from quark_core.errors import SchemaValidationError
from quark_core.records.names import check_name, encode_name, is_plain_name, join_name

ARTIFACT_STORAGE_LAYOUT: Mapping[str, str] = MappingProxyType(
    {
        "root": "artifacts",
        "object": "artifacts/.objects/{sha256_head}/{sha256}",
        "payload": "artifacts/{artifact_type}/{artifact_key}/{stem}.{extension}",
        "metadata": "artifacts/{artifact_type}/{artifact_key}/{stem}.metadata.json",
        "partial": "artifacts/.partial",
    }
)
"""Paths under a run's directory, as templates.

root: Everything of the run's artifacts lies in here.
object: A payload, named by its SHA-256, so that equal payloads lie there once;
    `sha256_head` are the first two digits.
payload: The name under which people find it, a relative link to the object;
    where the file system has no links the record names the object itself.
    `stem` is the step (or epoch) and a few random digits.
metadata: What the record says, as JSON, beside that name.
partial: Payloads on their way in.

No name begins with a dot, so none can meet the folders that do.
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
            f"sha256 must be 64 lowercase hexadecimal digits: {sha256!r:.80}"
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
            f"{argument} must be a relative path that leads nowhere else, got {path!r:.120}"
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
            f"{argument} must begin with a letter or digit and go on with at most "
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
    if is_plain_name(key):
        return key
    if strict:
        raise SchemaValidationError(
            f"name {key!r:.120} is outside the naming rule: each segment must begin with a letter "
            "or digit and go on with letters, digits, '.', '_' or '-'"
        )
    stored = check_name(encode_name(key), "name")
    warnings.warn(
        f"artifact {key!r} is outside Quark's naming rule and is stored as {stored!r}; "
        "reads accept either name",
        RuntimeWarning,
        stacklevel=4,
    )
    return stored


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
            f"{argument} must not hold '.' or '..' as a segment or begin with '/', got {key!r:.120}"
        )
    if "\\" in key or "\0" in key:
        raise SchemaValidationError(
            f"{argument} must not hold a backslash or a NUL, got {key!r:.120}"
        )
