"""Progress: how far a loop has come, for the one who sits before it and for any other process."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TextIO, TypeVar

from quark_core.config import settings
from quark_core.config.arguments import describe_argument
from quark_core.errors import SchemaValidationError
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.runs import RunProgress
from quark_core.runs.open_run import RunExtension

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")
_T = TypeVar("_T")

_MEAN_S = 30.0
_LINE_S = 10.0
_IN_PLACE_S = 0.5
# A rate over less is noise.
_LEAST_S = 0.2
_LARGEST = 2**53


class _Pace:
    """How many steps a second: over the whole loop, and of late, by an exponential mean.

    What stands between two passes, such as an evaluation, is part of it. Any thread may ask.
    """

    def __init__(self, done: float) -> None:
        self._lock = threading.Lock()
        self._began_s = self._seen_s = time.monotonic()
        self._began = self._seen = done
        self._late: float | None = None

    def measure(self, done: float) -> float | None:
        """The slower of both rates, or None where it is too early to say."""
        now_s = time.monotonic()
        if self._lock.acquire(blocking=False):
            try:
                self._note(done, now_s)
            finally:
                self._lock.release()
        lasted_s = now_s - self._began_s
        if lasted_s < _LEAST_S or done <= self._began:
            return None
        whole = (done - self._began) / lasted_s
        return whole if self._late is None else min(whole, self._late)

    def _note(self, done: float, now_s: float) -> None:
        since_s = now_s - self._seen_s
        if since_s < _LEAST_S:
            return
        rate = max(0.0, done - self._seen) / since_s
        weight = -math.expm1(-since_s / _MEAN_S)
        if self._late is None:
            self._late = rate
        else:
            self._late += weight * (rate - self._late)
        self._seen_s, self._seen = now_s, done


class _Count:
    """What is done of a total, of one loop or of nested ones that share it.

    Attributes:
        done: How many steps.
        total: Of how many, or None.
        sizes: Sizes of nested loops, or none.
        passes: How many times the innermost was begun.
        first: What was done before.
    """

    def __init__(self, done: int, total: int | None, sizes: tuple[int, ...]) -> None:
        self.done = self.first = done
        self.total = total
        self.sizes = sizes
        self.passes = 0
        self.pace = _Pace(done)

    def begin_pass(self) -> None:
        """Begin the innermost loop again: one that was left early is done all the same."""
        if self.sizes and self.passes:
            size = max(1, self.sizes[-1])
            self.done = max(self.done, self.first + size * self.passes)
        self.passes += 1


class _Board(RunExtension):
    """The loops of a run that go on in this process, outermost first, and what is said of them."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._open: list[Progress[Any]] = []
        self._nested: dict[tuple[int, ...], _Count] = {}
        self._last: _Count | None = None
        self._next_line_s = time.monotonic()
        self._width = 0

    def find_count(self, sizes: tuple[int, ...], done: int, total: int) -> _Count:
        """The count of nested loops, which each call for one of them goes on with."""
        with self._lock:
            found = self._nested.get(sizes)
            if found is None or found.done >= total:
                found = self._nested[sizes] = _Count(done, total, sizes)
            return found

    def begin(self, progress: Progress[Any]) -> None:
        """A loop begins."""
        with self._lock:
            if progress not in self._open:
                self._open.append(progress)
            self._last = None

    def end(self, progress: Progress[Any], *, whole: bool) -> None:
        """A loop is over."""
        with self._lock:
            if progress not in self._open:
                return
            self._open.remove(progress)
            if not self._open and (whole or progress.count.sizes):
                self._last = progress.count
        if not self._open:
            self.show(last=True)

    def describe_heartbeat(self) -> dict[str, Any]:
        """The outermost loop, with the part of its step that inner ones have done."""
        known = self._measure()
        if known is None:
            return {}
        done, total, rate, remaining_s = known
        progress = RunProgress(done, total, rate, remaining_s, format_time(now_us()))
        return {"progress": progress.to_dict()}

    def _measure(self) -> tuple[float, float | None, float | None, float | None] | None:
        with self._lock:
            counts = [each.count for each in self._open]
            count = counts[0] if counts else self._last
        if count is None:
            return None
        done = count.done + _find_part(counts[1:])
        total = None if count.total is None else float(max(count.total, count.done))
        if total is not None:
            done = min(done, total)
        rate = count.pace.measure(done)
        remaining_s = None
        if total is not None:
            left = total - done
            remaining_s = 0.0 if not left else left / rate if rate else None
        return float(done), total, rate, remaining_s

    def show(self, *, last: bool = False) -> None:
        """Print how far it is, where it is time; nothing of it may reach the loop."""
        now_s = time.monotonic()
        if not last and now_s < self._next_line_s:
            return
        try:
            stream = self._find_stream()
            if stream is None:
                self._next_line_s = now_s + _LINE_S
                return
            if stream.isatty():
                self._next_line_s = now_s + _IN_PLACE_S
                self._print_in_place(stream, last=last)
            elif not last:
                self._next_line_s = now_s + _LINE_S
                self._print_line(stream)
        except Exception as error:  # noqa: BLE001 - a line is worth no step
            self._next_line_s = math.inf
            _log.debug("progress cannot be shown: %s", error)

    def _print_line(self, stream: TextIO) -> None:
        text = self._describe()
        if text:
            stream.write(f"{text}\n")
            stream.flush()

    def _print_in_place(self, stream: TextIO, *, last: bool) -> None:
        text = self._describe()
        if not text and not self._width:
            return
        padding = " " * max(0, self._width - len(text))
        stream.write(f"\r{text}{padding}" + ("\n" if last and (text or self._width) else ""))
        stream.flush()
        self._width = 0 if last else len(text)

    def _describe(self) -> str:
        known = self._measure()
        if known is None:
            return ""
        done, total, rate, remaining_s = known
        if rate is None and total is not None and done < total:
            return ""
        said = RunProgress(done, total, rate, remaining_s).describe()
        return f"quark: {said}"

    def _find_stream(self) -> TextIO | None:
        run = self._run
        shows = run.leads and not run.forked and run.stream.active
        if not shows or settings.is_quiet() or not settings.shows_progress() or _has_bars():
            return None
        return sys.stderr


class Progress(Generic[_T]):
    """A loop that tells how far it has come; iterate it, or call `advance()` at each step.

    Made by `metrics.progress`. As a context manager it says at the end that the loop is over.
    """

    def __init__(self, board: _Board, iterable: Iterable[_T] | None, count: _Count) -> None:
        self.count = count
        self._board = board
        self._iterable = iterable
        self._silent = type(iterable).__module__.partition(".")[0] == "tqdm"
        # A length that was found out is that of one pass, and each pass begins anew.
        self._restarts = False
        self._due_s = time.monotonic() + _LEAST_S
        if iterable is None:
            board.begin(self)

    @property
    def done(self) -> int:
        """How many steps are done."""
        return self.count.done

    @property
    def total(self) -> int | None:
        """How many there are, or None where nobody knows."""
        return self.count.total

    def advance(self, steps: int = 1) -> None:
        """Say that so many further steps are done.

        Raises:
            SchemaValidationError: `steps` is no integer that is not negative.
        """
        self.count.done += _check_amount(steps, "steps")
        self._look()

    def update(self, steps: int = 1) -> None:
        """The same as `advance`, as tqdm calls it."""
        self.advance(steps)

    def reach(self, step: int | tuple[int, ...]) -> None:
        """Say how far the loop is: a number of steps, or the places of nested loops.

        Raises:
            SchemaValidationError: `step` is not given as `total` is.
        """
        self.count.done = _flatten_place(step, self.count.sizes, "step")
        self._look()

    def close(self) -> None:
        """Say that the loop is over; a second call does nothing."""
        count = self.count
        self._board.end(self, whole=count.total is None or count.done >= count.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        if self._iterable is None:
            raise TypeError("this progress iterates nothing")
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_T]:
        if self._iterable is None:
            raise SchemaValidationError(
                "metrics.progress(total=…) has nothing to iterate. Call advance() at each step, "
                "or pass an iterable"
            )
        return self._iterate(self._iterable)

    def _iterate(self, iterable: Iterable[_T]) -> Iterator[_T]:
        if self._restarts and self.count.passes:
            self.count = _Count(0, self.count.total, ())
        count = self.count
        count.begin_pass()
        self._board.begin(self)
        clock = time.monotonic
        whole = False
        try:
            for item in iterable:
                yield item
                count.done += 1
                if clock() >= self._due_s:
                    self._look()
            whole = True
        finally:
            self._board.end(self, whole=whole)

    def _look(self) -> None:
        self._due_s = time.monotonic() + _LEAST_S
        if not self._silent:
            self._board.show()

    def __repr__(self) -> str:
        total = "" if self.count.total is None else f" of {self.count.total}"
        return f"Progress({self.count.done}{total})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Progress belongs to its process and cannot be pickled or copied")


def open_progress(
    run: OpenRun, iterable: Iterable[_T] | None, total: object, start: object
) -> Progress[_T]:
    """The progress of a loop of a run; see `MetricsLogger.progress`.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    ways = ("__iter__", "__getitem__")
    if iterable is not None and not any(hasattr(iterable, way) for way in ways):
        hint = f"; write total={describe_argument(iterable)}" if isinstance(iterable, int) else ""
        raise SchemaValidationError(
            f"iterable must be iterable, not {type(iterable).__name__}{hint}"
        )
    sizes = _check_sizes(total)
    length = _find_length(iterable) if total is None else None
    whole = (
        math.prod(sizes) if sizes else length if total is None else _check_amount(total, "total")
    )
    if start is None:
        done = run.first_step or 0 if total is not None else 0
    else:
        done = _flatten_place(start, sizes, "start")
    if whole is not None:
        done = min(done, whole)
    board = _find_board(run)
    count = board.find_count(sizes, done, whole or 0) if sizes else _Count(done, whole, ())
    progress: Progress[_T] = Progress(board, iterable, count)
    progress._restarts = total is None
    return progress


def _find_board(run: OpenRun) -> _Board:
    with run.lock:
        board = run.extensions.get(_Board)
        if not isinstance(board, _Board):
            board = run.extensions[_Board] = _Board(run)
        return board


def _find_part(inner: list[_Count]) -> float:
    """The part of a step that the loops inside of it have done; 0 where that is not known."""
    part = 0.0
    for count in reversed(inner):
        part = 0.0 if not count.total else min(1.0, (count.done + part) / count.total)
    return part


def _find_length(iterable: object) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - an IterableDataset's loader, or one that cannot say it
        return None


def _check_sizes(total: object) -> tuple[int, ...]:
    if not isinstance(total, (tuple, list)):
        return ()
    if not total:
        raise SchemaValidationError("total must not be empty: write total=(epochs, batches)")
    return tuple(_check_amount(size, f"total[{place}]") for place, size in enumerate(total))


def _check_amount(amount: object, argument: str) -> int:
    # numpy's integers are as good.
    try:
        number = None if isinstance(amount, bool) else amount.__index__()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        number = None
    if not isinstance(number, int) or not 0 <= number <= _LARGEST:
        raise SchemaValidationError(
            f"{argument} must be a non-negative integer, got {describe_argument(amount)}"
        )
    return number


def _flatten_place(place: object, sizes: tuple[int, ...], argument: str) -> int:
    """A place in nested loops as a number of steps.

    Raises:
        SchemaValidationError: It is not given as `total` is.
    """
    if not isinstance(place, (tuple, list)):
        return _check_amount(place, argument)
    if len(place) != len(sizes):
        raise SchemaValidationError(
            f"{argument} has {len(place)} numbers, but total has {len(sizes)}. Pass as many"
        )
    done = 0
    for index, (at, size) in enumerate(zip(place, sizes, strict=True)):
        done = done * size + _check_amount(at, f"{argument}[{index}]")
    return done


def _has_bars() -> bool:
    """Whether a bar of tqdm is shown now, which would be written through."""
    bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(len(getattr(bar, "_instances", ())))
