"""Where does the time of a training step go? Measure it, and the machine, while training.

    python examples/runtime_telemetry.py [--steps 60] [--storage-dir DIR]

Trains a small network on random data whose loader is slow on purpose, every
tenth step a little more. Needs the extra "torch".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from quark import (
    EventLogger,
    MetricsLogger,
    SystemTelemetry,
    SystemTelemetryConfig,
    TrainingSession,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure where the time of a step goes.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--storage-dir", type=Path, default=Path())
    return parser.parse_args()


def load_batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches, as slow to come as those of a disk that is shared."""
    for step in range(steps):
        time.sleep(0.02 if step % 10 == 9 else 0.002)
        inputs = torch.randn(64, 32)
        yield inputs, (inputs.sum(dim=1) > 0).long()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Every step here; every tenth is enough for long runs.
    config = SystemTelemetryConfig(sample_every_n_steps=1, sample_interval_s=0.2)
    with (
        TrainingSession.start_run(
            project="telemetry-demo",
            config={"steps": arguments.steps, "lr": 1e-2},
            storage_dir=arguments.storage_dir,
        ) as session,
        MetricsLogger(session) as metrics,
        EventLogger(session) as events,
        SystemTelemetry(session, config=config) as telemetry,
    ):
        batches = load_batches(arguments.steps)
        for step in range(arguments.steps):
            with telemetry.start_step(step, metadata={"split": "train"}) as scope:
                inputs, targets = next(batches)
                scope.mark_data_ready()  # what came before was waiting for data
                optimizer.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
            metrics.log("train/loss", loss.item(), step=step)
        telemetry.sample(metadata={"when": "after training"})  # reads the machine now

        slowest = max(telemetry.read(boundary="step"), key=lambda r: r.step_time_ms or 0.0)
        events.log(
            "slowest_step",
            step=slowest.step,
            payload={"step_time_ms": slowest.step_time_ms, "data_time_ms": slowest.data_time_ms},
        )
        waits = metrics.columns(metric_key="system/runtime/data_time_ms")["value"]
        steps = metrics.columns(metric_key="system/runtime/step_time_ms")["value"]
        print(f"{len(steps)} steps, {100 * waits.sum() / steps.sum():.0f} % of the time in data")
        print(
            f"slowest: step {slowest.step}, {slowest.step_time_ms:.1f} ms, "
            f"of which data {slowest.data_time_ms:.1f} ms"
        )
        newest = telemetry.read(boundary="time")[-1]
        if newest.cpu_usage_percent is not None and newest.ram_usage_percent is not None:
            print(f"CPU {newest.cpu_usage_percent:.0f} %, RAM {newest.ram_usage_percent:.0f} %")
        for gpu in newest.gpus or ():
            print(f"GPU {gpu.index} ({gpu.name}): {gpu.utilization_percent} %")
        if not newest.gpus:
            print("GPU:", (newest.metadata or {}).get("unavailable", {}).get("gpu", "none"))
    print(f"see it again with: quark show {session.run_id}")


if __name__ == "__main__":
    main()
