"""What looking inside a network costs: the pass over a tensor, a probed step, a snapshot.

    python benchmarks/instrumentation.py [PART ...] [--quick] [--json FILE]

Without a part all of them run. What is compared is measured in turns in one
process; A/A is the same thing twice, and says how far figures move by
themselves. Nothing here fails on a slow machine. The parts lie in the folder
`instrumenting` beside this.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instrumenting.rivals import measure_rivals
from instrumenting.statistics import measure_statistics
from instrumenting.steps import measure_steps

PARTS: dict[str, Callable[..., Any]] = {
    "statistics": measure_statistics,
    "steps": measure_steps,
    "rivals": measure_rivals,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What looking inside a network costs.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    figures = {part: PARTS[part](quick=arguments.quick) for part in arguments.parts or list(PARTS)}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
