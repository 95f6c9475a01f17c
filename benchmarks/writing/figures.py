"""How the figures of the writers are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table; a column for each key."""
    print(f"\n{title}")
    names = list(rows[0])
    table = [names] + [[_show(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(names))]
    for line in table:
        cells = zip(line, widths, strict=True)
        print("  " + "  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
