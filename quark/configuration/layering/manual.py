"""What `manual` prints: the layers that took part, each setting with its origins, what it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quark.configuration.layering.layered_config import LayeredConfig, read_assignments
from quark_core.config.redaction import redact_text, redact_values

if TYPE_CHECKING:
    from quark.configuration.layering.assignments import Assignment
    from quark.configuration.layering.resolving import Resolution

_VALUE_CHARACTERS = 60


def print_manual(resolution: Resolution) -> None:
    """Print how a configuration has come about; a stream that is gone costs nothing."""
    try:
        sys.stdout.write(_tell_resolution(resolution))
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        return


def _tell_resolution(resolution: Resolution) -> str:
    applied = [
        _fit(name if place is None else f"{name} ({place})") for name, place in resolution.applied
    ]
    lines = ["Layers that took part, the last one counts:", f"  {' -> '.join(applied) or 'none'}"]
    if resolution.left_out:
        lines.append(f"Left out: {', '.join(map(_fit, resolution.left_out))}")
    lines += ["", "Settings:"]
    known = read_assignments(resolution.config)
    for key, chain in known.items():
        lines.append(f"  {tell_chain(key, _newest_first(chain))}")
        if key in resolution.texts:
            lines.append(f"      {_fit(resolution.texts[key])}")
    unset = [key for key in resolution.texts if key not in known]
    if unset:
        lines += ["", "Not set:"]
        lines += [f"  {_fit(key)}: {_fit(resolution.texts[key])}" for key in unset]
    return "\n".join([*lines, ""])


def tell_origins(config: LayeredConfig, key: str | None) -> str:
    """Where a setting of a configuration has its value from, those below it, or all of them.

    Raises:
        KeyError: There is no such key.
    """
    known = read_assignments(config)
    if key is not None:
        config[key]
        known = {
            name: each for name, each in known.items() if name == key or name.startswith(f"{key}.")
        }
    return "\n".join(tell_chain(name, _newest_first(chain)) for name, chain in known.items())


def _newest_first(chain: Sequence[Assignment]) -> list[tuple[str, str | None, Any]]:
    return [(each.source, each.place, each.value) for each in reversed(chain)]


def tell_chain(key: str, chain: Sequence[tuple[str, str | None, Any]]) -> str:
    """One setting in a line: its value, what gave it, and what that replaced.

    Args:
        key: The setting.
        chain: Source, place and value, the newest first; of a secret the value is redacted here.
    """
    parts: list[str] = []
    for number, (source, place, value) in enumerate(chain):
        shown = _show(key, value)
        said = source if place is None else f"{source} ({place})"
        parts.append(f"{key} = {shown}  <- {said}" if number == 0 else f"<- {shown} {said}")
    return _fit(redact_text(" ".join(parts)))


def _fit(text: str) -> str:
    """A text in one line in which nothing is hidden, or commands a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _show(key: str, value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        told = redact_values({"key": key, "value": json.loads(text)})["value"]
        text = json.dumps(told, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
        text = str(redact_values({"key": key, "value": text})["value"])
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 3]}..."
