"""What servers that die, hang and lie cost: records lost and doubled, and time.

    python benchmarks/service_faults.py [PART ...] [--quick] [--json FILE]

Each part runs a training that logs to a persistence service through a proxy,
breaks something, mends it, and counts what is in the store afterwards. Counts
are exact; times are those of a shared machine. The parts lie in `serving`.
"""

from __future__ import annotations

from collections.abc import Callable

from figures import make_parser, parse, print_rows, write
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
from serving.tally import Tally

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
    arguments = parse(make_parser(__doc__, PARTS, quick="fewer kills, shorter outages"))
    tallies = [tally for part in arguments.parts for tally in PARTS[part](quick=arguments.quick)]
    print_rows("What was sent, and what is there", [tally.to_dict() for tally in tallies])
    write(arguments, tallies)
    return 1 if any(tally.lost or tally.doubled for tally in tallies) else 0


if __name__ == "__main__":
    raise SystemExit(main())
