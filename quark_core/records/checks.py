"""Checks of what records hold, which records and those who make them ask alike."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from quark_core.errors import SchemaValidationError
from quark_core.records.names import (
    check_artifact_path,
    check_artifact_type,
    check_name,
    is_sha256,
    split_name,
)

_EVENT_TYPE = re.compile(r"[a-z][a-z0-9_./-]*")


def check_choice(choice: object, argument: str, choices: Collection[str]) -> str:
    """Return a word that somebody chose, or refuse it.

    An object that is no text is compared with nothing: an array compares each of its elements,
    and a list has no hash.

    Raises:
        SchemaValidationError: None of the words.
    """
    if isinstance(choice, str):
        if choice in choices:
            return choice
        got = repr(choice)[:60]
    else:
        got = "None" if choice is None else type(choice).__name__
    words = f"one of {', '.join(map(repr, choices))}"
    if len(choices) == 2:
        words = " or ".join(map(repr, choices))
    raise SchemaValidationError(f"{argument} must be {words}, got {got}")


def check_event_type(event_type: object, argument: str = "event_type") -> str:
    """Return the event type, or refuse it.

    Raises:
        SchemaValidationError: Not a lowercase letter followed by lowercase
            letters, digits, `_`, `.`, `/` or `-`, or too long.
    """
    name = check_name(event_type, argument)
    if _EVENT_TYPE.fullmatch(name) is None:
        raise SchemaValidationError(
            f"{argument} must start with a lowercase letter and continue with lowercase "
            f"letters, digits, '_', '.', '/' or '-', got {name!r:.60}"
        )
    return name


def check_key(record: str, noun: str, key: str, namespace: str | None, last: str) -> None:
    """Refuse a key that is not its namespace and its last segment joined.

    Args:
        record: Name of the record's type.
        noun: What the key names.
        key, namespace, last: The record's fields.

    Raises:
        SchemaValidationError: They do not agree.
    """
    if (namespace, last) != split_name(key):
        raise SchemaValidationError(
            f"{record}.{noun}_key {key!r} must be namespace and {noun}_name joined, with the "
            f"last segment as {noun}_name"
        )


def check_finite(where: str, value: float | None) -> None:
    """Refuse a number that is not finite as float64; None passes.

    Raises:
        SchemaValidationError: It is not.
    """
    if value is None:
        return
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise SchemaValidationError(f"{where} must be a finite float64, got {value!r:.40}")


def check_histogram(
    edges: Sequence[float], counts: Sequence[float], edges_argument: str, counts_argument: str
) -> None:
    """Hold bin edges and counts to each other; two empty ones fit.

    Raises:
        SchemaValidationError: Not one more edge than counts, edges that do not
            ascend or are not finite, or counts that are negative or not finite.
    """
    if len(edges) != len(counts) + 1 and (edges or counts):
        raise SchemaValidationError(
            f"{edges_argument} must have one more edge than {counts_argument} has counts, got "
            f"{len(edges)} edges and {len(counts)} counts"
        )
    for index, edge in enumerate(edges):
        check_finite(f"{edges_argument}[{index}]", edge)
        if index and not edges[index - 1] < edge:
            raise SchemaValidationError(
                f"{edges_argument} must ascend, but [{index}] is {edge!r:.40} after "
                f"{edges[index - 1]!r:.40}"
            )
    for index, count in enumerate(counts):
        check_finite(f"{counts_argument}[{index}]", count)
        if count < 0:
            raise SchemaValidationError(
                f"{counts_argument}[{index}] must not be negative, got {count!r:.40}"
            )


def check_places(
    record: str, sha256: str, artifact_type: str, key: str, *paths: tuple[str, str | None]
) -> None:
    """Refuse an artifact whose hash, type, key or paths could name a file elsewhere.

    Args:
        record: Name of the record's type.
        sha256, artifact_type, key: The record's fields.
        *paths: Names and values of those that are paths.

    Raises:
        SchemaValidationError: One of them could.
    """
    if not is_sha256(sha256):
        raise SchemaValidationError(f"{record}.sha256 must be 64 lowercase hexadecimal digits")
    check_artifact_type(artifact_type, f"{record}.artifact_type")
    for name, path in (("artifact_key", key), *paths):
        check_artifact_path(path, f"{record}.{name}")
