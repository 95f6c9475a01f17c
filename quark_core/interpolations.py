"""OmegaConf's containers: which they are, and which interpolations give a secret away.

An interpolation is told by what it is written as: `${oc.env:API_KEY}` and
`${db.password}` name a secret, whatever the key is called that they stand at.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from quark_core.redaction import REDACTED, is_secret_key

__all__ = ["Interpolated", "find_omegaconf", "names_secret", "redact_written", "settle"]

# A short text is found by accident in others.
_MIN_SECRET_LENGTH = 6
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_BETWEEN_NAMES = re.compile(r"[^\w-]+")


@dataclass(frozen=True, slots=True)
class Interpolated:
    """A value that an interpolation resolved to, until `settle` has looked at it.

    Attributes:
        value: A JSON value that is neither a dict nor a list.
    """

    value: Any


def find_omegaconf(value: object) -> Any | None:
    """The class `OmegaConf` where `value` is one of its containers, else None; imports nothing."""
    library = sys.modules.get("omegaconf")
    if library is None:
        return None
    for name in ("DictConfig", "ListConfig", "TupleConfig"):
        kind = getattr(library, name, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return getattr(library, "OmegaConf", None)
    return None


def names_secret(written: str, value: object) -> bool:
    """Whether an interpolation as it is written names a secret that has this value."""
    return any(
        is_secret_key(name, value)
        for expression in _find_expressions(written)
        for name in _find_names(expression)
    )


def redact_written(written: Any) -> Any:
    """An interpolation as it is written, but for the default value of a secret."""
    if isinstance(written, str) and "," in written and names_secret(written, "any"):
        return REDACTED
    return written


def settle(values: dict[str, Any], secrets: list[object]) -> dict[str, Any]:
    """Put the values of interpolations in place, but for those that hold a secret of elsewhere.

    Args:
        values: JSON values with `Interpolated` ones among them.
        secrets: What is known to be secret besides what stands under a secret's key.
    """
    texts: set[str] = set()
    for secret in secrets:
        _collect(secret, texts)
    # The name of a variable may have been put together by interpolations itself.
    _collect_by_key("", dict(os.environ), texts)
    _collect_by_key("", values, texts)
    settled = _settle(values, texts)
    assert isinstance(settled, dict)
    return settled


def _find_expressions(written: str) -> list[str]:
    """What stands between `${` and `}`, of nested ones too: each without those inside it."""
    found: list[str] = []
    rest, count = written, 1
    while count:
        found += _INNERMOST.findall(rest)
        rest, count = _INNERMOST.subn("", rest)
    return found


def _find_names(expression: str) -> list[str]:
    """Names in the path of a node; or those of a resolver and its first argument."""
    resolver, colon, arguments = expression.partition(":")
    names = _BETWEEN_NAMES.split(resolver)
    if colon:
        names += _BETWEEN_NAMES.split(arguments.partition(",")[0])
    return names


def _collect_by_key(key: str, value: Any, texts: set[str]) -> None:
    if is_secret_key(key, value.value if isinstance(value, Interpolated) else value):
        _collect(value, texts)
    elif isinstance(value, dict):
        for name, item in value.items():
            _collect_by_key(name, item, texts)
    elif isinstance(value, list):
        for item in value:
            _collect_by_key(key, item, texts)


def _collect(value: Any, texts: set[str]) -> None:
    if isinstance(value, Interpolated):
        value = value.value
    if isinstance(value, dict):
        for item in value.values():
            _collect(item, texts)
    elif isinstance(value, list):
        for item in value:
            _collect(item, texts)
    elif value is not None and len(text := str(value)) >= _MIN_SECRET_LENGTH:
        texts.add(text)


def _settle(value: Any, texts: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _settle(item, texts) for name, item in value.items()}
    if isinstance(value, list):
        return [_settle(item, texts) for item in value]
    if not isinstance(value, Interpolated):
        return value
    shown = str(value.value)
    return REDACTED if any(text in shown for text in texts) else value.value
