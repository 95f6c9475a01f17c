"""Search the settings of a small network for handwritten digits, and ask whether the best is best.

    python examples/sweep_digits.py [--storage-dir DIR] [--trials 8]

Start it in several terminals at once, and they share the trials; Ctrl-C gives a trial back.
`quark sweep show digits` and `quark ui` show the sweep, also while it runs. Needs NumPy and
scikit-learn, whose digits need no download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import quark

EPOCHS = 9
BATCH = 50
TRAINING = 1200  # images; the other 597 are held out


def train(trial: quark.Trial, session: quark.TrainingSession) -> None:
    """Train one network of one hidden layer by the trial's settings; it may be stopped early."""
    rng = np.random.default_rng(trial["seed"])
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    first = rng.normal(size=(64, trial["width"])) * np.sqrt(2 / 64)
    second = rng.normal(size=(trial["width"], 10)) * np.sqrt(2 / trial["width"])
    metrics = quark.MetricsLogger(session)
    for epoch in range(1, EPOCHS + 1):
        for batch in rng.permutation(TRAINING).reshape(-1, BATCH):
            hidden = np.maximum(images[batch] @ first, 0)
            scores = hidden @ second
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            chances /= chances.sum(axis=1, keepdims=True)
            error = (chances - np.eye(10)[labels[batch]]) / BATCH
            back = (error @ second.T) * (hidden > 0)
            second -= trial["lr"] * hidden.T @ error
            first -= trial["lr"] * images[batch].T @ back
        guesses = (np.maximum(images[TRAINING:] @ first, 0) @ second).argmax(axis=1)
        metrics.log("val/accuracy", float((guesses == labels[TRAINING:]).mean()), step=epoch)
        if trial.should_stop():
            break


def main() -> None:
    parser = argparse.ArgumentParser(description="Search settings for handwritten digits.")
    parser.add_argument("--storage-dir", type=Path, default=None, metavar="DIR")
    parser.add_argument("--trials", type=int, default=8)
    arguments = parser.parse_args()
    sweep = quark.sweep(
        "digits",
        project="digits",
        space={
            "lr": quark.uniform(1e-3, 3.0, log=True),
            "width": quark.integers(4, 64, log=True),
            "seed": 0,
        },
        metric="val/accuracy",
        mode="max",
        search="asha",  # stops at rungs what is not among the best third so far
        budget=EPOCHS,
        trials=arguments.trials,
        storage_dir=arguments.storage_dir,
    )
    with sweep:
        print("best:", sweep.run(train))
        for verdict in sweep.verdicts:
            print(f"{verdict.headline}. {verdict.reason} {verdict.advice}")


if __name__ == "__main__":
    main()
