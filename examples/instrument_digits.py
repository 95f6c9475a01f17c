"""See inside a convolutional network while it learns digits: layers, parameters, data, hardware.

    python examples/instrument_digits.py [--epochs 3] [--storage-dir DIR]

The whole loop, each part by itself; `quark.watch` does the same with one line.
Needs the extra "torch" and scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from quark import (
    EventLogger,
    HookEngine,
    HookEngineConfig,
    HookScheduleConfig,
    LayerFilterConfig,
    MetricsLogger,
    ParameterDiagnostics,
    ParameterDiagnosticsConfig,
    SystemTelemetry,
    SystemTelemetryConfig,
    TrainingSession,
)

HOOKS = HookEngineConfig(
    schedule=HookScheduleConfig(every_n_steps=10),
    filters=LayerFilterConfig(include_types=("Conv2d", "Linear", "ReLU")),
)
PARAMETERS = ParameterDiagnosticsConfig(
    schedule=HookScheduleConfig(every_n_steps=20),
    capture_distributions=True,
    distribution_types=("value", "gradient", "update"),
)


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="See inside a network that learns digits.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    data = torch.utils.data.TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0,
        torch.tensor(digits.target),
    )
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with (
        TrainingSession.start_run(
            project="instrumented-digits",
            config={"model": "conv", "epochs": arguments.epochs},
            storage_dir=arguments.storage_dir,
        ) as session,
        MetricsLogger(session) as metrics,
        EventLogger(session) as events,
        SystemTelemetry(
            session, config=SystemTelemetryConfig(sample_every_n_steps=10)
        ) as telemetry,
        HookEngine(session, model, optimizer, config=HOOKS) as hooks,
        ParameterDiagnostics(session, model, optimizer, config=PARAMETERS) as parameters,
    ):
        step = 0
        for epoch in range(arguments.epochs):
            batches = iter(loader)
            for _ in range(len(loader)):
                with telemetry.start_step(step, epoch=epoch) as scope:
                    images, targets = next(batches)
                    scope.mark_data_ready()
                    optimizer.zero_grad(set_to_none=True)
                    with hooks.step(step, epoch=epoch) as probed:
                        loss = nn.functional.cross_entropy(model(images), targets)
                        loss.backward()
                    optimizer.step()
                    parameters.snapshot(step, epoch=epoch)
                metrics.log("train/loss", loss.item(), step=step, epoch=epoch)
                if probed:
                    events.log("probe_completed", step=step, epoch=epoch)
                step += 1

        print(f"{step} steps, last loss {loss.item():.3f}")
        for record in hooks.read(summary_type="activation", step=0):
            dead = "" if record.dead_unit_ratio is None else f", dead {record.dead_unit_ratio:.0%}"
            print(f"{record.module_name:>3} {record.module_type:<7} std {record.std:.3f}{dead}")
        for summary in parameters.read_summaries(latest_only=True):
            ratio = summary.update_to_parameter_ratio
            told = "unknown" if ratio is None else f"{ratio:.2e}"
            print(f"{summary.parameter_name:>8}: update over parameter {told}")
    print(f"see it again with: quark show {session.run_id}")


if __name__ == "__main__":
    main()
