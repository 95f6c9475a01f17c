"""Reading elements with PyTorch's own operations, a small block of float64 at a time.

Of PyTorch's reductions only the cheap ones are used: on a CPU `var_mean`,
`std_mean` and the infinity norm cost as much as 70 to 127 reads.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quark_torch.measuring.partials import NOTHING, Partial, Wanted, merge

BLOCK = 32_768
"""Elements read at once: they stay in cache, and PyTorch uses no second thread for them."""

_SAFE_PEAKS = (1e-140, 1e140)


def read_flat(flat: Tensor, wanted: Wanted, exponent: int = 0) -> Partial:
    """Read a one-dimensional tensor of real elements, on any device."""
    return merge(
        read_block(widen(flat[begin : begin + BLOCK]), wanted, exponent)
        for begin in range(0, len(flat), BLOCK)
    )


def read_difference(
    before: Tensor, after: Tensor, wanted: Wanted, exponent: int = 0
) -> tuple[Partial, Partial]:
    """The difference of two one-dimensional tensors, and the first of them."""
    differences, befores = [], []
    for begin in range(0, len(after), BLOCK):
        old = widen(before[begin : begin + BLOCK])
        difference = _difference(before[begin : begin + BLOCK], after[begin : begin + BLOCK])
        differences.append(read_block(difference, wanted, exponent))
        befores.append(read_block(old, Wanted(), exponent))
    return merge(differences), merge(befores)


def extreme_exponent(part: Partial) -> int:
    """By which power of two to divide before squaring, so that squares hold; 0 if they do."""
    if not part.finite_count:
        return 0
    peak = max(abs(part.minimum), abs(part.maximum))
    if peak == 0 or _SAFE_PEAKS[0] < peak < _SAFE_PEAKS[1]:
        return 0
    return math.frexp(peak)[1]


def widen(block: Tensor) -> Tensor:
    """Elements as float64 on the CPU; of complex ones the magnitudes."""
    if block.dtype.is_complex:
        if block.dtype == torch.complex32:
            block = block.to(torch.complex64)
        block = block.abs()
    return block.to(device="cpu", dtype=torch.float64)


def _difference(before: Tensor, after: Tensor) -> Tensor:
    """After less before as the kernel takes it: in float32 at least, rounded once."""
    if before.dtype.is_complex or not before.dtype.is_floating_point or before.dtype.itemsize == 1:
        # Integers would overflow.
        before, after = _wide(before), _wide(after)
    wide = torch.promote_types(torch.promote_types(before.dtype, after.dtype), torch.float32)
    return widen(after.to(wide) - before.to(wide))


def _wide(block: Tensor) -> Tensor:
    return block if block.dtype.is_complex else block.to(torch.float64)


def read_block(block: Tensor, wanted: Wanted, exponent: int = 0) -> Partial:
    """Read a block of float64 on the CPU."""
    count = len(block)
    if count == 0:
        return NOTHING
    nans = infinities = 0
    # A NaN or an infinity shows in the sum, so that most blocks need no count of them.
    total = block.sum().item()
    if not math.isfinite(total):
        nans = _true_count(block.isnan())
        block = block[block.isfinite()]
        infinities = count - nans - len(block)
        count = len(block)
        if count == 0:
            return NOTHING._replace(nan_count=nans, inf_count=infinities)
    near_zero = saturated = 0
    if wanted.near_zero is not None:
        near_zero = _true_count(block.abs() <= wanted.near_zero)
    if wanted.saturation is not None:
        low, high = wanted.saturation
        saturated = _true_count((block <= low) | (block >= high))
    minimum, maximum = block.amin().item(), block.amax().item()
    if exponent:
        # In two steps, since one factor alone may not be a float64.
        half = exponent // 2
        block = block * 2.0**-half * 2.0 ** (half - exponent)
    mean = (block / count).sum().item() if exponent or infinities or nans else total / count
    distances = block - mean
    rest = distances.sum().item() / count
    squares = distances.dot(distances).item() - count * rest * rest
    return Partial(
        count,
        nans,
        infinities,
        near_zero,
        saturated,
        mean + rest,
        max(squares, 0.0),
        minimum,
        maximum,
        exponent,
    )


def _true_count(flags: Tensor) -> int:
    # NumPy counts the true bytes of an array ten times as fast as PyTorch does.
    return int(np.count_nonzero(flags.numpy()))
