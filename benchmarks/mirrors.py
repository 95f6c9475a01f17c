"""Five backends at once: what each has in the end, and what they cost the training thread.

    python benchmarks/mirrors.py [PART ...] [--quick] [--json FILE]

One training logs to the embedded store, MLflow (a server of its own on this
machine), W&B (offline), CSV and TensorBoard, and every point is read back by
each tool's own reader: `points` without a fault, `kills` with SIGKILL on the
way, each followed by `resume_run`. `cost` compares steps with one backend and
with five, and with MLflow and W&B themselves. Counts are exact; times are
those of a shared machine. The parts lie in `mirroring`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from figures import make_parser, parse, print_rows, write
from mirroring.cost import measure_cost
from mirroring.points import kill_training, log_everywhere
from mirroring.tally import Tally
from serving.mlflow_server import MlflowServer


def count_points(uri: str, *, quick: bool) -> list[Tally]:
    """One training without a fault."""
    return _told(log_everywhere(uri, steps=200 if quick else 5000))


def count_kills(uri: str, *, quick: bool) -> list[Tally]:
    """Trainings that are killed at random moments and resumed."""
    chance = random.Random(5)
    tallies = []
    for _ in range(1 if quick else 4):
        # Of a short training so much is left that it cannot be over before it is killed.
        latest = 0.6 if quick else 0.95
        shares = sorted(chance.uniform(0.05, latest) for _ in range(1 if quick else 5))
        steps = 600 if quick else 5000
        tallies += kill_training(uri, steps=steps, kills=shares, pause_s=0.002)
    return _told(tallies)


def weigh_cost(uri: str, *, quick: bool) -> list[dict[str, Any]]:
    """Time of steps and of calls."""
    rows = measure_cost(uri, quick=quick)
    print_rows("Steps that log 8 metrics, in turns; ratios are medians over the rounds", rows)
    return rows


PARTS: dict[str, Callable[..., list[Any]]] = {
    "points": count_points,
    "kills": count_kills,
    "cost": weigh_cost,
}


def main() -> int:
    arguments = parse(make_parser(__doc__, PARTS, quick="fewer steps, kills and rounds"))
    figures: dict[str, list[Any]] = {}
    with MlflowServer() as server:
        for part in arguments.parts:
            figures[part] = PARTS[part](server.uri, quick=arguments.quick)
    write(arguments, figures)
    tallies = [each for rows in figures.values() for each in rows if isinstance(each, Tally)]
    return 0 if all(tally.is_right for tally in tallies) else 1


def _told(tallies: list[Tally]) -> list[Tally]:
    print_rows("What each backend has", [tally.to_dict() for tally in tallies])
    return tallies


if __name__ == "__main__":
    raise SystemExit(main())
