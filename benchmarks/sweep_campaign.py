"""A sweep of 200 real small trainings, killed and resumed by all means: has it the same best?

    python benchmarks/sweep_campaign.py [--stores embedded,service] [--workers N] [--quick]
                                        [--json FILE]

The same sweep (same seeds) runs twice: undisturbed, and while workers get SIGKILL, SIGTERM, Ctrl-C
and SIGSTOP beyond their lease, all of them die at once, trainings raise, the sweep is paused and
resumed, and the server dies. Trainings go on from the checkpoint of the earlier run of their
trial. Then each trial's value is held against the undisturbed one, to the bit.
"""

from __future__ import annotations

import os

from figures import make_parser, parse, write

os.environ.setdefault("QUARK_QUIET", "1")


def main() -> int:
    parser = make_parser(__doc__, quick="a tenth of the trials")
    parser.add_argument("--stores", default="embedded,service", help="of embedded, service")
    parser.add_argument("--workers", type=int, default=4, help="at a time")
    parser.add_argument("--every-s", type=float, default=3.0, help="from fault to fault")
    arguments = parse(parser)
    from sweeping.campaign import run_campaigns

    searches = {"random": 20, "halving": 9} if arguments.quick else {"random": 200, "halving": 27}
    rows = run_campaigns(
        searches,
        arguments.stores.split(","),
        workers=arguments.workers,
        every_s=arguments.every_s,
    )
    for row in rows:
        print()
        for name, value in row.items():
            print(f"{name:<40} {value}")
    write(arguments, {"sweeps": rows})
    return 1 if any(row["lost"] or row["twice"] or not row["same best"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
