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

import argparse
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirroring.cost import measure_cost, print_cost
from mirroring.points import kill_training, log_everywhere
from mirroring.tally import Tally, print_tallies
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
    print_cost(rows)
    return rows


PARTS: dict[str, Callable[..., list[Any]]] = {
    "points": count_points,
    "kills": count_kills,
    "cost": weigh_cost,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What five backends have, and what they cost.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer steps, kills and rounds")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    logging.getLogger("quark").setLevel(logging.CRITICAL)
    figures: dict[str, list[Any]] = {}
    with MlflowServer() as server:
        for part in arguments.parts or list(PARTS):
            figures[part] = PARTS[part](server.uri, quick=arguments.quick)
    tallies = [each for rows in figures.values() for each in rows if isinstance(each, Tally)]
    if arguments.json:
        found = {
            part: [row.to_dict() if isinstance(row, Tally) else row for row in rows]
            for part, rows in figures.items()
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(tally.is_right for tally in tallies) else 1


def _told(tallies: list[Tally]) -> list[Tally]:
    print_tallies(tallies)
    return tallies


if __name__ == "__main__":
    raise SystemExit(main())
