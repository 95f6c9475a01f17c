"""Statistics of a tensor on a device as rows of numbers, and their way to the host.

Nothing here waits for a device.
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

import torch
from torch import Tensor

from quark_torch.measuring.partials import Partial, Wanted
from quark_torch.measuring.tensor_forms import walk

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
            _log.warning("Statistics of a probe were lost: %s", error)
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
