"""Thresholds that know which of them the caller has passed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Self

from quark_core.errors import SchemaValidationError

__all__ = ["NotedThresholds"]


@dataclass(frozen=True)
class NotedThresholds:
    """Base of frozen dataclasses of numbers, whose defaults are only a scale.

    Raises:
        SchemaValidationError: A field that is no finite number of 0 or more, or
            no whole one where it counts something.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Note which fields are passed."""
        made = super().__new__(cls)
        names = [item.name for item in fields(cls)]
        object.__setattr__(made, "_passed", frozenset(names[: len(args)]) | set(values))
        return made

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SchemaValidationError(
                    f"{item.name} must be a number, not {type(value).__name__}"
                )
            if not isfinite(value) or value < 0:
                raise SchemaValidationError(
                    f"{item.name} must be finite and not negative, got {value!r}"
                )
            if item.type == "int" and value != int(value):
                raise SchemaValidationError(f"{item.name} must be a whole number, got {value!r}")

    @property
    def passed(self) -> frozenset[str]:
        """Names of the fields that were passed, which hold as they are.

        Where all of them were, as by `dataclasses.replace`, those that differ
        from the default.
        """
        passed: frozenset[str] = getattr(self, "_passed", frozenset())
        if len(passed) < len(fields(self)):
            return passed
        return frozenset(
            item.name for item in fields(self) if getattr(self, item.name) != item.default
        )
