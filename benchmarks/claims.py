"""Trials that many processes share: how fast they are given, and whether each is finished once.

    python benchmarks/claims.py [rate] [campaign] [--quick] [--stores embedded,service,postgres]
                                [--json FILE]

`rate` claims and settles 2,000 trials by one process and by eight, undisturbed. `campaign` has
eight workers of which some are killed (SIGKILL) or stopped beyond their lease, replies that are
lost, clocks an hour apart, and a server that dies, until 2,000 trials are final; then every trial
is held against what the workers have noted. Counts are exact; times are those of a shared machine.
"""

from __future__ import annotations

from typing import Any

from claiming.campaign import run_campaigns
from claiming.rate import measure_rates
from claiming.stores import STORES
from figures import check, make_parser, parse, write

PARTS = {"rate": measure_rates, "campaign": run_campaigns}


def main() -> int:
    parser = make_parser(__doc__, PARTS, quick="a tenth of the trials")
    parser.add_argument("--stores", default=",".join(STORES), help="some of them, by commas")
    arguments = parse(parser)
    stores = arguments.stores.split(",")
    check(parser, stores, STORES)
    figures = {}
    for part in arguments.parts:
        figures[part] = PARTS[part](stores, quick=arguments.quick)
        _print(figures[part])
    write(arguments, figures)
    rows = [row for part in figures.values() for row in part]
    return 1 if any(row["twice"] or row.get("lost") for row in rows) else 0


def _print(rows: list[dict[str, Any]]) -> None:
    """Print the rows of a part, each figure under its name."""
    print()
    for row in rows:
        store, *rest = row.items()
        print(store[1])
        for name, value in rest:
            print(f"    {name:<30} {value:>10,}")


if __name__ == "__main__":
    raise SystemExit(main())
