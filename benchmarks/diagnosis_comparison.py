"""How often a comparison of runs is right, and what it costs.

    python benchmarks/diagnosis_comparison.py [PART ...] [--quick] [--json FILE]

`pairs`: single runs of one configuration, where every better or worse is
false. `groups`: five seeds against five, as they are and with a true shift of
two standard deviations between seeds. `size`: two runs of a million points.
The networks are really trained; the parts lie in the folder `comparing`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparing.rates import measure_groups, measure_pairs
from comparing.size import measure_sizes

PARTS: dict[str, Callable[..., Any]] = {
    "pairs": measure_pairs,
    "groups": measure_groups,
    "size": measure_sizes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="How often a comparison of runs is right.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer seeds, draws and points")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    figures = {}
    for part in arguments.parts or list(PARTS):
        figures[part] = PARTS[part](quick=arguments.quick)
        print(f"\n({part}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
