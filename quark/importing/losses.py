"""What an import could not take: counted, by what it was and why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

_MOST_NAMES = 200
_OTHERS = "(others)"
_SHOWN = 200
# From here on float64 has not every integer.
_ROUNDED_FROM = 2.0**53


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

    def read_number(self, kind: str, name: str, given: Any) -> float:
        """A number of a tool, or its text, as a float64; what that cannot hold of it is told.

        One beyond it becomes an infinity, and an integer above 2**53 is rounded.

        Raises:
            TypeError, ValueError: It is no number.
        """
        try:
            number = float(given)
        except OverflowError:
            number = math.inf if given > 0 else -math.inf
        if math.isinf(number):
            if isinstance(given, int) or (isinstance(given, str) and "n" not in given.lower()):
                self.add(kind, name, "it is beyond float64, and kept as an infinity")
        elif abs(number) >= _ROUNDED_FROM and _find_integer(given) not in (None, int(number)):
            self.add(kind, name, "an integer above 2**53, which is rounded to a float64")
        return number

    def list(self) -> list[Loss]:
        """All of it, in the order in which it was met."""
        return [Loss(*key, count) for key, count in self._counts.items()]


def _find_integer(given: Any) -> int | None:
    """The integer that a number or a text is; None of one with a point or an exponent."""
    if isinstance(given, float):
        return None
    try:
        return int(given)
    except ValueError:
        return None
