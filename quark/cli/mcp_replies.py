"""Replies of `quark mcp`: JSON of a bounded size, which says what was left out of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from quark.cli.store_access import make_finite
from quark_core.system.terminal_text import escape_json

MOST_CHARACTERS = 40_000
"""No reply is longer: whoever asks reads it whole."""

_MOST_NOTES = 20
# Entries of a list or an object, and characters of a text; the next are tried where it is too long.
_SIZES = ((500, 2_000), (200, 1_000), (100, 500), (50, 300), (20, 200), (10, 100), (5, 60), (2, 40))
_DEEPEST = 12


@dataclass(slots=True)
class _Cut:
    """Cuts a value to a size, and notes where."""

    entries: int
    characters: int
    notes: dict[str, str] = field(default_factory=dict)

    def cut(self, value: Any, at: str = "", depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._cut_text(value, at)
        if not isinstance(value, (dict, list, tuple)):
            return value
        if depth >= _DEEPEST and value:
            self._note(at, "nested too deeply")
            return None
        left_out = len(value) - self.entries
        if left_out > 0:
            self._note(at, f"{left_out} of {len(value)} entries")
        if isinstance(value, dict):
            first = list(value.items())[: self.entries]
            return {
                self._cut_text(str(key), at): self.cut(
                    item, f"{at}.{key:.40}" if at else f"{key:.40}", depth + 1
                )
                for key, item in first
            }
        return [self.cut(item, f"{at}[]", depth + 1) for item in value[: self.entries]]

    def _cut_text(self, text: str, at: str) -> str:
        if len(text) <= self.characters:
            return text
        self._note(at, "ends of long texts")
        return f"{text[: self.characters]}... ({len(text) - self.characters} characters more)"

    def _note(self, at: str, said: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes[at or "all"] = said


def fit_reply(value: dict[str, Any], left_out: dict[str, Any] | None = None) -> str:
    """A value as JSON of at most `MOST_CHARACTERS`; `left_out` in it says what is missing.

    Args:
        value: JSON values; what is not finite becomes null.
        left_out: What was left out of it already.
    """
    for entries, characters in _SIZES:
        cutting = _Cut(entries, characters)
        kept = make_finite(cutting.cut(value))
        told = {**(left_out or {}), **cutting.notes}
        text = escape_json(json.dumps({**kept, "left_out": told}, ensure_ascii=False))
        if len(text) <= MOST_CHARACTERS:
            return text
    # Many small objects within each other.
    return json.dumps({"left_out": {"all": "too much for a reply: ask for less at once"}})
