"""Small networks really trained on handwritten digits: one curve set a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "mlp": {"width": 32, "lr": 0.05, "momentum": 0.9, "optimizer": "sgd"},
    "mlp, high rate": {"width": 32, "lr": 0.2, "momentum": 0.9, "optimizer": "sgd"},
    "conv, adam": {"width": 8, "lr": 0.004, "momentum": 0.0, "optimizer": "adam"},
}

Curves = Mapping[str, tuple[Any, Any]]
"""Metric -> steps and values."""


def train(configuration: Mapping[str, Any], seed: int, steps: int = 300) -> Curves:
    """Train on 1200 digits, validate on the other 597 every 10 steps.

    The seed draws the split, the initial weights and the order of the batches.
    """
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16.0, dtype=torch.float32)
    y = torch.tensor(labels)
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    training, validation = order[:1200], order[1200:]
    width = configuration["width"]
    if configuration["optimizer"] == "adam":
        net: nn.Module = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, width, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 9, 10),
        )
        optimizer: Any = torch.optim.Adam(net.parameters(), lr=configuration["lr"])
    else:
        net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        optimizer = torch.optim.SGD(
            net.parameters(), lr=configuration["lr"], momentum=configuration["momentum"]
        )
    criterion = nn.CrossEntropyLoss()
    train_loss, val_step, val_loss, val_accuracy = [], [], [], []
    for step in range(steps):
        batch = training[torch.randint(len(training), (32,))]
        loss = criterion(net(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_loss.append(loss.item())
        if step % 10 == 9:
            with torch.no_grad():
                out = net(x[validation])
            val_step.append(step)
            val_loss.append(criterion(out, y[validation]).item())
            val_accuracy.append((out.argmax(1) == y[validation]).float().mean().item())
    return {
        "train/loss": (np.arange(steps), np.array(train_loss)),
        "val/loss": (np.array(val_step), np.array(val_loss)),
        "val/accuracy": (np.array(val_step), np.array(val_accuracy)),
    }
