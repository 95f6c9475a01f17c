"""Measuring tensors and histograms, each element read once, on the host and on a device.

Every function may be called from any thread. None of them changes a tensor,
its version, its graph or the grad mode, and none raises: what cannot be
measured (meta and fake tensors, those inside of functorch's transforms,
memory that was freed) gives None.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quark_torch.measuring.tensor_reading import (
    Form,
    extreme_exponent,
    measure_dense,
    measure_dense_many,
    measure_dense_update,
    measure_dense_updates,
    memory_order,
    open_form,
    read_dense,
    read_difference,
    read_flat,
    walk,
    widen,
    without_repeats,
)
from quark_torch.measuring.tensor_statistics import (
    Partial,
    TensorStatistics,
    Wanted,
    conclude,
    merge,
)

# Statistics of a tensor on a device as rows of numbers, and their way to the host.
#
# Nothing here waits for a device.

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


_log = logging.getLogger("quark.torch")

Consume = Callable[[list[list[float]]], None]


class Event(Protocol):
    """A mark in the work of a device."""

    def record(self) -> None:
        """Set it behind what was given to the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


class Slot(NamedTuple):
    """Rows on the device, their copy on the host, and the mark that says the copy is there."""

    rows: Tensor
    host: Tensor
    event: Event


class DeviceRing:
    """A few slots of rows of one device, and the thread that reads them.

    May be used from any thread.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        slot_count: int = 4,
        row_count: int = 512,
        make_event: Callable[[], Event],
    ) -> None:
        pinned = device.type == "cuda"
        shape = (row_count, COLUMNS)
        self.row_count = row_count
        self._free = [
            Slot(
                torch.zeros(shape, dtype=torch.float64, device=device),
                torch.zeros(shape, dtype=torch.float64, device="cpu", pin_memory=pinned),
                make_event(),
            )
            for _ in range(slot_count)
        ]
        self._sent: queue.SimpleQueue[tuple[Slot, int, Consume]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def take(self) -> Slot | None:
        """A slot that is free, or None; never waits."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, slot: Slot) -> None:
        """Free a slot of which nothing was sent."""
        self._free.append(slot)

    def send(self, slot: Slot, row_count: int, consume: Consume) -> None:
        """Copy rows to the host behind the work of the current stream; `consume` gets them.

        It is called on a thread of the ring's own.
        """
        slot.host[:row_count].copy_(slot.rows[:row_count], non_blocking=True)
        slot.event.record()
        with self._changed:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._read_forever, name="quark-torch-probe", daemon=True
                )
                self._thread.start()
        self._sent.put((slot, row_count, consume))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was sent has been consumed; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _read_forever(self) -> None:
        while True:
            self._read_one(*self._sent.get())

    def _read_one(self, slot: Slot, row_count: int, consume: Consume) -> None:
        try:
            slot.event.synchronize()
            rows = slot.host[:row_count].tolist()
            # Free before what may take long, so that the next probe finds it.
            self._free.append(slot)
            consume(rows)
        except Exception as error:  # noqa: BLE001 - the device or the receiver; the thread goes on
            _log.warning("Statistics of a sampled step were lost: %s", error)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()


_rings: dict[torch.device, DeviceRing] = {}
_opening = threading.Lock()


def cuda_event() -> Event:
    """An event whose waiting thread sleeps."""
    event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event


def ring_of(device: torch.device) -> DeviceRing | None:
    """The ring of a CUDA device; None of any other, whose tensors are measured at once."""
    if device.type != "cuda":
        return None
    ring = _rings.get(device)
    if ring is None:
        with _opening:
            ring = _rings.get(device)
            if ring is None:
                ring = _rings[device] = DeviceRing(device, make_event=cuda_event)
    return ring


def wait_for_rings(timeout_s: float | None = None) -> bool:
    """Wait for the rings of all devices; False if time ran out."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    return all(
        ring.wait(None if until is None else max(0.0, until - time.monotonic()))
        for ring in list(_rings.values())
    )


# Neither the threads of the rings nor CUDA itself live on in a forked child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rings.clear)


# Statistics of tensors, each element read once; knows no hooks, no modules and no records.
#
# Every function may be called from any thread. None of them changes a tensor,
# its version, its graph or the grad mode, and none raises: what cannot be
# measured (meta and fake tensors, those inside of functorch's transforms,
# memory that was freed) gives None.


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
