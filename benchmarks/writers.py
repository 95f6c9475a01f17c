"""What telemetry, batch diagnostics and artifacts cost, and what a kill leaves of artifacts.

    python benchmarks/writers.py [PART ...] [--quick] [--json FILE]
    python benchmarks/writers.py steps --device cuda

Without a part all of them run. Figures of a shared machine move; what is
compared is measured in turns in one run, so that ratios hold. Nothing here
fails on a slow machine. The parts lie in the folder `writing` beside this.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instrumenting.devices import why_not_there
from writing.artifacts import measure_large, measure_many
from writing.kills import measure_kills
from writing.samples import measure_samples
from writing.steps import measure_steps

PARTS: dict[str, Callable[..., Any]] = {
    "steps": measure_steps,
    "large": measure_large,
    "many": measure_many,
    "kills": measure_kills,
    "samples": measure_samples,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the writers cost.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cpu", help="where steps compute, such as cuda")
    parser.add_argument("--quick", action="store_true", help="fewer steps, artifacts and kills")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if reason := why_not_there(arguments.device):
        print(f"writers: skipped on {arguments.device}: {reason}")
        return
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    figures = {}
    for part in arguments.parts or list(PARTS):
        options = {"device": arguments.device} if part == "steps" else {}
        figures[part] = PARTS[part](quick=arguments.quick, **options)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
