"""What the persistence service takes and gives, beside an MLflow server.

    python benchmarks/service.py [ingest|reading|idle ...] [--quick] [--json FILE]

Servers run on this machine and share its cores with their clients: on SQLite,
and on a PostgreSQL of their own. Figures of a shared machine move; what is
compared is measured in turns in one run, so that ratios hold. Nothing here
fails on a slow machine: each figure stands beside its goal, met or missed.
The parts lie in the folder `serving` beside this.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.idle import measure_idle
from serving.ingest import measure_ingest
from serving.reading import measure_reading

PARTS: dict[str, Callable[..., Any]] = {
    "ingest": measure_ingest,
    "reading": measure_reading,
    "idle": measure_idle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the persistence service takes and gives.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rows and clients")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    if arguments.quick:
        print("This is the short form: the goals are meant for the full one.")
    figures = {}
    for part in arguments.parts or list(PARTS):
        figures[part] = PARTS[part](quick=arguments.quick)
        # More than one or two means that others ran beside and the times are too long.
        print(f"\n({part}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
