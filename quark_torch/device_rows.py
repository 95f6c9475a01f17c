"""Statistics of a tensor on a device as rows of numbers there: nothing here waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quark_torch.partials import Partial, Wanted
from quark_torch.tensor_forms import walk

__all__ = ["COLUMNS", "count_dead", "make_rows", "read_row"]

COLUMNS = 10
CHUNK = 1 << 22
"""Elements reduced at once: bounds the memory that intermediate results take."""


def make_rows(part: Tensor, wanted: Wanted) -> list[Tensor]:
    """A row for each chunk of a tensor, on its device, made by stacked reductions.

    The statistics are over the finite elements without knowing on the host
    whether there are others: a comparison there would wait for the device.
    """
    flats = (
        flat[begin : begin + CHUNK]
        for flat in walk(part, CHUNK)
        for begin in range(0, len(flat), CHUNK)
    )
    rows = [_reduce(flat, wanted) for flat in flats]
    if rows and wanted.units is not None and -part.dim() <= wanted.units < part.dim():
        rows[0][COLUMNS - 1] = count_dead(part, wanted.units % part.dim(), wanted.near_zero or 0.0)
    return rows


def read_row(row: Sequence[float]) -> tuple[Partial, int]:
    """What a row says, on the host: sums, and dead units."""
    finite, nans, infinities, near_zero, saturated, mean, squares, low, high, dead = row
    return (
        Partial(
            int(finite),
            int(nans),
            int(infinities),
            int(near_zero),
            int(saturated),
            mean,
            squares,
            low,
            high,
        ),
        int(dead),
    )


def count_dead(tensor: Tensor, dim: int, epsilon: float) -> Tensor:
    """How many entries of a dimension have no element beyond the epsilon, as a tensor."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.dtype.is_complex:
        if tensor.dtype == torch.complex32:
            tensor = tensor.to(torch.complex64)
        tensor = tensor.abs()
    elif not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    others = [other for other in range(tensor.dim()) if other != dim]
    high, low = (tensor.amax(others), tensor.amin(others)) if others else (tensor, tensor)
    # Widened, since an epsilon rounded to the tensor's dtype may be another number.
    return ((high.double() <= epsilon) & (low.double() >= -epsilon)).sum()


def _reduce(flat: Tensor, wanted: Wanted) -> Tensor:
    if flat.dtype.is_complex:
        flat = (flat.to(torch.complex64) if flat.dtype == torch.complex32 else flat).abs()
    values = flat.to(torch.float64)
    finite = values.isfinite()
    count, nans = finite.sum(), values.isnan().sum()
    divisor = count.clamp(min=1)
    mean = torch.where(finite, values, 0.0).sum() / divisor
    distances = torch.where(finite, values - mean, 0.0)
    rest = distances.sum() / divisor
    none = torch.zeros_like(mean)
    near_zero = saturated = none
    if wanted.near_zero is not None:
        near_zero = ((values.abs() <= wanted.near_zero) & finite).sum()
    if wanted.saturation is not None:
        low, high = wanted.saturation
        saturated = (((values <= low) | (values >= high)) & finite).sum()
    columns = (
        count,
        nans,
        values.numel() - count - nans,
        near_zero,
        saturated,
        mean + rest,
        (distances.square().sum() - divisor * rest * rest).clamp(min=0.0),
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
        none,
    )
    return torch.stack([column.to(torch.float64) for column in columns])
