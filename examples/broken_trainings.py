"""Eight broken trainings, and the alert that finds each.

    python examples/broken_trainings.py [NAME ...] [--storage-dir DIR]

Every one is the same loop over handwritten digits with one mistake that people
make. Needs the extra "torch" and scikit-learn; takes about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import quark


def make_network(activation: type[nn.Module] = nn.ReLU, depth: int = 2) -> nn.Sequential:
    sizes = [64] + [48] * depth
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def entropy(scores: Tensor, labels: Tensor, _step: int) -> Tensor:
    return functional.cross_entropy(scores, labels)


@dataclass
class Training:
    """A training of digits; the defaults are a healthy one."""

    model: nn.Module = field(default_factory=make_network)
    rate: float = 0.05
    rate_at: Callable[[int], float] = lambda _: 1.0
    parameters: list[nn.Parameter] | None = None
    loss: Callable[[Tensor, Tensor, int], Tensor] = entropy
    samples: int = 1200
    wait_s: Callable[[int], float] = lambda _: 0.0
    wrong_labels: float = 0.0
    steps: int = 300


def rate_too_high() -> Training:
    """The schedule multiplies the rate by 400 at step 150, once too often."""
    return Training(rate_at=lambda step: 400.0 if step >= 150 else 1.0)


def deep_sigmoids() -> Training:
    """Eight layers of sigmoids: nothing of the gradient reaches the first."""
    return Training(model=make_network(nn.Sigmoid, depth=8))


def forgotten_layer() -> Training:
    """The first layer was replaced after the optimizer had been made."""
    model = make_network()
    parameters = list(model.parameters())
    model[0] = nn.Linear(64, 48)
    return Training(model=model, parameters=parameters)


def dead_units() -> Training:
    """A bias far below zero: the units of the second layer never fire."""
    model = make_network()
    nn.init.constant_(model[2].bias, -20.0)
    return Training(model=model)


def learned_by_heart() -> Training:
    """A hundred samples, a third of them labelled wrongly, and far too many epochs."""
    return Training(samples=100, wrong_labels=0.33, rate=0.1, steps=500)


def slow_loader() -> Training:
    """From step 150 on the loader needs longer than the step."""
    return Training(wait_s=lambda step: 0.02 if step >= 150 else 0.0)


def logarithm_of_zero() -> Training:
    """The loss takes the logarithm of a probability that becomes zero."""

    def loss(scores: Tensor, labels: Tensor, step: int) -> Tensor:
        scale = 1.0 if step < 200 else 1e4
        chosen = torch.softmax(scores * scale, dim=1)[torch.arange(len(labels)), labels]
        return -torch.log(chosen).mean()

    return Training(loss=loss)


def labels_out_of_order() -> Training:
    """The inputs were shuffled and the labels were not."""
    return Training(wrong_labels=1.0, rate=0.01)


BROKEN = {
    "exploding_gradients": rate_too_high,
    "vanishing_gradients": deep_sigmoids,
    "stagnant_layers": forgotten_layer,
    "activation_collapse": dead_units,
    "overfitting_onset": learned_by_heart,
    "runtime_bottleneck_risk": slow_loader,
    "non_finite_values": logarithm_of_zero,
    "plateau": labels_out_of_order,
}


def train(training: Training, session: quark.TrainingSession) -> None:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    held_out, held_labels = images[1400:], labels[1400:]
    images, labels = images[: training.samples], labels[: training.samples]
    wrong = torch.rand(len(labels)) < training.wrong_labels
    labels = torch.where(wrong, labels[torch.randperm(len(labels))], labels)
    model = training.model
    parameters = training.parameters or list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=training.rate, momentum=0.9)
    with (
        quark.MetricsLogger(session) as metrics,
        quark.watch(session, model, optimizer, every_n_steps=5) as watch,
    ):
        for step in range(training.steps):
            watch.step(step)
            if (wait_s := training.wait_s(step)) > 0:
                time.sleep(wait_s)
            chosen = torch.randint(0, len(images), (32,))
            watch.mark_data_ready()
            for group in optimizer.param_groups:
                group["lr"] = training.rate * training.rate_at(step)
            scores = model(images[chosen])
            loss = training.loss(scores, labels[chosen], step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics.log("train/loss", loss.item(), step=step)
            if step % 10 == 9:
                with torch.no_grad():
                    held = functional.cross_entropy(model(held_out), held_labels)
                metrics.log("val/loss", held.item(), step=step)


def main() -> None:
    parser = argparse.ArgumentParser(description="Eight broken trainings and their alerts.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BROKEN)}; all by default")
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BROKEN)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(BROKEN)}")
    torch.set_num_threads(1)
    for expected in arguments.names or BROKEN:
        make = BROKEN[expected]
        torch.manual_seed(0)
        session = quark.TrainingSession.start_run(
            project="broken-trainings", name=make.__name__, storage_dir=arguments.storage_dir
        )
        with session:
            train(make(), session)
        print(f"\n{make.__name__}: {make.__doc__}")
        for alert in quark.AnalyzerEngine(session).analyze().alerts:
            mark = ">" if alert.rule_id == expected else " "
            print(f" {mark} {alert.severity:8} {alert.rule_id:24} {alert.culprit}: {alert.fact}")


if __name__ == "__main__":
    main()
