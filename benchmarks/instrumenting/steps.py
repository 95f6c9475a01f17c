"""What looking inside adds to a training step: unprobed, probed, and amortised."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import print_rows
from torch import nn
from torch._dynamo.utils import counters

import quark
from instrumenting.devices import find_wait

Step = Callable[[int], None]

GOALS = {
    "transformer": {"probed": 0.03, "amortised": 0.002},
    "conv": {"probed": 0.10, "amortised": None},
    "mlp": {"probed": 0.40, "amortised": 0.02},
}
EVERY = 25


def make_mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )
    return model, torch.randn(32, 32), torch.randint(0, 8, (32,))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.act(self.norm(self.first(x))))


def make_conv() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    blocks = [_Block(32) for _ in range(5)]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, torch.randn(16, 3, 24, 24), torch.randint(0, 10, (16,))


class _Transformer(nn.Module):
    def __init__(self, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))[:, -1]


def make_transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return _Transformer(), torch.randint(0, 256, (2, 96)), torch.randint(0, 256, (2,))


MODELS = {"mlp": make_mlp, "conv": make_conv, "transformer": make_transformer}


def measure_steps(*, quick: bool, device: str = "cpu") -> list[dict[str, Any]]:
    """Forward and backward with and without the engine, in turns within one process."""
    wait = find_wait(device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, make in MODELS.items():
        model, inputs, targets = (part.to(device) for part in make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def train(model: nn.Module = model, inputs: Any = inputs, targets: Any = targets) -> None:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            model.zero_grad(set_to_none=True)
            loss.backward()
            wait()

        rounds = {"mlp": 400, "conv": 40, "transformer": 12}[name] // (4 if quick else 1)
        rows.append(_measure(name, model, optimizer, train, max(3, rounds)))
    print_rows(
        f"Forward and backward on {device}, one thread "
        f"(least of the rounds; every {EVERY}th is probed)",
        rows,
    )
    compiled = [
        _measure_compiled(
            name, MODELS[name], (rounds if not quick else max(3, rounds // 4)), device
        )
        for name, rounds in (("mlp", 1000), ("conv", 40))[: 1 if quick else None]
    ]
    print_rows(
        "The same of a compiled model (inductor); without hooks it is another copy", compiled
    )
    return rows + compiled


def _measure(
    name: str, model: nn.Module, optimizer: Any, train: Callable[[], None], rounds: int
) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        quark.start_run(project="instrumented", storage_dir=folder) as session,
    ):
        schedule = quark.HookScheduleConfig(every_n_steps=EVERY)
        config = quark.HookEngineConfig(schedule=schedule)
        with quark.HookEngine(session, model, optimizer, config=config) as hooks:
            number = 0

            def bare() -> None:
                train()

            def unprobed() -> None:
                with hooks.step(1):
                    train()

            def probed() -> None:
                with hooks.step(EVERY):
                    train()

            kinds = {"bare": bare, "again": bare, "unprobed": unprobed, "probed": probed}
            for run in kinds.values():
                run()
            taken: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(rounds):
                names = list(kinds)
                for kind in names[number % 4 :] + names[: number % 4]:
                    begin = time.perf_counter()
                    kinds[kind]()
                    taken[kind].append(time.perf_counter() - begin)
            flat_us = _measure_flat(hooks)
    least = {kind: min(values) for kind, values in taken.items()}
    middle = {kind: statistics.median(values) for kind, values in taken.items()}
    probed = least["probed"] / least["bare"] - 1
    return {
        "model": name,
        "step ms": least["bare"] * 1000,
        "A/A": least["again"] / least["bare"] - 1,
        "unprobed": least["unprobed"] / least["bare"] - 1,
        "unprobed flat us": flat_us,
        "probed": probed,
        "probed, medians": middle["probed"] / middle["bare"] - 1,
        "goal": GOALS[name]["probed"],
        f"amortised over {EVERY}": probed / EVERY,
        "its goal": GOALS[name]["amortised"],
    }


def _measure_compiled(
    name: str,
    make: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]],
    rounds: int,
    device: str,
) -> dict[str, Any]:
    """A compiled model with hooks in it beside a compiled copy without any, in turns."""
    torch._dynamo.reset()
    wait = find_wait(device)
    hooked, inputs, targets = (part.to(device) for part in make())
    models = {"bare": copy.deepcopy(hooked), "again": copy.deepcopy(hooked), "unprobed": hooked}
    compiled: dict[str, Any] = {kind: torch.compile(model) for kind, model in models.items()}
    compiled["probed"] = compiled["unprobed"]
    with (
        tempfile.TemporaryDirectory() as folder,
        quark.start_run(project="instrumented", storage_dir=folder) as session,
    ):
        config = quark.HookEngineConfig(schedule=quark.HookScheduleConfig(every_n_steps=EVERY))
        with quark.HookEngine(session, compiled["unprobed"], config=config) as hooks:

            def train(kind: str) -> None:
                model = compiled[kind]
                loss = nn.functional.cross_entropy(model(inputs), targets)
                model.zero_grad(set_to_none=True)
                loss.backward()
                wait()

            def step(kind: str) -> None:
                if kind in ("bare", "again"):
                    train(kind)
                    return
                with hooks.step(EVERY if kind == "probed" else 1):
                    train(kind)

            graphs = {}
            for kind in compiled:
                counters.clear()
                for _ in range(3):
                    step(kind)
                found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
                graphs[kind] = found
            taken: dict[str, list[float]] = {kind: [] for kind in compiled}
            for number in range(rounds):
                names = list(compiled)
                for kind in names[number % 4 :] + names[: number % 4]:
                    begin = time.perf_counter()
                    step(kind)
                    taken[kind].append(time.perf_counter() - begin)
    least = {kind: min(values) for kind, values in taken.items()}
    middle = {kind: statistics.median(values) for kind, values in taken.items()}
    return {
        "model": f"{name}, compiled",
        "step ms": least["bare"] * 1000,
        "A/A": least["again"] / least["bare"] - 1,
        "unprobed": least["unprobed"] / least["bare"] - 1,
        "A/A, medians": middle["again"] / middle["bare"] - 1,
        "unprobed, medians": middle["unprobed"] / middle["bare"] - 1,
        "probed": least["probed"] / least["bare"] - 1,
        "graphs": graphs["unprobed"][0] + graphs["probed"][0],
        "breaks": graphs["unprobed"][1] + graphs["probed"][1],
    }


def _measure_flat(hooks: Any) -> float:
    """Microseconds of a step that is not probed and does nothing."""
    taken = []
    for _ in range(2000):
        begin = time.perf_counter()
        with hooks.step(1):
            pass
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6
