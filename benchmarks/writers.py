"""What telemetry, batch diagnostics and artifacts cost, and what a kill leaves of artifacts.

    python benchmarks/writers.py [PART ...] [--quick] [--json FILE]
    python benchmarks/writers.py steps --device cuda

Without a part all of them run. Figures of a shared machine move; what is
compared is measured in turns in one run, so that ratios hold. Nothing here
fails on a slow machine. The parts lie in the folder `writing` beside this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import make_parser, parse, write
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
    parser = make_parser(__doc__, PARTS, quick="fewer steps, artifacts and kills")
    parser.add_argument("--device", default="cpu", help="where steps compute, such as cuda")
    arguments = parse(parser)
    if reason := why_not_there(arguments.device):
        print(f"writers: skipped on {arguments.device}: {reason}")
        return
    figures = {}
    for part in arguments.parts:
        options = {"device": arguments.device} if part == "steps" else {}
        figures[part] = PARTS[part](quick=arguments.quick, **options)
    write(arguments, figures)


if __name__ == "__main__":
    main()
