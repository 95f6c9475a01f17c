"""A configuration as MLflow params: flat, and text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from quark_core.json_object import encode_json

__all__ = ["PARAM_LIMITS", "TAG_LIMITS", "fit", "flatten", "is_same"]

PARAM_LIMITS = (6000, 500, 250)
"""Longest value of a param: today's servers, and what older ones still ask for."""
TAG_LIMITS = (8000, 5000, 500)
"""Longest value of a tag, likewise."""


def flatten(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and text of each leaf: scalars by `str()`, lists and empty objects as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            for path, text in flatten(value):
                yield (key, *path), text
        elif isinstance(value, (Mapping, list, tuple)):
            yield (key,), encode_json(value).decode()
        else:
            yield (key,), str(value)


def fit(text: str, limit: int) -> str:
    """The text, or its beginning with the SHA-256 of the whole where it is too long.

    Servers cut long values without a word; this way two that differ stay different.
    """
    # PostgreSQL takes no NUL and would fail at this value for ever.
    text = text.replace("\0", "\ufffd")
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    ending = f"… [{len(text)} characters, sha256 {digest}]"
    return text[: limit - len(ending)] + ending


def is_same(stored: str, text: str) -> bool:
    """Whether a stored value is this text, whole or as `fit` has cut it."""
    return any(stored == fit(text, limit) for limit in PARAM_LIMITS)
