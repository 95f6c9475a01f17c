"""Measuring tensors, each element read once where the kernel allows.

Every function may be called from any thread. None of them changes a tensor,
its version, its graph or the grad mode, and none raises: what cannot be
measured (meta and fake tensors, those inside of functorch's transforms,
memory that was freed) gives None.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quark_torch.measuring.device_rows import count_dead
from quark_torch.measuring.kernel_reading import (
    measure_dense,
    measure_dense_many,
    measure_dense_update,
    measure_dense_updates,
    read_dense,
)
from quark_torch.measuring.partials import Partial, TensorStatistics, Wanted, conclude, merge
from quark_torch.measuring.tensor_forms import Form, memory_order, open_form, walk, without_repeats
from quark_torch.measuring.torch_reading import extreme_exponent, read_difference, read_flat, widen

_log = logging.getLogger("quark.torch")
_PIECE = 65_536
_NOTHING_MORE = Wanted()


class UpdateStatistics(NamedTuple):
    """What one read of a parameter before and after an optimizer's step tells.

    Attributes:
        update: Of after less before.
        after: Of the parameter after the step, as `measure` gives it.
        before_norm: Euclidean norm of the parameter before it.
    """

    update: TensorStatistics
    after: TensorStatistics
    before_norm: float | None


def measure(
    tensor: Tensor,
    wanted: Wanted = _NOTHING_MORE,
    on_error: Callable[[Exception], None] | None = None,
) -> TensorStatistics | None:
    """Statistics of a tensor, now.

    On a GPU this waits for the device; `Probe` does not. `on_error` is told of
    what reading the tensor raised, which is what nobody foresaw.

    Returns:
        None where it cannot be measured.
    """
    try:
        statistics = measure_dense(tensor, wanted)
        if statistics is not None:
            return statistics
        with torch.no_grad():
            return _measure_any(tensor, wanted)
    except Exception as error:  # noqa: BLE001 - a tensor that nobody foresaw must not stop training
        _log.debug("A %s was not measured: %s", type(tensor).__name__, error)
        if on_error is not None:
            on_error(error)
        return None


def measure_many(
    tensors: Sequence[Tensor], wanted: Wanted = _NOTHING_MORE
) -> list[TensorStatistics | None]:
    """As `measure`, of each; cheaper than that for many small ones."""
    try:
        found = measure_dense_many(tensors, wanted)
    except Exception as error:  # noqa: BLE001 - as above; each by itself then
        _log.debug("Tensors were not measured together: %s", error)
        found = [None] * len(tensors)
    return [
        measure(tensor, wanted) if statistics is None else statistics
        for tensor, statistics in zip(tensors, found, strict=True)
    ]


def measure_update(
    before: Tensor, after: Tensor, wanted: Wanted = _NOTHING_MORE
) -> UpdateStatistics | None:
    """Statistics of after less before, without making the difference as a tensor.

    `wanted` is of both the update and the tensor after it, units aside.

    Returns:
        None where either cannot be measured, or their shapes differ.
    """
    wanted = wanted._replace(units=None)
    try:
        if dense := measure_dense_update(before, after, wanted):
            return UpdateStatistics(*dense)
        with torch.no_grad():
            return _measure_update(before, after, wanted)
    except Exception as error:  # noqa: BLE001 - as above
        _log.debug("An update of a %s was not measured: %s", type(after).__name__, error)
        return None


def measure_updates(
    befores: Sequence[Tensor], afters: Sequence[Tensor], wanted: Wanted = _NOTHING_MORE
) -> list[UpdateStatistics | None]:
    """As `measure_update`, of each; cheaper than that for many small ones."""
    wanted = wanted._replace(units=None)
    try:
        dense = measure_dense_updates(befores, afters, wanted)
    except Exception as error:  # noqa: BLE001 - as above; each by itself then
        _log.debug("Updates were not measured together: %s", error)
        dense = [None] * len(afters)
    return [
        measure_update(before, after, wanted) if found is None else UpdateStatistics(*found)
        for before, after, found in zip(befores, afters, dense, strict=True)
    ]


def _measure_any(tensor: Tensor, wanted: Wanted) -> TensorStatistics | None:
    form = open_form(tensor)
    if form is None:
        return None
    if len(form.parts) == 1:
        part, repeats = without_repeats(form.parts[0])
    else:
        part, repeats = None, 1
    read = _read([part] if part is not None else form.parts, wanted)
    units, variation = None, None
    if wanted.units is not None and form.has_units and part is not None:
        units = _count_units(form.parts[0], part, read, wanted)
        if units is not None:
            variation = measure_variation(form.parts[0], wanted.units)
    return conclude(
        read,
        form.element_count,
        wanted,
        repeats=repeats,
        units=units,
        density=form.density,
        notes=form.notes,
        variation=variation,
    )


def _read(parts: Sequence[Tensor], wanted: Wanted) -> Partial:
    read = merge(
        read_dense(piece, wanted) or read_flat(piece, wanted)
        for part in parts
        for piece in walk(part, _PIECE)
    )
    if exponent := extreme_exponent(read):
        read = merge(
            read_flat(piece, wanted, exponent) for part in parts for piece in walk(part, _PIECE)
        )
    return read


def _count_units(
    tensor: Tensor, once: Tensor, read: Partial, wanted: Wanted
) -> tuple[int, int] | None:
    """Units of a tensor, and those whose every element is near zero."""
    assert wanted.units is not None
    if not -tensor.dim() <= wanted.units < tensor.dim() or not tensor.numel():
        return None
    dim = wanted.units % tensor.dim()
    units = tensor.shape[dim]
    epsilon = wanted.near_zero or 0.0
    # Cheaper than looking: too few elements are near zero for one whole unit of them.
    if wanted.near_zero is not None and read.near_zero_count < once.numel() // once.shape[dim]:
        return units, 0
    return units, int(count_dead(once, dim, epsilon).item()) * (units // once.shape[dim])


def _measure_update(before: Tensor, after: Tensor, wanted: Wanted) -> UpdateStatistics | None:
    if before.shape != after.shape:
        return None
    old, new = open_form(before), open_form(after)
    if old is None or new is None or old.density is not None or new.density is not None:
        return None
    if len(old.parts) != 1 or len(new.parts) != 1 or old.parts[0].shape != new.parts[0].shape:
        return None
    value = _measure_any(after, wanted)
    if value is None:
        return None
    return _read_update(old, new, wanted, value)


def _read_update(old: Form, new: Form, wanted: Wanted, value: TensorStatistics) -> UpdateStatistics:
    first, second = old.parts[0], new.parts[0]
    if first.stride() == second.stride():
        pieces = list(zip(walk(first, _PIECE), walk(second, _PIECE), strict=True))
    else:
        pieces = [(first.reshape(-1), second.reshape(-1))]

    def read(exponent: int) -> tuple[Partial, Partial]:
        reads = [read_difference(*pair, wanted, exponent) for pair in pieces]
        return merge(pair[0] for pair in reads), merge(pair[1] for pair in reads)

    update, earlier = read(0)
    if exponent := extreme_exponent(update):
        update = read(exponent)[0]
    if exponent := extreme_exponent(earlier):
        earlier = read(exponent)[1]
    return UpdateStatistics(
        conclude(update, second.numel(), wanted, notes=new.notes),
        value,
        conclude(earlier, first.numel(), _NOTHING_MORE).norm,
    )


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
