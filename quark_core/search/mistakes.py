"""Messages that point at what is wrong in an expression."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from quark_core.errors import SchemaValidationError
from quark_core.search.expression import Place

__all__ = ["point_at", "suggest_names"]

_WIDTH = 100
_CONTEXT = 60
_SUGGESTIONS = 3


def point_at(place: Place, message: str) -> SchemaValidationError:
    """The error for a mistake: what is wrong, the line, and a mark under the place.

    Args:
        place: Where the mistake is; its column may be one past the end.
        message: What is wrong and what to write instead.
    """
    start = place.text.rfind("\n", 0, place.column - 1) + 1
    end = place.text.find("\n", start)
    line = place.text[start:] if end < 0 else place.text[start:end]
    offset = place.column - 1 - start
    where = f"column {offset + 1}"
    if "\n" in place.text:
        number = place.text.count("\n", 0, start) + 1
        where = f"line {number}, {where}"
    line = "".join(" " if c.isspace() or not c.isprintable() else c for c in line)
    length = max(1, min(place.length, len(line) - offset))
    if len(line) > _WIDTH:
        first = max(0, offset - _CONTEXT)
        last = min(len(line), offset + _CONTEXT)
        head, tail = "… " if first else "", " …" if last < len(line) else ""
        line = f"{head}{line[first:last]}{tail}"
        offset += len(head) - first
        length = min(length, _CONTEXT)
    mark = " " * _measure(line[:offset]) + "^" * max(1, _measure(line[offset : offset + length]))
    return SchemaValidationError(f"{place.argument}, {where}: {message}\n  {line}\n  {mark}")


def suggest_names(name: str, known: Iterable[str]) -> list[str]:
    """The names nearest to one that does not exist, best first; none where none is near."""
    import difflib

    names = list(dict.fromkeys(known))
    folded: dict[str, str] = {}
    for candidate in names:
        folded.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(name.lower(), folded, _SUGGESTIONS, cutoff=0.6)
    found = [folded[candidate] for candidate in near]
    # `loss` is not near to `validation/loss` by its letters, but it is what people mean.
    tail = name.lower().rpartition("/")[2].rpartition(".")[2]
    found += [
        candidate
        for candidate in names
        if candidate.lower().replace(".", "/").rpartition("/")[2] == tail
    ]
    return list(dict.fromkeys(found))[:_SUGGESTIONS]


def _measure(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
