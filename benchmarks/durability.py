"""What a kill, an outage and a full disk cost: points and time lost, and what is there afterwards.

    python benchmarks/durability.py [PART ...] [--quick] [--json FILE]

`kill` ends logging processes with SIGKILL and counts, from the journal they
leave, what had been logged and is not there. `outage` takes the primary and two
mirrors away from a training loop. `disk-full` fills the file system under the
journal. Figures of a shared machine move; counts of points do not. Nothing
here fails on a slow machine: it prints. The parts lie in the folder beside this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from durability.disk_full import measure_full_disk
from durability.kill import measure_kills
from durability.outage import measure_outage
from figures import run_parts

PARTS: dict[str, Callable[..., Any]] = {
    "kill": measure_kills,
    "outage": measure_outage,
    "disk-full": measure_full_disk,
}


def main() -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        # Read when numpy is imported: the computation must not take the second core as well.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    run_parts(__doc__, PARTS, quick="fewer kills, shorter outages")


if __name__ == "__main__":
    main()
