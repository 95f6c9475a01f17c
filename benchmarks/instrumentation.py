"""What looking inside a network costs: the pass over a tensor, a probed step, a snapshot.

    python benchmarks/instrumentation.py [PART ...] [--device cuda] [--quick] [--json FILE]

Without a part all of them run, on another device than the CPU those that can.
What is compared is measured in turns in one process; A/A is the same thing
twice, and says how far figures move by themselves. Nothing here fails on a
slow machine. The parts lie in the folder `instrumenting` beside this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import check, make_parser, parse, write
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
    parser = make_parser(__doc__, PARTS, quick="fewer rounds")
    parser.add_argument(
        "--device", default="cpu", help="where models and tensors lie, such as cuda"
    )
    arguments = parse(parser)
    if reason := why_not_there(arguments.device):
        print(f"instrumentation: skipped on {arguments.device}: {reason}")
        return
    if arguments.device != "cpu" and arguments.parts == [*PARTS]:
        arguments.parts = [*OF_ANY_DEVICE]
    if arguments.device != "cpu":
        check(parser, arguments.parts, OF_ANY_DEVICE)
    figures = {}
    for part in arguments.parts:
        options = {"device": arguments.device} if part in OF_ANY_DEVICE else {}
        figures[part] = PARTS[part](quick=arguments.quick, **options)
    write(arguments, figures)


if __name__ == "__main__":
    main()
