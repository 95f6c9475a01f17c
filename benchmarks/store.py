"""What the store costs and gives: ingest, reading, disk, runs, pages, kills, growth.

    python benchmarks/store.py [PART ...] [--quick] [--json FILE]

Without a part all of them run. Figures of a shared machine move; what is
compared is measured in turns in one run, so that ratios hold. Nothing here
fails on a slow machine: each figure stands beside its goal, met or missed.
The parts lie in the folder `storage` beside this.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.backlog import measure_backlog
from storage.disk import measure_disk
from storage.growth import measure_growth
from storage.ingest import measure_ingest
from storage.kills import measure_kills
from storage.layers import measure_layers
from storage.page_reads import measure_page_reads
from storage.run_list import measure_run_list
from storage.series import measure_series
from storage.similar_runs import measure_similar_runs

PARTS: dict[str, Callable[..., Any]] = {
    "ingest": measure_ingest,
    "series": measure_series,
    "disk": measure_disk,
    "runs": measure_run_list,
    "similar": measure_similar_runs,
    "layers": measure_layers,
    "backlog": measure_backlog,
    "page": measure_page_reads,
    "kills": measure_kills,
    "growth": measure_growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the store costs and gives.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer points, runs and kills")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    wanted = arguments.parts or list(PARTS)
    if arguments.quick:
        print("This is the short form: the goals are meant for the full one.")
    figures = {}
    for part in wanted:
        figures[part] = PARTS[part](quick=arguments.quick)
        # More than one or two means that others ran beside and the times are too long.
        print(f"\n({part}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
