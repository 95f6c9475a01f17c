"""Train a small network on handwritten digits, and track it with Quark.

    python examples/train_digits.py [--epochs 20] [--storage-dir DIR] [--backends csv]

The data (1,797 images of 8 by 8 pixels) ships inside scikit-learn, so nothing
is downloaded. Needs the extra "torch" and scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from quark import EventLogger, MetricsLogger, TrainingSession, open_run
from quark.cli.show import print_session


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, tracked by Quark.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage-dir", type=Path, default=Path())
    parser.add_argument("--backends", default=None, help='added backends, such as "csv"')
    return parser.parse_args()


def load_data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images scaled to 0 … 1 and labels, for training and for validation."""
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16.0, digits.target
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    x_train, x_val, y_train, y_val = map(torch.from_numpy, split)
    return x_train, y_train, x_val, y_val


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    logits = model(x)
    return {
        "val/loss": nn.functional.cross_entropy(logits, y).item(),
        "val/accuracy": (logits.argmax(1) == y).float().mean().item(),
    }


def train(arguments: argparse.Namespace) -> str | None:
    """Train once and return the run's id."""
    torch.manual_seed(arguments.seed)
    x_train, y_train, x_val, y_val = load_data(arguments.seed)
    model = nn.Sequential(
        nn.Linear(64, arguments.hidden),
        nn.ReLU(),
        nn.Linear(arguments.hidden, arguments.hidden),
        nn.ReLU(),
        nn.Linear(arguments.hidden, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    steps_per_epoch = -(-len(x_train) // arguments.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, arguments.epochs * steps_per_epoch
    )

    with (
        TrainingSession.start_run(
            project="digits",
            config=arguments,
            tags=["demo", "mlp"],
            storage_dir=arguments.storage_dir,
            backends=arguments.backends,
        ) as session,
        MetricsLogger(session) as metrics,
        EventLogger(session) as events,
    ):
        session.add_log(f"Training on {len(x_train)} images, validating on {len(x_val)}.")
        step, best_accuracy = 0, 0.0
        for epoch in range(arguments.epochs):
            for batch in torch.randperm(len(x_train)).split(arguments.batch_size):
                logits = model(x_train[batch])
                loss = nn.functional.cross_entropy(logits, y_train[batch])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                metrics.log_many(
                    {
                        "train/loss": loss.item(),
                        "train/accuracy": (logits.argmax(1) == y_train[batch]).float().mean(),
                        "optimizer/lr": schedule.get_last_lr()[0],
                    },
                    step=step,
                    epoch=epoch,
                )
                schedule.step()
                step += 1
            scores = evaluate(model, x_val, y_val)
            metrics.log_many(scores, step=step - 1, epoch=epoch)
            if scores["val/accuracy"] > best_accuracy:
                best_accuracy = scores["val/accuracy"]
                events.log("best_accuracy", step=step - 1, epoch=epoch, payload=scores)
        session.add_log(f"Best validation accuracy {best_accuracy:.3f}.")
    for lane in session.report_delivery().lanes:
        print(lane.describe())
    return session.run_id


def main() -> None:
    arguments = parse_arguments()
    run_id = train(arguments)
    if run_id is None:
        return
    session = open_run(run_id, arguments.storage_dir)
    print_session(session)
    print("\nSee it again with: quark runs, quark show", run_id[:6])


if __name__ == "__main__":
    main()
