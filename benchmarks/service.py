"""What the persistence service takes and gives, beside an MLflow server.

    python benchmarks/service.py [ingest|reading|idle ...] [--quick] [--json FILE]

Servers run on this machine and share its cores with their clients: on SQLite,
and on a PostgreSQL of their own. Figures of a shared machine move; what is
compared is measured in turns in one run, so that ratios hold. Nothing here
fails on a slow machine: each figure stands beside its goal, met or missed.
The parts lie in the folder `serving` beside this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import run_parts
from serving.idle import measure_idle
from serving.ingest import measure_ingest
from serving.reading import measure_reading

PARTS: dict[str, Callable[..., Any]] = {
    "ingest": measure_ingest,
    "reading": measure_reading,
    "idle": measure_idle,
}


def main() -> None:
    run_parts(__doc__, PARTS, quick="fewer rows and clients")


if __name__ == "__main__":
    main()
