"""metrics.csv: one row per step, one column per metric, derived from the long table.

    python -m quark_backends.csv.wide_table PARENT_PID FOLDER [PUBLISHED]

derives it in a process of its own: it reads every row, for which training would wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quark_backends.csv.files import encode_rows, read_in_order
from quark_backends.mirror_state import replace_file
from quark_core.api import decode_name, importing, lower_priority

_AXES = ("step", "epoch")


def write_wide_tables(folder: Path, published: Path | None = None) -> None:
    """Replace metrics.csv of a run's folder, whole, and that of the published folder.

    Raises:
        OSError: A file cannot be read or written.
    """
    for path, data in render_wide_tables(folder, published):
        replace_file(path, data, is_synced=True)


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


_TIMEOUT_S = 300.0


def derive_aside(folder: Path, published: Path | None = None) -> bool:
    """As `write_wide_tables`, in another process; whether that has gone well."""
    arguments = [str(os.getpid()), str(folder), *([] if published is None else [str(published)])]
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        with importing():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quark_backends.csv.wide_table", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        return process.wait(_TIMEOUT_S) == 0
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def main(arguments: list[str]) -> int:
    """Derive the tables, unless who asked for them is gone; returns the exit status."""
    parent, folder, *published = arguments
    rendered = render_wide_tables(Path(folder), Path(published[0]) if published else None)
    if os.getppid() != int(parent):
        # Its successor may have derived newer ones meanwhile.
        return 1
    for path, data in rendered:
        replace_file(path, data, is_synced=True)
    return 0


if __name__ == "__main__":
    lower_priority()
    raise SystemExit(main(sys.argv[1:]))
