"""How long `quark why` takes in a store of many runs.

    python benchmarks/why.py [--runs 1000]

Runs of one project with 40 settings, two metrics of 20 points and a whole environment, made by
this script. The command is measured in a process of its own, imports counted, with the modules
compiled as those of an installed package are, and the call alone in this one. A busy machine
lengthens the time that passes, so the processor's time is shown beside it. Nothing here fails on a
slow machine: it prints.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import quark

GOAL_S = 2.0
SETTINGS = 40
STEPS = 20
REPEATS = 3


def make_runs(root: Path, runs: int) -> list[str]:
    """A project whose accuracy depends on two of its settings."""
    draw = random.Random(0)
    ids = []
    for number in range(runs):
        config = {f"group{key % 4}": {f"key{key}": draw.choice((1, 2, 4))} for key in range(4)}
        config |= {f"setting{key}": draw.choice((0.1, 0.01)) for key in range(SETTINGS - 4)}
        config["seed"] = number % 5
        end = 0.9 - 0.05 * (config["setting0"] == 0.1) + draw.gauss(0, 0.003)
        session = quark.start_run(project="many", storage_dir=root, config=config)
        metrics = quark.MetricsLogger(session)
        for step in range(STEPS):
            metrics.log("val/acc", end * (1 - 0.7 ** (step + 1)), step=step)
            metrics.log("train/loss", 1 / (step + 1) + draw.gauss(0, 0.01), step=step)
        session.end_run()
        ids.append(str(session.run_id))
    return ids


def measure_command(command: list[str], compiled: Path) -> tuple[float, float]:
    """Seconds that passed, and those of the processor."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    taken_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken_s, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000)
    options = parser.parse_args()
    os.environ.update(QUARK_QUIET="1", QUARK_CAPTURE="none", QUARK_SYSTEM_METRICS="0")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ids = make_runs(root, options.runs)
        command = [sys.executable, "-m", "quark", "why", ids[0], ids[-1], "-d", name]
        # The first call compiles.
        for number in range(REPEATS + 1):
            taken_s, processor_s = measure_command(command, root / "compiled")
            if number:
                print(
                    f"quark why, {options.runs} runs: {taken_s:.2f} s (goal {GOAL_S:g} s), "
                    f"processor {processor_s:.2f} s"
                )
        for _ in range(REPEATS):
            begin = time.perf_counter()
            found = quark.explain_change(ids[0], ids[-1], storage_dir=root)
            taken_s = time.perf_counter() - begin
            print(f"explain_change: {taken_s:.2f} s, {found!r}")


if __name__ == "__main__":
    main()
