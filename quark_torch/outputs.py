"""Finds the tensors in what a module gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["find_tensors"]

_MAX_DEPTH = 6
_MAX_TENSORS = 64
_MAX_VISITS = 1024


def find_tensors(output: object, *, every: bool) -> list[tuple[str | None, Tensor]]:
    """Tensors of an output, with where they are in it, such as `1.0` or `logits`.

    Tuples, lists, mappings, dataclasses and packed sequences are searched,
    six levels deep. At most 64 tensors are found.

    Args:
        output: What a module's forward returned.
        every: All of them; otherwise only the primary one, which is the first
            of floating point or complex numbers, or else the first.
    """
    if isinstance(output, Tensor):
        return [(None, output)]
    first: tuple[str | None, Tensor] | None = None
    found: list[tuple[str | None, Tensor]] = []
    for place in _walk(output):
        if every:
            found.append(place)
            if len(found) == _MAX_TENSORS:
                break
        elif place[1].dtype.is_floating_point or place[1].dtype.is_complex:
            return [place]
        elif first is None:
            first = place
    return [first] if first is not None else found


def _walk(output: object) -> Iterator[tuple[str | None, Tensor]]:
    # With a list of its own instead of recursion: outputs may be deep, or hold themselves.
    waiting: list[tuple[str, object, int]] = [("", output, 0)]
    for _ in range(_MAX_VISITS):
        if not waiting:
            return
        path, value, depth = waiting.pop()
        if isinstance(value, Tensor):
            yield path or None, value
        elif depth < _MAX_DEPTH:
            prefix = f"{path}." if path else ""
            items = [(f"{prefix}{key}", item, depth + 1) for key, item in _list_items(value)]
            waiting += reversed(items)


def _list_items(value: Any) -> list[tuple[object, object]]:
    if isinstance(value, (str, bytes)):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if type(value).__name__ == "PackedSequence":
        return [("data", value.data)]
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
        ]
    return []
