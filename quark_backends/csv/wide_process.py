"""Derives metrics.csv in a process of its own: it reads every row, for which training would wait.

python -m quark_backends.csv.wide_process PARENT_PID FOLDER [PUBLISHED]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quark_backends.csv.files import write_atomically
from quark_backends.csv.wide import render_wide_tables
from quark_core.forking import importing
from quark_core.hosting.priority import lower_priority

__all__ = ["derive_aside", "main"]

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
                [sys.executable, "-P", "-m", "quark_backends.csv.wide_process", *arguments],
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
        write_atomically(path, data)
    return 0


if __name__ == "__main__":
    lower_priority()
    raise SystemExit(main(sys.argv[1:]))
