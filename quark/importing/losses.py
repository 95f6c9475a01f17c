"""What an import could not take: counted, by what it was and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

__all__ = ["Loss", "Losses"]

_MOST_NAMES = 200
_OTHERS = "(others)"
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Loss:
    """What was not taken.

    Attributes:
        kind: What it is: metric, image, table …
        name: Its name at the tool.
        reason: Why.
        count: How many of it.
    """

    kind: str
    name: str
    reason: str
    count: int

    def to_dict(self) -> dict[str, str | int]:
        """A new dict of JSON-like values."""
        return asdict(self)


class Losses:
    """Collects what could not be taken, in bounded memory."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, name: str, reason: str, count: int = 1) -> None:
        """So many things of a kind and a name could not be taken, for a reason."""
        key = (kind, name[:_SHOWN], reason[:_SHOWN])
        if key not in self._counts and len(self._counts) >= _MOST_NAMES:
            key = (kind, _OTHERS, reason[:_SHOWN])
            if key not in self._counts and len(self._counts) >= 2 * _MOST_NAMES:
                key = (_OTHERS, _OTHERS, _OTHERS)
        self._counts[key] += count

    def list(self) -> list[Loss]:
        """All of it, in the order in which it was met."""
        return [Loss(*key, count) for key, count in self._counts.items()]
