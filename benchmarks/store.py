"""What the store costs and gives: ingest, reading, disk, runs, pages, kills, growth.

    python benchmarks/store.py [PART ...] [--quick] [--json FILE]

Without a part all of them run. Figures of a shared machine move; what is
compared is measured in turns in one run, so that ratios hold. Nothing here
fails on a slow machine: each figure stands beside its goal, met or missed.
The parts lie in the folder `storage` beside this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import run_parts
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
    run_parts(__doc__, PARTS, quick="fewer points, runs and kills")


if __name__ == "__main__":
    main()
