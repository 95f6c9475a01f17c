"""Measuring tensors, each element read once where the kernel allows.

Every function may be called from any thread. None of them changes a tensor,
its version, its graph or the grad mode, and none raises: what cannot be
measured (meta and fake tensors, those inside of functorch's transforms,
memory that was freed) gives None.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quark_torch.device_rows import count_dead
from quark_torch.kernel_reading import (
    measure_dense,
    measure_dense_many,
    measure_dense_update,
    measure_dense_updates,
    read_dense,
)
from quark_torch.partials import Partial, TensorStatistics, Wanted, conclude, merge
from quark_torch.sample_variation import measure_variation
from quark_torch.tensor_forms import Form, open_form, walk, without_repeats
from quark_torch.torch_reading import extreme_exponent, read_difference, read_flat

__all__ = ["UpdateStatistics", "measure", "measure_many", "measure_update", "measure_updates"]

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


def measure(tensor: Tensor, wanted: Wanted = _NOTHING_MORE) -> TensorStatistics | None:
    """Statistics of a tensor, now.

    On a GPU this waits for the device; `Probe` does not.

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
