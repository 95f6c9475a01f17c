"""metrics.csv: one row per step, one column per metric, derived from the long table."""

from __future__ import annotations

from pathlib import Path

from quark_backends.csv.files import encode_rows, write_atomically
from quark_backends.csv.reader import read_in_order
from quark_core.names import decode_name

__all__ = ["render_wide_tables", "write_wide_tables"]

_AXES = ("step", "epoch")


def write_wide_tables(folder: Path, published: Path | None = None) -> None:
    """Replace metrics.csv of a run's folder, whole, and that of the published folder.

    Raises:
        OSError: A file cannot be read or written.
    """
    for path, data in render_wide_tables(folder, published):
        write_atomically(path, data)


def render_wide_tables(folder: Path, published: Path | None = None) -> list[tuple[Path, bytes]]:
    """The path and content of metrics.csv in each place where it is wanted.

    A row stands for a step, or for an epoch where values have no step. Where
    a metric was logged several times at a step, the newest value stands.
    Metrics named step or epoch have no column of their own: the axis does.

    Args:
        folder: The run's folder in the mirror; metrics are sorted by name.
        published: Where people want it too, with metrics in the order in which
            they first appeared, under the names that they were logged by, and
            without a column of epochs where there is none.

    Raises:
        OSError: A file cannot be read.
    """
    cells: dict[tuple[int, int], dict[str, str]] = {}
    epochs: dict[tuple[int, int], str] = {}
    keys: dict[str, None] = {}
    for row in read_in_order(folder, "metrics_long"):
        if not row["step"] and not row["epoch"]:
            # No session lets one through; it has no place in a table of steps.
            continue
        position = (0, int(row["step"])) if row["step"] else (1, int(row["epoch"]))
        cells.setdefault(position, {})[row["key"]] = row["value"]
        if row["epoch"]:
            epochs[position] = row["epoch"]
        keys[row["key"]] = None

    def render(names: list[str], *, epoch: bool, shown: list[str]) -> bytes:
        rows: list[list[object]] = [["step", *(["epoch"] if epoch else []), *shown]]
        for position in sorted(cells):
            values = cells[position]
            step = position[1] if position[0] == 0 else values.get("step", "")
            axes = [step, *([epochs.get(position) or values.get("epoch", "")] if epoch else [])]
            rows.append([*axes, *(values.get(name, "") for name in names)])
        return encode_rows(rows)

    names = [key for key in keys if key not in _AXES]
    ordered = sorted(names)
    rendered = [(folder / "metrics.csv", render(ordered, epoch=True, shown=ordered))]
    if published is not None:
        shown = [decode_name(name) for name in names]
        has_epochs = bool(epochs) or "epoch" in keys
        rendered.append((published / "metrics.csv", render(names, epoch=has_epochs, shown=shown)))
    return rendered
