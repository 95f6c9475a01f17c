"""The forms of tensors, and reading their elements with the compiled kernel or with PyTorch."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quark_torch.kernels.compiled_probing import find_hooks
from quark_torch.kernels.loader import find_kernel
from quark_torch.measuring.tensor_statistics import (
    NOTHING,
    Partial,
    TensorStatistics,
    Wanted,
    conclude,
    merge,
)


class Form(NamedTuple):
    """A tensor as dense parts.

    Attributes:
        parts: What to read: detached, strided, real or complex.
        element_count: Elements of the whole, stored or not.
        density: Stored elements over all, for a sparse tensor only.
        notes: As of `TensorStatistics`.
        has_units: Whether the one part has the dimensions of the tensor.
    """

    parts: tuple[Tensor, ...]
    element_count: int
    density: float | None = None
    notes: tuple[str, ...] = ()
    has_units: bool = True


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda _: False)
_tracing_state = getattr(torch._C, "_get_tracing_state", lambda: None)


def is_plain(tensor: object) -> bool:
    """True of a tensor whose memory may be read directly, as far as its class says."""
    return type(tensor) in _PLAIN and not _is_wrapped(tensor) and _tracing_state() is None


def open_form(tensor: Tensor) -> Form | None:
    """A tensor as dense parts, or None where it has no elements that could be read.

    Called without gradients.
    """
    if _tracing_state() is not None or _is_wrapped(tensor) or _is_hollow(tensor):
        return None
    if tensor.is_nested:
        return Form(
            tuple(part.detach() for part in tensor.unbind()),
            sum(part.numel() for part in tensor.unbind()),
            has_units=False,
        )
    if tensor.layout != torch.strided:
        return _open_sparse(tensor)
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        return _open_shard(tensor)
    if tensor.is_quantized:
        return Form((tensor.detach(),), tensor.numel(), notes=("quantized: of dequantized values",))
    notes = ("complex: of the magnitudes",) if tensor.dtype.is_complex else ()
    return Form((tensor.detach(),), tensor.numel(), notes=notes)


def _is_hollow(tensor: Tensor) -> bool:
    """True of tensors without elements: meta and fake ones, and those in transforms."""
    if tensor.is_meta:
        return True
    if type(tensor) in _PLAIN:
        # Freed memory, as of a sharded parameter that is not gathered.
        return bool(
            tensor.layout == torch.strided
            and tensor.numel()
            and not tensor.is_nested
            and tensor.data_ptr() == 0
            and not tensor._is_zerotensor()
        )
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def _open_sparse(tensor: Tensor) -> Form:
    tensor = tensor.detach()
    # Values of one place are its value together only once they are added up.
    values = (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()
    count = tensor.numel()
    notes = ["sparse: of the stored values"]
    if values.dtype.is_complex:
        notes.append("complex: of the magnitudes")
    return Form(
        (values,),
        count,
        density=values.numel() / count if count else 0.0,
        notes=tuple(notes),
        has_units=False,
    )


def _open_shard(tensor: Any) -> Form | None:
    """Open the part of a distributed tensor that this process holds; nothing is gathered."""
    placements = getattr(tensor, "placements", ())
    local = tensor.detach().to_local()
    if hasattr(local, "wait") and type(local) not in _PLAIN:
        local = local.wait()
    form = open_form(local)
    if form is None:
        return None
    if any(placement.is_partial() for placement in placements):
        note = "scope: local_partial"
    elif all(placement.is_replicate() for placement in placements):
        return form
    else:
        note = "scope: local_shard"
    return form._replace(notes=(*form.notes, note))


def without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements of an expanded tensor once, and how often each of them is there."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            repeats *= size
            tensor = tensor.narrow(dim, 0, 1)
    return tensor, repeats


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the widest stride to the narrowest, if the memory has no gaps.

    None where elements overlap or lie apart.
    """
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if sizes[dim] == 1:
            continue
        if strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return tuple(order)


def walk(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """All elements as one-dimensional pieces; copies of at most so many, where they lie apart."""
    order = memory_order(tensor)
    if order is not None and not tensor.is_quantized and not (tensor.is_neg() or tensor.is_conj()):
        # In the order of the memory nothing is copied, whatever the format.
        yield tensor.permute(order).reshape(-1)
        return
    yield from _copies(tensor, limit)


def _copies(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    count = tensor.numel()
    if count <= limit:
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        yield tensor.resolve_conj().resolve_neg().reshape(-1)
        return
    dim = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    size = tensor.shape[dim]
    many = max(1, limit * size // count)
    for begin in range(0, size, many):
        yield from _copies(tensor.narrow(dim, begin, min(many, size - begin)), limit)


# Reading elements with PyTorch's own operations, a small block of float64 at a time.
#
# Of PyTorch's reductions only the cheap ones are used: on a CPU `var_mean`,
# `std_mean` and the infinity norm cost as much as 70 to 127 reads.

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


_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_JOB = struct.Struct("=qqqqqdddqqqQ")
_RESULT = struct.Struct("=qqqqqqdddddd")
_LIMITS = struct.Struct("=qdddQ")
_kernel_reading_tracing_state = torch._C._get_tracing_state
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
    row = _read(tensor, wanted)
    return None if row is None else _conclude(tensor, row, wanted)


def _read(tensor: Tensor, wanted: Wanted) -> tuple[Any, ...] | None:
    kernel = find_kernel()
    if kernel is None or (job := _job(tensor, wanted)) is None:
        return None
    space = _spaces.pop() if _spaces else _Space()
    kernel.measure(job, space.address, 1, kernel.level)
    row = _RESULT.unpack_from(space.memory)
    _spaces.append(space)
    return row


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
    if hooks is not None and _kernel_reading_tracing_state() is None:
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
    if kernel is None or hooks is None or _kernel_reading_tracing_state() is not None:
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
    row = _read(flat, wanted if wanted.units is None else wanted._replace(units=None))
    return None if row is None else _partial(row)


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
    if tensor.dtype == torch.float64 and extreme_exponent(_partial(row)):
        return None
    count = tensor.numel()
    units = tensor.shape[wanted.units] if wanted.units is not None and count else None
    return read_result(row, count, units, wanted)


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
