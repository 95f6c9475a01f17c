"""Statistics of tensors, each element read once; knows no hooks, no modules and no records.

Every function may be called from any thread. None of them changes a tensor,
its version, its graph or the grad mode, and none raises: what cannot be
measured (meta and fake tensors, those inside of functorch's transforms,
memory that was freed) gives None.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quark_torch.measuring.tensor_forms import memory_order, open_form


class Histogram(NamedTuple):
    """Counts of a sample of a tensor's finite elements in bins of equal width.

    Attributes:
        edges: One more than bins; a bin holds its lower edge, the last one both.
        counts: Sampled elements in each bin.
        sample_count: Sum of the counts.
        total_count: Elements of the tensor.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sample_count: int
    total_count: int


def measure_histogram(tensor: Tensor, bins: int, max_values: int) -> Histogram | None:
    """Sample at most so many elements, evenly over the tensor, and count them.

    Never raises. On a GPU it waits for the sample.

    Returns:
        None where nothing can be read or nothing sampled is finite.
    """
    try:
        with torch.no_grad():
            return _measure(tensor, bins, max_values)
    except Exception:  # noqa: BLE001 - a tensor that nobody foresaw must not stop training
        return None


def _measure(tensor: Tensor, bins: int, max_values: int) -> Histogram | None:
    form = open_form(tensor)
    if form is None or not form.parts:
        return None
    total = sum(part.numel() for part in form.parts)
    samples = [
        _sample(part, max(1, max_values * part.numel() // total))
        for part in form.parts
        if part.numel()
    ]
    values = np.concatenate(samples) if samples else np.empty(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    edges, counts = _count(values, bins)
    return Histogram(edges, counts, len(values), form.element_count)


def _sample(tensor: Tensor, max_values: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    count = tensor.numel()
    step = -(-count // max_values)
    # A step that shares a factor with a dimension would see only some columns.
    while step > 1 and any(math.gcd(step, size) > 1 for size in tensor.shape):
        step += 1
    order = memory_order(tensor)
    if order is not None:
        sample = tensor.permute(order).reshape(-1)[::step]
    else:
        places = torch.arange(0, count, step, device=tensor.device)
        sample = tensor[torch.unravel_index(places, tensor.shape)]
    if sample.is_quantized:
        sample = sample.dequantize()
    if sample.dtype.is_complex:
        sample = sample.to(torch.complex64 if sample.dtype == torch.complex32 else sample.dtype)
        sample = sample.abs()
    widened: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        sample.to(device="cpu", dtype=torch.float64).resolve_neg().numpy()
    )
    return widened


def _count(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], bins: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        reach = max(0.5, abs(low) * 2**-20)
        low, high = low - reach, high + reach
    # Halved, since the whole width of the range may not be a float64.
    half = high / 2 - low / 2
    steps = [half * (index / bins) for index in range(bins)]
    edges = np.array([low + step + step for step in steps] + [high])
    scale = bins / half if half > 1e-300 else 0.0
    if not math.isfinite(scale) or scale == 0.0:
        counts = np.histogram(values, edges)[0]
        return tuple(edges.tolist()), tuple(counts.tolist())
    places = (values / 2 - low / 2) * scale
    indices = np.clip(places.astype(np.int64), 0, bins - 1)
    # A place next to an edge may be rounded to the other side of it.
    indices -= values < edges[indices]
    indices += (values >= edges[indices + 1]) & (indices != bins - 1)
    counts = np.bincount(indices, minlength=bins)
    return tuple(edges.tolist()), tuple(counts.tolist())
