"""How a version of an artifact is named: `model:best`, `model:v3`, `model`."""

from __future__ import annotations

import re
from typing import NamedTuple

from quark_core.errors import SchemaValidationError

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
            f"an alias must not be {alias!r}: {LATEST} is always the newest version, and v0, v1 "
            "and so on are numbers"
        )
    return str(alias)


def parse_artifact_name(text: object) -> ArtifactName:
    """What `model:best`, `model:v3` or `model` names.

    Raises:
        SchemaValidationError: Not such a text.
    """
    if not isinstance(text, str) or not text or len(text) > _MOST_LENGTH:
        raise SchemaValidationError(
            f"an artifact is named by a text such as 'model:best', got {text!r:.120}"
        )
    key, colon, selector = text.rpartition(":")
    if not colon:
        return ArtifactName(text, None, LATEST)
    number = _VERSION.fullmatch(selector)
    if number is not None:
        return ArtifactName(key, int(number[1]), None)
    if not key or (selector != LATEST and _ALIAS.fullmatch(selector) is None):
        raise SchemaValidationError(
            f"an artifact is named by a text such as 'model:best' or 'model:v3', got {text!r:.120}"
        )
    return ArtifactName(key, None, selector)
