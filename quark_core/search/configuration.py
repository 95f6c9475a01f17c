"""A configuration as it is searched: one value per dotted key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flatten_values"]


def flatten_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key and value of each leaf; lists and empty mappings are leaves.

    Keys of nested mappings are joined by a dot. An integer beyond what a
    float can hold becomes a text.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten_values(value, f"{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            try:
                yield key, float(value)
            except OverflowError:
                yield key, str(value)
        else:
            yield key, value
