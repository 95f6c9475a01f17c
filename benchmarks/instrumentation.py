"""What looking inside a network costs: the pass over a tensor, a probed step, a snapshot.

    python benchmarks/instrumentation.py [PART ...] [--device cuda] [--quick] [--json FILE]

Without a part all of them run, on another device than the CPU those that can.
What is compared is measured in turns in one process; A/A is the same thing
twice, and says how far figures move by themselves. Nothing here fails on a
slow machine. The parts lie in the folder `instrumenting` beside this.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instrumenting.devices import why_not_there
from instrumenting.instruments import measure_instruments
from instrumenting.reductions import measure_reductions
from instrumenting.rivals import measure_rivals
from instrumenting.statistics import measure_statistics
from instrumenting.steps import measure_steps

PARTS: dict[str, Callable[..., Any]] = {
    "statistics": measure_statistics,
    "reductions": measure_reductions,
    "steps": measure_steps,
    "rivals": measure_rivals,
    "instruments": measure_instruments,
}
OF_ANY_DEVICE = ("reductions", "steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="What looking inside a network costs.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--device", default="cpu", help="where models and tensors lie, such as cuda"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if reason := why_not_there(arguments.device):
        print(f"instrumentation: skipped on {arguments.device}: {reason}")
        return
    parts = arguments.parts or [*(PARTS if arguments.device == "cpu" else OF_ANY_DEVICE)]
    if arguments.device != "cpu" and (others := [p for p in parts if p not in OF_ANY_DEVICE]):
        parser.error(f"{others[0]} measures the CPU only; choose from {', '.join(OF_ANY_DEVICE)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    figures = {}
    for part in parts:
        options = {"device": arguments.device} if part in OF_ANY_DEVICE else {}
        figures[part] = PARTS[part](quick=arguments.quick, **options)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
