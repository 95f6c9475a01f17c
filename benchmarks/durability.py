"""What a kill, an outage and a full disk cost: points and time lost, and what is there afterwards.

    python benchmarks/durability.py {kill,outage,disk-full,all} [--quick] [--json FILE]

`kill` ends logging processes with SIGKILL and counts, from the journal they
leave, what had been logged and is not there. `outage` takes the primary and two
mirrors away from a training loop. `disk-full` fills the file system under the
journal. Figures of a shared machine move; counts of points do not. Nothing
here fails on a slow machine: it prints. The parts lie in the folder beside this.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from durability.disk_full import measure_full_disk
from durability.kill import measure_kills
from durability.outage import measure_outage

PARTS: dict[str, Callable[..., Any]] = {
    "kill": measure_kills,
    "outage": measure_outage,
    "disk-full": measure_full_disk,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a kill, an outage and a full disk cost.")
    commands = parser.add_subparsers(dest="part", required=True)
    for name in (*PARTS, "all"):
        command = commands.add_parser(name)
        command.add_argument("--quick", action="store_true", help="fewer kills, shorter outages")
        command.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        # Read when numpy is imported: the computation must not take the second core as well.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    wanted = PARTS if arguments.part == "all" else [arguments.part]
    figures = {name: PARTS[name](quick=arguments.quick) for name in wanted}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
