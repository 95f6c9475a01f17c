"""A small training that logs to five backends; in a process of its own, which may be killed.

    python -m mirroring.training FOLDER STEPS MLFLOW_URI [RUN_ID] [--pause-s S]

Prints the run's id. With a RUN_ID it resumes that run after the last step
that was begun. It keeps a ledger at FOLDER/ledger.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mirroring.backends import list_backends
from mirroring.ledger import EPOCH_STEPS, Ledger

_EVENT_STEPS = 100
CONFIG = {"lr": 0.05, "width": 16, "optimizer": {"name": "sgd", "momentum": 0.9}}


def train(session: Any, ledger: Ledger, steps: range, pause_s: float = 0.0) -> None:
    """Train a small network, and log each step as the ledger has it."""
    import quark

    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    artifacts = quark.ArtifactStore(session)
    for step, values in zip(steps, make_values(steps), strict=True):
        at_end = step % EPOCH_STEPS == EPOCH_STEPS - 1
        epoch_values = {key: values.pop(key) for key in list(values) if key.startswith("epoch/")}
        ledger.begin(step, {**values, **epoch_values})
        metrics.log_many(values, step=step)
        if at_end:
            for key, value in epoch_values.items():
                metrics.log(key, value, epoch=step // EPOCH_STEPS)
        if step % _EVENT_STEPS == 0:
            events.log("checkpoint_saved", step=step, payload={"path": f"step-{step}.pt"})
        if step == steps.start:
            artifacts.store("samples", "first_batch", {"rows": [[1, 2], [3, 4]]}, step=step)
        ledger.finish(step)
        if pause_s:
            time.sleep(pause_s)


def make_values(steps: range) -> Iterator[dict[str, float]]:
    """What each step of a real small training says of itself."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(steps.start)
    model = nn.Sequential(nn.Linear(8, CONFIG["width"]), nn.ReLU(), nn.Linear(CONFIG["width"], 2))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    for step in steps:
        inputs = torch.randn(32, 8)
        targets = (inputs.sum(1) > 0).long()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 10.0))
        optimizer.step()
        value = float(loss.detach())
        accuracy = float((outputs.argmax(1) == targets).double().mean())
        losses = [*losses[-EPOCH_STEPS:], value]
        yield {
            "train/loss": value,
            "train/accuracy": accuracy,
            "train/grad norm": norm,
            "val/AR@100": accuracy / 3,
            "top 5 %": 100.0 * accuracy,
            "损失": -value,
            "_private": float(step),
            "odd//path:x": norm * 1e-12,
            "edge": _choose_edge(step, value),
            **(
                {"epoch/loss": sum(losses) / len(losses), "epoch/mean@1": accuracy}
                if step % EPOCH_STEPS == EPOCH_STEPS - 1
                else {}
            ),
        }


def _choose_edge(step: int, value: float) -> float:
    odd = {3: math.nan, 5: math.inf, 7: -math.inf, 11: 1e300, 13: 5e-324, 17: -0.0, 19: 1 / 3}
    return odd.get(step % 23, value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("uri")
    parser.add_argument("run_id", nargs="?")
    parser.add_argument("--pause-s", type=float, default=0.0)
    arguments = parser.parse_args()
    import quark

    warnings.simplefilter("ignore", RuntimeWarning)  # odd names and values, on purpose
    ledger = Ledger(arguments.folder / "ledger", arguments.steps)
    backends = list_backends(arguments.uri)
    if arguments.run_id is None:
        session = quark.start_run(
            project="five", storage_dir=arguments.folder, backends=backends, config=CONFIG
        )
    else:
        session = quark.resume_run(
            run_id=arguments.run_id, storage_dir=arguments.folder, backends=backends
        )
    print(session.run_id, flush=True)
    train(session, ledger, range(ledger.begun, arguments.steps), arguments.pause_s)
    session.end_run()


if __name__ == "__main__":
    main()
