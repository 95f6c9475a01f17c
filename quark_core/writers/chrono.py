"""Blocks that are timed: what `metrics.chrono` returns."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, cast

from quark_core.errors import SchemaValidationError
from quark_core.writers.aggregates import LONG_QUEUE, Gathering
from quark_core.writers.device_timing import (
    CudaClock,
    DeviceClock,
    DeviceEvent,
    DeviceMarks,
    PendingSteps,
    StepTimes,
    open_device_clock,
)

if TYPE_CHECKING:
    from quark_core.writers.aggregates import Aggregates

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MakesChronos(Protocol):
    """A logger, as far as a decorated function needs it."""

    def chrono(self, key: str, *, device: Any = False) -> Chrono:
        """A block."""


class Chrono:
    """A block that is timed, by a clock that nobody can set; also a decorator of functions.

    Each `metrics.chrono(key)` is one of its own, so that blocks may be nested, and be left and
    entered in any order. One that is kept may be used again by the same thread.
    An exception that leaves the block passes through; the block then counts as failed.
    """

    __slots__ = ("_device", "_gathering", "_items", "_key", "_metrics", "_outer", "_start_s")

    def __init__(self, metrics: MakesChronos, key: str, gathering: Gathering) -> None:
        self._metrics = metrics
        self._key = key
        self._gathering = gathering
        self._items: deque[Any] = gathering.items
        self._start_s = 0.0
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        if self._start_s:  # this very object is in a block already
            self._outer = (self._start_s, self._outer)
        self._start_s = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        took_s = perf_counter() - self._start_s
        items = self._items
        items.append(took_s if kind is None else None)
        if len(items) > LONG_QUEUE:
            self._gathering.fold()
        if self._outer:
            self._start_s, self._outer = self._outer
        else:
            self._start_s = 0.0

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Time each call of a function; of an async one until it is done, waiting included.

        Of a generator function each pass, from its first item to its end, is one block. After
        the end of the run the function works on and is not timed.
        """
        return _decorate(function, self._make_again)

    def _make_again(self) -> Chrono:
        return self._metrics.chrono(self._key, device=getattr(self, "_device", False))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._key!r})"


class DeviceChrono(Chrono):
    """A block whose work on a GPU is timed by marks in its stream; nobody waits for the GPU.

    Its time comes in when the device has passed its end and a later block of the device is left,
    or the run ends. Where the device cannot be marked, it is the host's time.
    """

    __slots__ = ("_entered", "_pending")

    def __init__(
        self,
        metrics: MakesChronos,
        key: str,
        gathering: Gathering,
        device: object,
        pending: PendingSteps,
    ) -> None:
        super().__init__(metrics, key, gathering)
        self._device = device
        self._pending = pending
        self._entered: list[tuple[float, DeviceEvent | None]] = []

    def __enter__(self) -> Self:
        self._entered.append((perf_counter(), self._pending.mark()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start_s, start = self._entered.pop()
        if kind is not None:
            self._items.append(None)
            return
        pending = self._pending
        end = None if start is None else pending.mark()
        wall = StepTimes((perf_counter() - start_s) * 1000.0, None, None)
        marks = None if start is None or end is None else DeviceMarks(start, None, end)
        pending.add(marks, wall, self._keep)
        pending.poll()

    def _keep(self, times: StepTimes, timing: str) -> None:
        """Take the time of a block; called once for each, by whichever thread finds it done."""
        took_ms = times.step_ms
        if took_ms is None:
            return
        gathering = self._gathering
        gathering.items.append(took_ms / 1000.0)
        # A block without marks has only waited for those before it.
        gathering.clocks.add(timing)
        if len(gathering.items) > LONG_QUEUE:
            gathering.fold()


def find_pending(
    aggregates: Aggregates, device: object, find: Callable[[object], DeviceClock | None]
) -> PendingSteps | None:
    """Where the blocks of a device wait; None where there is no such device here.

    Args:
        aggregates: Whose they are.
        device: As `metrics.chrono` takes it, but for False.
        find: Finds a device's clock.

    Raises:
        SchemaValidationError: `device` is no device.
    """
    clock = find(device)
    if clock is None:
        return None
    return aggregates.share_pending(str(device), lambda: PendingSteps(clock))


def find_clock(device: object) -> DeviceClock | None:
    """The clock of a device; of True that of torch's current one."""
    if device is not True:
        return open_device_clock(device)
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_available():
            return None
    except Exception:  # noqa: BLE001 - a driver may raise anything
        return None
    return CudaClock(torch, None)


def _decorate(function: Callable[_P, _R], make: Callable[[], Chrono]) -> Callable[_P, _R]:
    if not callable(function):
        raise SchemaValidationError(
            f"metrics.chrono(key) decorates a function, not a {type(function).__name__}"
        )
    import inspect

    plain: Any = function
    made: Any
    if inspect.iscoroutinefunction(plain):

        async def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                return await plain(*args, **kwargs)

    elif inspect.isasyncgenfunction(plain):

        async def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                async for item in plain(*args, **kwargs):
                    yield item

    elif inspect.isgeneratorfunction(plain):

        def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                return (yield from plain(*args, **kwargs))

    else:

        def made(*args: Any, **kwargs: Any) -> Any:
            with make():
                return plain(*args, **kwargs)

    return cast("Callable[_P, _R]", functools.wraps(function)(made))
