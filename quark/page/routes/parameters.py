"""The parameters of a request, checked: what is wrong is said by the parameter's name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quark_core.errors import SchemaValidationError

MAX_KEYS = 50
MAX_RUNS = 50
MAX_ENTRIES = 4_000
MAX_ROWS = 200
_MAX_TEXT = 2_000
_LARGEST = 2.0**63
_INTEGER = re.compile(r"[0-9]{1,18}")


class Parameters:
    """What stands behind the `?` of an address.

    Every method raises SchemaValidationError for a value that it cannot take.

    Args:
        pairs: Names and values, in their order.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def get_text(self, name: str, most: int = _MAX_TEXT) -> str | None:
        """A text of at most so many characters, or None where there is none or it is empty."""
        values = self._values.get(name, [])
        if len(values) > 1:
            raise SchemaValidationError(f"{name} can be given only once")
        if not values or not values[0]:
            return None
        if len(values[0]) > most:
            raise SchemaValidationError(f"{name} is longer than {most} characters")
        return values[0]

    def get_texts(self, name: str, most: int) -> list[str]:
        """The texts under a name that may be repeated, each once, in their order."""
        values = list(dict.fromkeys(value for value in self._values.get(name, []) if value))
        if len(values) > most:
            raise SchemaValidationError(f"{name} occurs {len(values)} times; at most {most}")
        for value in values:
            if len(value) > _MAX_TEXT:
                raise SchemaValidationError(f"{name} is longer than {_MAX_TEXT} characters")
        return values

    def get_integer(self, name: str) -> int | None:
        """A whole number that is not negative, or None."""
        text = self.get_text(name)
        if text is None:
            return None
        if not _INTEGER.fullmatch(text):
            raise SchemaValidationError(f"{name} must be a non-negative integer, got {text!r:.40}")
        return int(text)

    def get_number(self, name: str) -> float | None:
        """A finite number that is not negative, or None."""
        text = self.get_text(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < _LARGEST:
            raise SchemaValidationError(f"{name} must be a non-negative number, got {text!r:.40}")
        return number

    def get_bounded(self, name: str, default: int, most: int) -> int:
        """A whole number from 1 to a bound."""
        number = self.get_integer(name)
        if number is None:
            return default
        if not 1 <= number <= most:
            raise SchemaValidationError(f"{name} must be from 1 to {most}, got {number}")
        return number

    def get_flag(self, name: str) -> bool:
        """Whether it is 1."""
        return self.get_word(name, "0", ("0", "1")) == "1"

    def get_word(self, name: str, default: str, words: Sequence[str]) -> str:
        """One of a few words."""
        text = self.get_text(name)
        if text is None:
            return default
        if text not in words:
            raise SchemaValidationError(
                f"{name} must be one of {', '.join(map(repr, words))}, got {text!r:.40}"
            )
        return text
