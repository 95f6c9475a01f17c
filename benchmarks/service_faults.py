"""What servers that die, hang and lie cost: records lost and doubled, and time.

    python benchmarks/service_faults.py [PART ...] [--quick] [--json FILE]

Each part runs a training that logs to a persistence service through a proxy,
breaks something, mends it, and counts what is in the store afterwards. Counts
are exact; times are those of a shared machine. The parts lie in `serving`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.breaking import (
    break_network,
    kill_postgres,
    kill_server,
    lose_replies,
    revoke_key,
    send_other_bytes,
)
from serving.crowd import list_many_runs, sync_many_journals
from serving.outage import measure_outage
from serving.tally import Tally, print_tallies

PARTS: dict[str, Callable[..., list[Tally]]] = {
    "kill": kill_server,
    "postgres": kill_postgres,
    "network": break_network,
    "replies": lose_replies,
    "bytes": send_other_bytes,
    "key": revoke_key,
    "runs": list_many_runs,
    "journals": sync_many_journals,
    "outage": measure_outage,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What servers that die, hang and lie cost.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer kills, shorter outages")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    tallies: list[Tally] = []
    for part in arguments.parts or list(PARTS):
        tallies += PARTS[part](quick=arguments.quick)
    print_tallies(tallies)
    if arguments.json:
        found: list[Any] = [tally.to_dict() for tally in tallies]
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if any(tally.lost or tally.doubled for tally in tallies) else 0


if __name__ == "__main__":
    raise SystemExit(main())
