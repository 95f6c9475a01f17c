"""What `wandb.watch(log="all")` adds to the same steps; nothing where wandb is not installed."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import print_rows
from torch import nn

import quark
from instrumenting.steps import MODELS

ROUNDS = {"mlp": 120, "conv": 24, "transformer": 8}


def measure_rivals(*, quick: bool) -> list[dict[str, Any]]:
    """Each step probed, by ours (layers and parameters) and by theirs, beside a bare model."""
    if importlib.util.find_spec("wandb") is None:
        print("\nwandb is not installed here, so nothing is compared with it.")
        return []
    torch.set_num_threads(1)
    rows = []
    for name in MODELS:
        rounds = max(3, ROUNDS[name] // (4 if quick else 1))
        ours_bare, ours = _measure_ours(name, rounds)
        theirs_bare, theirs = _measure_theirs(name, rounds)
        added, their_added = ours - ours_bare, theirs - theirs_bare
        rows.append(
            {
                "model": name,
                "step ms": ours_bare * 1000,
                "quark adds ms": added * 1000,
                "wandb adds ms": their_added * 1000,
                "times less": their_added / added,
                "goal": 20,
            }
        )
    print_rows("Every step probed, layers and parameters (least of the rounds)", rows)
    return rows


def _make(name: str) -> tuple[nn.Module, Any, Callable[[], None]]:
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train() -> None:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return model, optimizer, train


def _measure_ours(name: str, rounds: int) -> tuple[float, float]:
    _, _, bare = _make(name)
    model, optimizer, train = _make(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        quark.start_run(project="rivals", storage_dir=folder) as session,
        quark.watch(session, model, optimizer, every_n_steps=1, telemetry=False) as watch,
    ):
        steps = iter(range(10**9))

        def probed() -> None:
            watch.step(next(steps))
            train()

        return _least(bare, probed, rounds)


def _measure_theirs(name: str, rounds: int) -> tuple[float, float]:
    import wandb

    _, _, bare = _make(name)
    model, _, train = _make(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=folder)
        run = wandb.init(project="rivals", dir=folder)
        run.watch(model, log="all", log_freq=1)

        def probed() -> None:
            train()
            run.log({"loss": 0.0})

        try:
            return _least(bare, probed, rounds)
        finally:
            run.finish()


def _least(
    bare: Callable[[], None], probed: Callable[[], None], rounds: int
) -> tuple[float, float]:
    least = [float("inf"), float("inf")]
    for call in (bare, probed, bare, probed):
        call()
    for _ in range(rounds):
        for place, call in enumerate((bare, probed)):
            begin = time.perf_counter()
            call()
            least[place] = min(least[place], time.perf_counter() - begin)
    return least[0], least[1]
