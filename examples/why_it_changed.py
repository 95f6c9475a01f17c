"""Change a training in three ways, and say each time why its result changed, or that it did not.

    python examples/why_it_changed.py [--storage-dir DIR]

Fits a line to points with five seeds, so that it is known what chance does, and then
with another seed, with another learning rate, and with points whose targets are wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import quark

STEPS = 100
WEIGHTS = np.array([1.0, -2.0, 0.5])


def make_points(wrong: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points and their targets, of which the first `wrong` have the wrong sign."""
    rng = np.random.default_rng(7)
    points = rng.normal(size=(300, 3))
    targets = points @ WEIGHTS + 0.1 * rng.normal(size=300)
    targets[:wrong] *= -1
    return points, targets


def train(storage_dir: Path | None, *, seed: int, rate: float = 0.05, wrong: int = 0) -> str:
    """One run; its id."""
    rng = np.random.default_rng(seed)
    points, targets = make_points(wrong)
    held_points, held_targets = make_points()
    weights = rng.normal(size=3)
    with quark.start_run(
        project="why",
        config={"rate": rate, "seed": seed},
        group="examples/why",
        storage_dir=storage_dir,
    ) as session:
        session.fingerprint_data("points", {"points": points, "targets": targets}, level="full")
        metrics = quark.MetricsLogger(session)
        for step in range(STEPS):
            chosen = rng.integers(0, 300, 32)
            error = points[chosen] @ weights - targets[chosen]
            weights -= rate * points[chosen].T @ error / 32
            held = float(((held_points @ weights - held_targets) ** 2).mean())
            metrics.log_many({"train/loss": float((error**2).mean()), "val/loss": held}, step=step)
    return str(session.run_id)


def main() -> None:
    parser = argparse.ArgumentParser(description="Say why a result changed.")
    parser.add_argument("--storage-dir", type=Path, default=None, metavar="DIR")
    storage_dir = parser.parse_args().storage_dir
    first, *_ = [train(storage_dir, seed=seed) for seed in range(5)]
    changes = {
        "another seed": train(storage_dir, seed=5),
        "another learning rate": train(storage_dir, seed=0, rate=0.001),
        "wrong targets": train(storage_dir, seed=0, wrong=100),
    }
    for said, run_id in changes.items():
        answer = quark.explain_change(first, run_id, "val/loss", storage_dir=storage_dir)
        print(f"--- {said}: {answer.verdict}")
        print(answer)


if __name__ == "__main__":
    main()
