"""Reading tensors with the compiled kernel: which it can read, and how it is asked."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quark_torch.kernels.compiled_probing import find_hooks
from quark_torch.kernels.loader import find_kernel
from quark_torch.measuring.partials import Partial, TensorStatistics, Wanted, conclude
from quark_torch.measuring.tensor_forms import is_plain, memory_order
from quark_torch.measuring.torch_reading import extreme_exponent

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_JOB = struct.Struct("=qqqqqdddqqqQ")
_RESULT = struct.Struct("=qqqqqqdddddd")
_LIMITS = struct.Struct("=qdddQ")
_tracing_state = torch._C._get_tracing_state
_NEAR_ZERO, _SATURATION = 1, 2
_LARGEST_SINGLE = float(np.finfo(np.float32).max)


class _Limits(NamedTuple):
    flags: int
    near_zero: float
    low: float
    high: float
    near_zero_bits: int


class _Space:
    """Memory for the results of up to two jobs."""

    __slots__ = ("address", "memory")

    def __init__(self, results: int = 2) -> None:
        self.memory = ctypes.create_string_buffer(_RESULT.size * results)
        self.address = ctypes.addressof(self.memory)


# Taken and given back whole, so that threads, and a signal's handler in the
# middle of a call, each have one of their own.
_spaces: list[_Space] = []


def measure_dense(tensor: Tensor, wanted: Wanted) -> TensorStatistics | None:
    """Statistics of a plain dense tensor in one read; None where the kernel is not for it."""
    kernel = find_kernel()
    if kernel is None or (job := _job(tensor, wanted)) is None:
        return None
    space = _spaces.pop() if _spaces else _Space()
    kernel.measure(job, space.address, 1, kernel.level)
    row = _RESULT.unpack_from(space.memory)
    _spaces.append(space)
    return _conclude(tensor, row, wanted)


class DenseRows:
    """Room for what the kernel reads of many tensors, to be made statistics of later."""

    __slots__ = ("_full", "_space", "used")

    def __init__(self, results: int) -> None:
        self._space = _Space(results)
        self._full = results
        self.used = 0

    def read(self, tensor: Tensor, wanted: Wanted) -> DenseRow | None:
        """Read a tensor now; None where it is full, or where that is not enough to know all."""
        index = self.used
        # Of float64 the squares may leave the range, so that it has to be read again.
        if index >= self._full or tensor.dtype == torch.float64:
            return None
        kernel = find_kernel()
        if kernel is None or (job := _job(tensor, wanted)) is None:
            return None
        self.used = index + 1
        kernel.measure(job, self._space.address + index * _RESULT.size, 1, kernel.level)
        units = None
        if wanted.units is not None and tensor.numel():
            units = tensor.shape[wanted.units]
        return DenseRow(self, index, tensor.numel(), units, wanted)

    def conclude(self, row: DenseRow) -> TensorStatistics | None:
        """Statistics of a tensor that was read; None where there was no memory for its units."""
        result = _RESULT.unpack_from(self._space.memory, row.place * _RESULT.size)
        return read_result(result, row.element_count, row.units, row.wanted)


class DenseRow(NamedTuple):
    """One tensor of `DenseRows`."""

    rows: DenseRows
    place: int
    element_count: int
    units: int | None
    wanted: Wanted


def measure_dense_many(tensors: Sequence[Tensor], wanted: Wanted) -> list[TensorStatistics | None]:
    """As `measure_dense`, of each, with one call of the kernel."""
    found: list[TensorStatistics | None] = [None] * len(tensors)
    kernel = find_kernel()
    if kernel is None:
        return found
    hooks = find_hooks() if wanted.units is None else None
    if hooks is not None and _tracing_state() is None:
        rows = hooks.measure(
            tuple(tensors), None, kernel.address, kernel.level, pack_limits(wanted)
        )
        return [None if row is None else read_result(row[1], row[0], None, wanted) for row in rows]
    jobs = [_job(tensor, wanted) for tensor in tensors]
    mine = [index for index, job in enumerate(jobs) if job is not None]
    space = _Space(len(mine))
    kernel.measure(
        b"".join([job for job in jobs if job is not None]), space.address, len(mine), kernel.level
    )
    for index, row in zip(mine, _RESULT.iter_unpack(space.memory), strict=True):
        found[index] = _conclude(tensors[index], row, wanted)
    return found


def measure_dense_update(
    before: Tensor, after: Tensor, wanted: Wanted
) -> tuple[TensorStatistics, TensorStatistics, float] | None:
    """Statistics of after less before, those of after, and the norm of before, in one read."""
    kernel = find_kernel()
    if (
        kernel is None
        or not is_plain(before)
        or before.dtype != after.dtype
        or before.shape != after.shape
        or not before.is_cpu
        or before.is_nested
        or before.layout != torch.strided
        or before.stride() != after.stride()
        or before.is_neg()
        or (before.data_ptr() == 0 and before.numel())
    ):
        return None
    job = _job(after, wanted, before.data_ptr())
    if job is None:
        return None
    if not after.numel():
        return None
    space = _spaces.pop() if _spaces else _Space()
    kernel.measure(job, space.address, 1, kernel.level)
    row, after_row = _RESULT.iter_unpack(space.memory)
    _spaces.append(space)
    update, value = _conclude(after, row, wanted), _conclude(after, after_row, wanted)
    squares = row[10]
    # Squares of such float64 elements may have left the range: read again, with a scale.
    if after.dtype == torch.float64 and not 1e-280 < squares < 1e280 and squares != 0:
        return None
    if update is None or value is None or (squares == 0 and after.dtype == torch.float64):
        return None
    return update, value, math.sqrt(squares)


def measure_dense_updates(
    befores: Sequence[Tensor], afters: Sequence[Tensor], wanted: Wanted
) -> list[tuple[TensorStatistics, TensorStatistics, float] | None]:
    """As `measure_dense_update`, of each, with one call of compiled code where there is any."""
    kernel, hooks = find_kernel(), find_hooks()
    if kernel is None or hooks is None or _tracing_state() is not None:
        return [
            measure_dense_update(before, after, wanted)
            for before, after in zip(befores, afters, strict=True)
        ]
    rows = hooks.measure(
        tuple(afters), tuple(befores), kernel.address, kernel.level, pack_limits(wanted)
    )
    found: list[tuple[TensorStatistics, TensorStatistics, float] | None] = []
    for row in rows:
        if row is None:
            found.append(None)
            continue
        count, update, after = row
        found.append(
            (
                conclude(_partial(update), count, wanted),
                conclude(_partial(after), count, wanted),
                math.sqrt(update[10]),
            )
        )
    return found


def read_dense(flat: Tensor, wanted: Wanted) -> Partial | None:
    """Read a plain contiguous tensor; None where the kernel is not for it."""
    kernel = find_kernel()
    wanted = wanted if wanted.units is None else wanted._replace(units=None)
    if kernel is None or (job := _job(flat, wanted)) is None:
        return None
    space = _spaces.pop() if _spaces else _Space()
    kernel.measure(job, space.address, 1, kernel.level)
    row = _RESULT.unpack_from(space.memory)
    _spaces.append(space)
    return _partial(row)


def _job(tensor: Tensor, wanted: Wanted, before: int = 0) -> bytes | None:
    """A packed job, or None for a tensor that the kernel must not touch."""
    code = _CODES.get(tensor.dtype)
    if (
        code is None
        or not is_plain(tensor)
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.layout != torch.strided
        or tensor.is_neg()
    ):
        return None
    if not tensor.is_contiguous() and memory_order(tensor) is None:
        return None
    count, address = tensor.numel(), tensor.data_ptr()
    if address == 0 and count:
        return None
    limits = _limits(code, wanted)
    outer = units = inner = 0
    if wanted.units is not None and count:
        shape = tensor.shape
        if not -len(shape) <= wanted.units < len(shape):
            return None
        units = shape[wanted.units]
        inner = count if units == 1 else tensor.stride(wanted.units)
        outer = count // (units * inner)
    return _JOB.pack(
        address,
        before,
        count,
        code,
        limits.flags,
        limits.near_zero,
        limits.low,
        limits.high,
        outer,
        units,
        inner,
        limits.near_zero_bits,
    )


@functools.lru_cache(maxsize=256)
def pack_limits(wanted: Wanted) -> bytes:
    """What is wanted, for each dtype that the kernel knows, as `probing.c` takes it."""
    return b"".join([_LIMITS.pack(*_limits(code, wanted)) for code in range(len(_CODES))])


def read_result(
    result: tuple[Any, ...], element_count: int, units: int | None, wanted: Wanted
) -> TensorStatistics | None:
    """Statistics of a result; None where there was no memory for the units."""
    if units is not None and result[5] < 0:
        return None
    dead = None if units is None else (units, result[5])
    return conclude(
        _partial(result), element_count, wanted, units=dead, variation=_read_variation(result)
    )


def _partial(row: tuple[Any, ...]) -> Partial:
    finite, nans, infinities, near_zero, saturated, _, mean, squares, minimum, maximum = row[:10]
    return Partial(finite, nans, infinities, near_zero, saturated, mean, squares, minimum, maximum)


def _read_variation(row: tuple[Any, ...]) -> float | None:
    variation: float = row[11]
    return None if variation != variation else variation  # NaN where it is not known


def _conclude(tensor: Tensor, row: tuple[Any, ...], wanted: Wanted) -> TensorStatistics | None:
    part = _partial(row)
    if tensor.dtype == torch.float64 and extreme_exponent(part):
        return None
    units = None
    count = tensor.numel()
    if wanted.units is not None and count:
        if row[5] < 0:
            return None  # no memory for the units
        units = (tensor.shape[wanted.units], row[5])
    return conclude(part, count, wanted, units=units, variation=_read_variation(row))


@functools.lru_cache(maxsize=256)
def _limits(code: int, wanted: Wanted) -> _Limits:
    """What is wanted, in numbers of the dtype such that comparing is as exact as in float64."""
    flags = 0
    near_zero, low, high = 0.0, -math.inf, math.inf
    if wanted.near_zero is not None or wanted.units is not None:
        flags |= _NEAR_ZERO
        near_zero = wanted.near_zero or 0.0
    if wanted.saturation is not None:
        flags |= _SATURATION
        low, high = wanted.saturation
    if code != 1:
        near_zero, low, high = _single_below(near_zero), _single_below(low), -_single_below(-high)
    return _Limits(flags, near_zero, low, high, _magnitude_bits(code, near_zero))


def _single_below(value: float) -> float:
    """The largest finite float32 up to a number, or minus infinity."""
    if value >= _LARGEST_SINGLE:
        return _LARGEST_SINGLE
    if value < -_LARGEST_SINGLE:
        return -math.inf
    single = np.float32(value)
    # As Python's floats: NumPy would compare in float32.
    return float(single if float(single) <= value else np.nextafter(single, np.float32(-math.inf)))


def _magnitude_bits(code: int, epsilon: float) -> int:
    """Bits of the largest number of the dtype up to the epsilon, which is one of float32."""
    if not epsilon > 0:
        return 0
    if code == 1:
        return int(np.float64(min(epsilon, np.finfo(np.float64).max)).view(np.uint64))
    single_bits = int(np.float32(epsilon).view(np.uint32))
    if code == 0:
        return single_bits
    if code == 2:
        return single_bits >> 16
    half = np.float16(min(epsilon, 65504.0))
    if float(half) > epsilon:
        half = np.nextafter(half, np.float16(0))
    return int(half.view(np.uint16))
