"""What statistics of tensors cost, in reads of their memory: multiples of `x.sum()`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from figures import print_rows

from quark_torch.kernels.loader import find_kernel
from quark_torch.measuring import tensor_reading
from quark_torch.measuring.measures import measure, measure_many, measure_update
from quark_torch.measuring.tensor_statistics import Wanted

SIZES = {"16 KB": 1 << 12, "256 KB": 1 << 16, "4 MB": 1 << 20, "64 MB": 1 << 24}
WANTED = {
    "moments": Wanted(),
    "and near zero": Wanted(1e-8),
    "and dead units": Wanted(1e-8, None, 1),
    "and saturation": Wanted(1e-8, (-0.95, 0.95), 1),
}
GOALS = {"16 KB": 2.5, "256 KB": 2.5, "4 MB": 2.5, "64 MB": 1.6}
PARAMETER_GOALS = {"values": 1.6, "values and update": 4.5}


def measure_statistics(*, quick: bool) -> dict[str, Any]:
    """One tensor of four sizes, then 10.7 million parameters in 78 tensors; one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = _measure_tensors(quick)
        parameters = _measure_parameters(quick)
    finally:
        torch.set_num_threads(threads)
    print_rows("One float32 tensor: multiples of x.sum()", rows)
    print_rows("10.7 M parameters in 78 tensors: multiples of one read of all", parameters)
    return {"tensors": rows, "parameters": parameters}


def _measure_tensors(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for size, count in SIZES.items():
        tensor = torch.randn(count // 64, 64)
        repeats = max(7, min(2000, (20_000_000 if quick else 200_000_000) // count))
        calls = {"x.sum()": tensor.sum}
        for name, wanted in WANTED.items():
            calls[name] = _call(tensor, wanted)
        taken = _interleave(calls, repeats)
        with _without_kernel():
            slow = _interleave({"x": _call(tensor, WANTED["and near zero"])}, max(5, repeats // 10))
        read = taken.pop("x.sum()")
        row: dict[str, Any] = {"size": size, "x.sum() us": read * 1e6}
        row |= {name: seconds / read for name, seconds in taken.items()}
        row |= {"without kernel": slow["x"] / read, "goal": GOALS[size]}
        rows.append(row)
    return rows


def _measure_parameters(quick: bool) -> list[dict[str, Any]]:
    tensors = make_parameters()
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.add_(torch.randn_like(tensor), alpha=1e-3)
    wanted = Wanted(1e-8)
    calls: dict[str, Callable[[], Any]] = {
        "one read": lambda: [tensor.sum() for tensor in tensors],
        "values": lambda: measure_many(tensors, wanted),
        "values one by one": lambda: [measure(tensor, wanted) for tensor in tensors],
        "values and update": lambda: [
            measure_update(*pair, wanted) for pair in zip(before, tensors, strict=True)
        ],
        "copy of all": lambda: torch._foreach_copy_(before, tensors),
    }
    changed = calls.pop("copy of all")
    taken = _interleave(calls, 9 if quick else 60)
    taken |= _interleave({"copy of all": changed}, 9 if quick else 60)
    read = taken["one read"]
    return [
        {
            "what": name,
            "ms": seconds * 1e3,
            "reads": seconds / read,
            "goal": PARAMETER_GOALS.get(name),
        }
        for name, seconds in taken.items()
    ]


def make_parameters() -> list[torch.Tensor]:
    """As of a transformer of six layers: 10.7 million in 78 tensors."""
    shapes = [(384, 384)] * 24 + [(1536, 384), (384, 1536)] * 6 + [(384,)] * 41 + [(65, 384)]
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


def _call(tensor: torch.Tensor, wanted: Wanted) -> Callable[[], Any]:
    return lambda: measure(tensor, wanted)


@contextmanager
def _without_kernel() -> Any:
    tensor_reading.find_kernel = lambda: None
    try:
        yield
    finally:
        tensor_reading.find_kernel = find_kernel


def _interleave(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least seconds of each, in turns, so that what else runs here weighs on all alike."""
    clock = time.perf_counter
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            begin = clock()
            call()
            least[name] = min(least[name], clock() - begin)
    return least
