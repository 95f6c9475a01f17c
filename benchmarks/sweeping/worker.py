"""One worker of the campaign: a process that trains what the sweep gives it.

    python -m sweeping.worker FOLDER SWEEP

A file `raise` in the folder makes it raise at the end of its next epoch, once.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import quark
from sweeping.digits import EPOCHS, DigitsTraining, load_digits

PROJECT = "digits"


def main() -> None:
    """Train one trial after the other, until there are none."""
    logging.getLogger("quark").setLevel(logging.ERROR)
    folder, name = Path(sys.argv[1]), sys.argv[2]
    digits = load_digits(folder / "digits.npz")
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    sweep = quark.sweep(name, project=PROJECT, storage_dir=folder)

    def train(trial: quark.Trial, session: quark.TrainingSession) -> None:
        training = DigitsTraining(digits, trial.parameters)
        earlier = checkpoints / f"{trial.earlier_run_id}.npz"
        if earlier.exists():
            training.restore(earlier)
        metrics = quark.MetricsLogger(session)
        last = trial.budget or EPOCHS
        if training.epoch >= last:
            # Whoever had it was gone after its last epoch, before its run had ended.
            training = DigitsTraining(digits, trial.parameters)
        while training.epoch < last:
            loss = training.train_epoch()
            metrics.log("val/loss", loss, step=training.epoch)
            training.save(checkpoints / f"{session.run_id}.npz")
            _raise_where_asked(folder / "raise")

    sweep.run(train)


def _raise_where_asked(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    raise RuntimeError("planted: the training breaks")


if __name__ == "__main__":
    main()
