"""How much of a tensor differs between its samples, with PyTorch's own operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quark_torch.tensor_forms import memory_order
from quark_torch.torch_reading import widen

__all__ = ["measure_variation"]

_SAMPLES = 6
_SAMPLED = 1024


def measure_variation(tensor: Tensor, units: int) -> float | None:
    """Share of a tensor's energy that differs between samples, 0 to 1.

    The memory is [outer][units][inner], and each entry of `outer` is a sample;
    elements that lie apart are taken in their logical order. Of at most six
    samples, evenly spaced, the first 1024 elements at most are read: the sum of
    the variances (of the population) over the samples at each place, over the
    sum of the mean squares.

    Args:
        tensor: Detached, strided and not empty.
        units: Its dimension whose entries are units, where it has one so.

    Returns:
        None with fewer than two samples or a single unit, and where what is read
        is all zero or not all finite.
    """
    samples = _take_samples(tensor, units % tensor.dim())
    if len(samples) < 2:
        return None
    rows = torch.stack(samples)
    peak = rows.abs().amax().item()
    if peak == 0.0 or not math.isfinite(peak):
        return None
    # So that squares of any elements hold.
    rows = rows / peak
    varied = (rows - rows.mean(0)).square().sum().item()
    return min(varied / rows.square().sum().item(), 1.0)


def _take_samples(tensor: Tensor, dim: int) -> list[Tensor]:
    """The beginnings of the samples, in float64."""
    if tensor.shape[dim] == 1:
        return []
    order = None if tensor.is_quantized else memory_order(tensor)
    if order is not None:
        rows = tensor.permute(order).reshape(-1, tensor.shape[dim] * tensor.stride(dim))
        return [widen(rows[place, :_SAMPLED]) for place in _places(len(rows))]
    before = tensor.shape[:dim]
    taken = []
    for place in _places(math.prod(before)):
        row = tensor
        for size, rest in zip(before, _sizes_after(before), strict=True):
            row = row[place // rest % size]
        row = row.dequantize() if row.is_quantized else row
        taken.append(widen(row.reshape(-1)[:_SAMPLED]))
    return taken


def _places(count: int) -> list[int]:
    samples = min(count, _SAMPLES)
    return [sample * count // samples for sample in range(samples)]


def _sizes_after(sizes: torch.Size) -> list[int]:
    return [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
