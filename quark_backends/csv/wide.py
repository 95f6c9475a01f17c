"""metrics.csv: one row per step, one column per metric, derived from the long table."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from quark_backends.csv.files import write_atomically
from quark_backends.csv.reader import read_in_order

__all__ = ["write_wide_table"]


def write_wide_table(folder: Path) -> None:
    """Replace metrics.csv, whole.

    A row stands for a step, or for an epoch where values have no step. Where
    a metric was logged several times at a step, the newest value stands.
    """
    cells: dict[tuple[int, int], dict[str, str]] = {}
    epochs: dict[tuple[int, int], str] = {}
    keys: dict[str, None] = {}
    for row in read_in_order(folder, "metrics_long"):
        position = (0, int(row["step"])) if row["step"] else (1, int(row["epoch"]))
        cells.setdefault(position, {})[row["key"]] = row["value"]
        if row["epoch"]:
            epochs[position] = row["epoch"]
        keys[row["key"]] = None
    names = sorted(keys)
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["step", "epoch", *names])
    for position in sorted(cells):
        values = cells[position]
        step = position[1] if position[0] == 0 else ""
        writer.writerow([step, epochs.get(position, ""), *(values.get(n, "") for n in names)])
    write_atomically(folder / "metrics.csv", buffer.getvalue().encode())
