"""What people give to a tracker, as what a run takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quark_core.config.redaction import cut_text
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import normalize_json
from quark_core.records.names import MAX_NAME_LENGTH, encode_name
from quark_core.writers.scalars import to_float

_MAX_TEXT = 10_000
_MAX_DEPTH = 16


def split_values(metrics: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Part a row into numbers and the rest.

    Truth values are 0 and 1, arrays of one element that element; what stands
    in a mapping has its name before it, with a slash. A number whose name no
    store could hold is among the rest.

    Returns:
        Name -> number, and name -> JSON value of everything else.
    """
    numbers: dict[str, float] = {}
    others: dict[str, Any] = {}
    _split(metrics, "", numbers, others, 0)
    return numbers, others


def snapshot_values(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """A row for another thread: numbers of arrays and tensors are read now, the rest stays."""
    row: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = type(value) in (float, int, bool, str) or not hasattr(value, "item")
        number = None if plain else _find_number(value)
        row[name] = value if number is None else number
    return row


def settle_table(
    columns: Sequence[Any], data: Iterable[Iterable[Any]]
) -> tuple[list[str], list[list[Any]]]:
    """A table that a run takes: names that differ, rows of one length, JSON values.

    A name that repeats has a number behind it; a row that is too short is
    filled with None, and columns are added for one that is too long. What is
    no JSON value becomes its text.
    """
    rows = [[_settle(value) for value in row] for row in data]
    names: list[str] = []
    width = max([len(columns), *map(len, rows)])
    for place in range(width):
        name = str(columns[place]) if place < len(columns) else f"column_{place}"
        names.append(name if name not in names else f"{name}.{place}")
    return names, [row + [None] * (width - len(row)) for row in rows]


def _split(
    metrics: Mapping[Any, Any],
    prefix: str,
    numbers: dict[str, float],
    others: dict[str, Any],
    depth: int,
) -> None:
    for given, value in metrics.items():
        name = f"{prefix}{given}"
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            _split(value, f"{name}/", numbers, others, depth + 1)
            continue
        number = _find_number(value)
        longest = max(len(name), len(encode_name(name)))
        if number is None or not name.strip("/ \t\r\n") or longest > MAX_NAME_LENGTH:
            others[name] = _settle(value)
        else:
            numbers[name] = number


def _find_number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)) or value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    try:
        return to_float(value, "value", "tracker.log")
    except SchemaValidationError:
        pass
    try:
        # An array of one element; numpy's own truth values.
        item = value.item()
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return None
    return float(item) if isinstance(item, (bool, int, float)) else None


def _settle(value: Any) -> Any:
    try:
        settled = normalize_json(value, "value")
    except Exception:  # noqa: BLE001 - as above
        settled = _spell(value)
    return cut_text(settled, _MAX_TEXT) if isinstance(settled, str) else settled


def _spell(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - as above
        return f"<{type(value).__name__}>"
