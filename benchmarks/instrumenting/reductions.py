"""What the reductions cost that are stacked on a device, where no kernel of ours reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from figures import print_rows

from instrumenting.devices import find_wait
from instrumenting.statistics import SIZES, WANTED, make_parameters
from quark_torch.measuring.measures import make_rows, measure_many, measure_updates
from quark_torch.measuring.tensor_statistics import Wanted

CALLS = 20
"""Calls before the device is waited for, as a probed step makes one for each layer."""


def measure_reductions(*, quick: bool, device: str = "cpu") -> dict[str, Any]:
    """Tensors of four sizes, on the CPU of the smaller two; then 10.7 million parameters."""
    wait = find_wait(device)
    tensors = []
    for size, count in list(SIZES.items())[: 2 if device == "cpu" else None]:
        tensor = torch.randn(count // 64, 64, device=device)
        calls: dict[str, Callable[[], Any]] = {"x.sum()": tensor.sum}
        for name, wanted in WANTED.items():
            calls[name] = _stack(tensor, wanted)
        taken = _time(calls, CALLS, 3 if quick else 30, wait)
        row: dict[str, Any] = {"size": size, "x.sum() us": taken["x.sum()"] * 1e6}
        tensors.append(row | {name: taken[name] * 1e6 for name in WANTED})
    print_rows(
        f"Stacked reductions of one float32 tensor on {device}: microseconds a call", tensors
    )
    befores = [tensor.to(device) for tensor in make_parameters()]
    afters = [before + 1e-3 for before in befores]
    taken = _time(
        {
            "values": lambda: measure_many(befores, Wanted(1e-8)),
            "values and updates": lambda: measure_updates(befores, afters, Wanted(1e-8)),
        },
        1,
        2 if quick else 10,
        wait,
    )
    parameters = [{"what": name, "ms": seconds * 1e3} for name, seconds in taken.items()]
    print_rows(f"10.7 M parameters in 78 tensors on {device}", parameters)
    return {"tensors": tensors, "parameters": parameters}


def _stack(tensor: torch.Tensor, wanted: Wanted) -> Callable[[], Any]:
    return lambda: torch.stack(make_rows(tensor, wanted))


def _time(
    calls: dict[str, Callable[[], Any]], count: int, rounds: int, wait: Callable[[], None]
) -> dict[str, float]:
    """The least seconds of each, in turns: the mean of so many calls until the device is done."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            wait()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            wait()
            least[name] = min(least[name], (time.perf_counter() - begin) / count)
    return least
