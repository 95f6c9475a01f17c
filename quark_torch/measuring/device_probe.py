"""Measurements of one step: on the CPU at once, on a GPU without ever waiting for it.

Records are made of them off the thread that trains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quark_torch.measuring.measures import (
    DeviceRing,
    Slot,
    make_rows,
    measure,
    read_row,
    ring_of,
    wait_for_rings,
)
from quark_torch.measuring.tensor_reading import (
    DenseRow,
    DenseRows,
    Form,
    open_form,
    without_repeats,
)
from quark_torch.measuring.tensor_statistics import TensorStatistics, Wanted, conclude, merge

Work = Callable[[], None]


class _Conclusions:
    """Work that is done in order on one daemon thread, which is started by the first of it."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._waiting: SimpleQueue[Work] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Have it done soon; at once where no thread is to be had."""
        if self._thread is None and not self._start():
            _do(work)
        else:
            self._waiting.put(work)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all that was submitted until now is done; whether it is."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        done = threading.Event()
        self._waiting.put(done.set)
        return done.wait(timeout_s)

    def _start(self) -> bool:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="quark-probes", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.debug("records are made on the training thread: %s", error)
                    return False
                self._thread = thread
            return True

    def _run(self) -> None:
        while True:
            _do(self._waiting.get())


def _do(work: Work) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - what comes after it must still be done
        _log.warning("Statistics of a step were lost: %s", error)


_conclusions = _Conclusions()


def conclude_later(work: Work) -> None:
    """Do some work soon on a thread of ours, in the order in which it is given."""
    _conclusions.submit(work)


def wait_for_conclusions(timeout_s: float | None) -> float | None:
    """Wait until all of it is done; what is left of the time, or None for no bound.

    Raises:
        TimeoutError: It took longer.
    """
    begin = time.monotonic()
    if not _conclusions.wait(timeout_s):
        raise TimeoutError
    return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin))


def _become_child() -> None:
    # The thread, and what it was at, are the parent's.
    global _conclusions
    _conclusions = _Conclusions()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_become_child)


_log = logging.getLogger("quark.torch")
_ROWS = 128

Emit = Callable[[Any], None]


_Read = tuple[DenseRow | TensorStatistics | int, Emit]


class _Entry(NamedTuple):
    """One tensor of a slot: its rows from `begin` to `end`, and what they are of."""

    begin: int
    end: int
    wanted: Wanted
    form: Form
    repeats: int
    units: int | None
    unit_repeats: int
    emit: Emit


class _Page:
    """A slot that is being filled."""

    def __init__(self, ring: DeviceRing, slot: Slot) -> None:
        self.ring = ring
        self.slot = slot
        self.used = 0
        self.entries: list[_Entry] = []


class Probe:
    """Measurements of one probed step; one thread at a time adds to it.

    Call `finish` at the step's end, whatever happened in it.

    Attributes:
        dropped: Tensors that were not measured because every slot was busy.
        error: What reading the last tensor that was not measured raised, or None.
    """

    def __init__(self, open_ring: Callable[[torch.device], DeviceRing | None] = ring_of) -> None:
        self.dropped = 0
        self.error: Exception | None = None
        self._open_ring = open_ring
        self._pages: dict[torch.device, list[_Page]] = {}
        self._streams: dict[torch.device, dict[int, Any]] = {}
        self._rows: DenseRows | None = None
        self._read_rows: list[_Read] = []

    @property
    def order(self) -> list[_Read]:
        """What was read until now, in order, to which a number may be added.

        Its receiver then gets that number, in its turn, after `finish`.
        """
        return self._read_rows

    def add(self, tensor: Tensor, wanted: Wanted, emit: Emit, *, later: bool = False) -> bool:
        """Measure a tensor; `emit` gets its statistics.

        Of a tensor on the CPU it gets them before this returns, and what it
        raises is raised here; with `later` it may get them some time after
        `finish`, on another thread, and the tensor is read now all the same.
        On a GPU the reductions are put on the current stream, and it gets them
        some time after `finish`, on another thread.
        While a CUDA graph is captured nothing is measured.

        Returns:
            False where nothing is measured: no elements that could be read,
            or no slot was free.
        """
        self.error = None
        # Before a ring is opened: the memory that it takes would end the capture.
        if _is_capturing(tensor):
            return False
        ring = self._open_ring(tensor.device)
        if ring is not None:
            return self._add_to(ring, tensor, wanted, emit)
        if later:
            # In the order of the calls, also where the kernel is not for a tensor.
            found = self._read(tensor, wanted) or measure(tensor, wanted, self._note_error)
            if found is not None:
                self._read_rows.append((found, emit))
            return found is not None
        statistics = measure(tensor, wanted, self._note_error)
        if statistics is None:
            return False
        emit(statistics)
        return True

    def _note_error(self, error: Exception) -> None:
        self.error = error

    def _read(self, tensor: Tensor, wanted: Wanted) -> DenseRow | None:
        try:
            if self._rows is None or self._rows.used >= _ROWS:
                self._rows = DenseRows(_ROWS)
            return self._rows.read(tensor, wanted)
        except Exception as error:  # noqa: BLE001 - as in _add_to
            _log.debug("A %s was not measured: %s", type(tensor).__name__, error)
            return None

    def finish(self) -> None:
        """End the step: one copy for each slot used, which the host does not wait for."""
        read, self._read_rows = self._read_rows, []
        self._rows = None
        if read:
            conclude_later(functools.partial(_emit_rows, read))
        pages, self._pages = self._pages, {}
        streams, self._streams = self._streams, {}
        for device, used in pages.items():
            with _on(device):
                current = _current_stream(device)
                for stream in streams.get(device, {}).values():
                    if stream != current:
                        # Backward may have run on streams of its own.
                        current.wait_stream(stream)
                for page in used:
                    consume = functools.partial(_emit_all, page.entries)
                    page.ring.send(page.slot, page.used, consume)

    def __del__(self) -> None:
        for pages in self._pages.values():
            for page in pages:
                page.ring.give_back(page.slot)

    def _add_to(self, ring: DeviceRing, tensor: Tensor, wanted: Wanted, emit: Emit) -> bool:
        try:
            with torch.no_grad(), _on(tensor.device):
                # Adding up sparse values, or cutting nested ones, waits for the device.
                if tensor.layout != torch.strided or tensor.is_nested:
                    return False
                form = open_form(tensor)
                if form is None:
                    return False
                return self._put(ring, form, wanted, emit)
        except Exception as error:  # noqa: BLE001 - a tensor that nobody foresaw must not stop training
            _log.debug("A %s was not measured: %s", type(tensor).__name__, error)
            self.error = error
            return False

    def _put(self, ring: DeviceRing, form: Form, wanted: Wanted, emit: Emit) -> bool:
        whole = form.parts[0]
        part, repeats = without_repeats(whole)
        rows = make_rows(part, wanted) if part.numel() else []
        page = self._page_for(ring, whole.device, len(rows))
        if page is None:
            self.dropped += 1
            return False
        begin = page.used
        if rows:
            torch.stack(rows, out=page.slot.rows[begin : begin + len(rows)])
        page.used += len(rows)
        units, unit_repeats = None, 1
        if wanted.units is not None and rows and -whole.dim() <= wanted.units < whole.dim():
            units = whole.shape[wanted.units]
            unit_repeats = units // part.shape[wanted.units]
        page.entries.append(
            _Entry(
                begin,
                page.used,
                wanted,
                form._replace(parts=()),
                repeats,
                units,
                unit_repeats,
                emit,
            )
        )
        if whole.device.type == "cuda":
            stream = _current_stream(whole.device)
            self._streams.setdefault(whole.device, {})[stream.cuda_stream] = stream
        return True

    def _page_for(self, ring: DeviceRing, device: torch.device, rows: int) -> _Page | None:
        pages = self._pages.setdefault(device, [])
        if pages and pages[-1].used + rows <= ring.row_count:
            return pages[-1]
        if rows > ring.row_count or (slot := ring.take()) is None:
            return None
        pages.append(_Page(ring, slot))
        return pages[-1]


def wait_for_probes(timeout_s: float | None = None) -> bool:
    """Wait until all that finished probes measured has been emitted; False if time ran out."""
    try:
        return wait_for_rings(wait_for_conclusions(timeout_s))
    except TimeoutError:
        return False


def _emit_rows(read: list[_Read]) -> None:
    for found, emit in read:
        try:
            statistics = found.rows.conclude(found) if isinstance(found, DenseRow) else found
            if statistics is not None:
                emit(statistics)
        except Exception as error:  # noqa: BLE001 - one receiver; the others get theirs
            _log.warning("Statistics of a tensor were lost: %s", error)


def _emit_all(entries: list[_Entry], rows: list[list[float]]) -> None:
    for entry in entries:
        try:
            read = [read_row(row) for row in rows[entry.begin : entry.end]]
            units = None
            if entry.units is not None:
                units = (entry.units, sum(dead for _, dead in read) * entry.unit_repeats)
            entry.emit(
                conclude(
                    merge(part for part, _ in read),
                    entry.form.element_count,
                    entry.wanted,
                    repeats=entry.repeats,
                    units=units,
                    notes=entry.form.notes,
                )
            )
        except Exception as error:  # noqa: BLE001 - one receiver; the others get theirs
            _log.warning("Statistics of a tensor were lost: %s", error)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
