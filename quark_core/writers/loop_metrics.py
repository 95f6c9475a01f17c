"""LoopMetrics: the part of MetricsLogger that measures in a loop, many times a second."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.kinds.provenance import AggregateKeep, KeptAs
from quark_core.records.names import check_name
from quark_core.runs.step_counters import read_step
from quark_core.writers.aggregates import LONG_QUEUE, Gathering, find_aggregates
from quark_core.writers.chrono import Chrono, DeviceChrono, find_clock, find_pending
from quark_core.writers.scalars import to_float

if TYPE_CHECKING:
    from quark_core.runs.aggregates import AggregateTable
    from quark_core.runs.open_run import OpenRun
    from quark_core.writers.progress import Progress

_log = logging.getLogger("quark")
_T = TypeVar("_T")


class LoopMetrics:
    """Times blocks, sums up values, tells how far a loop has come."""

    _run: OpenRun
    _closed: bool

    def _bind_gatherings(self) -> None:
        """Forget where values went: the run has another stream, or this is a forked child."""
        self._timers: dict[Any, Gathering] = {}
        self._gatherings: dict[Any, Gathering] = {}

    def chrono(self, key: str, *, device: Any = False) -> Chrono:
        """Time a block: `with metrics.chrono("forward"):`, or each call of a function: `@…`.

        Costs about a microsecond a block and never waits. Times are summed up: a record for
        each key and 10 s, and at the end. The first block of a process is kept apart as `first`
        and is in no other figure; one that is left by an exception (also by `close` of a
        generator) counts as `failed`. Blocks may be nested and recursive, in any threads; in a
        forked child take the block anew. After the end of the run nothing is timed.

        Args:
            key: Name of the timer. More than 1,000 keys in a run are not kept.
            device: True to time what a GPU does, by marks in the current stream of torch's
                current device; or a device, such as "cuda:1". Elsewhere than on CUDA it is
                the host's time.

        Raises:
            SchemaValidationError: A bad argument, or a key that `aggregate` uses; the message
                names it.
        """
        if device is False and self._run.refusal is None and not self._closed:
            try:
                return Chrono(self, key, self._timers[key])
            except Exception:  # noqa: BLE001, S110 - new, or an object that raises when hashed
                pass
        return self._open_chrono(key, device)

    def _open_chrono(self, key: object, device: object) -> Chrono:
        run = self._run
        if callable(key):
            raise SchemaValidationError(
                'key must be a str, not a function: write @metrics.chrono("name")'
            )
        name = check_name(key, "key")
        if self._closed or run.is_over:
            _tell_late(run)
            return Chrono(self, name, find_aggregates(run).sink("timer"))
        gathering = self._timers.get(name)
        if gathering is None:
            gathering = self._open_gathering(name, "timer")
            if gathering.is_kept:
                self._timers[name] = gathering
        if device is False or device is None:
            return Chrono(self, name, gathering)
        pending = find_pending(find_aggregates(run), device, find_clock)
        if pending is None:
            return Chrono(self, name, gathering)
        return DeviceChrono(self, name, gathering, device, pending)

    def aggregate(
        self, key: str, value: Any, *, keep: AggregateKeep = "stat", step: int | None = None
    ) -> None:
        """Sum up a value that comes too often for a point each time, such as one of each batch.

        Costs about a microsecond. A record leaves for each key and 10 s, at `flush` and at
        the end. Of a process that is killed, at most the last 10 s are lost.

        Args:
            key: Full key, as of `log`. More than 1,000 keys in a run are not kept.
            value: As of `log`. NaN and infinities are counted apart.
            keep: "stat": count, mean, deviation, extremes and quantiles; "ring": the newest 50
                besides mean and extremes; "value": the newest; "series": every one, as a
                point of a metric, which is `log` and needs a step as that does.
            step: The step that the value is of; else that of `session.step` or of the newest
                metric says to which steps a record belongs.

        Raises:
            SchemaValidationError: A bad argument, or a key that is kept otherwise; the message
                names it. In strict mode also a value that is not finite.
            InvalidRunStateError: The logger is closed or the run has ended.
        """
        run = self._run
        if self._closed or run.refusal is not None:
            self._check_open("aggregate")  # type: ignore[attr-defined]
        try:
            gathering = self._gatherings[key]
        except Exception:  # noqa: BLE001 - new, or an object that raises when it is hashed
            gathering = None
        if gathering is None or gathering.keep is not keep:
            gathering = self._find_gathering(key, keep)
            if gathering is None:
                self.log(key, value, step=step)  # type: ignore[attr-defined]
                return
        if type(value) is not float:
            value = to_float(value, "value", "metrics.aggregate")
        if run.strict and not isfinite(value):
            raise SchemaValidationError(f"value of {key!r} must be finite, got {value}")
        if step is not None:
            gathering.step = read_step(run, step)
        items = gathering.items
        if keep == "stat":
            items.append(value)
        else:
            items.append((value, run.step if step is None else step))
        if len(items) > LONG_QUEUE:
            gathering.fold()

    def _find_gathering(self, key: object, keep: object) -> Gathering | None:
        """Where values of a key go; None of a series.

        Raises:
            SchemaValidationError: A bad key or `keep`.
        """
        check_choice(keep, "keep", get_args(AggregateKeep))
        name = check_name(key, "key")
        if keep == "series":
            return None
        gathering = self._open_gathering(name, keep)  # type: ignore[arg-type]
        if gathering.is_kept:
            self._gatherings[name] = gathering
        return gathering

    def _open_gathering(self, name: str, keep: KeptAs) -> Gathering:
        stored = self._resolve(name, None)[0]  # type: ignore[attr-defined]
        return find_aggregates(self._run).open(stored, keep)

    def progress(
        self,
        iterable: Iterable[_T] | None = None,
        *,
        total: int | tuple[int, ...] | None = None,
        start: int | tuple[int, ...] | None = None,
    ) -> Progress[_T]:
        """Tell how far a loop has come and how long it will take still.

        `for batch in metrics.progress(loader, total=(epochs, len(loader))):`.

        It is printed (in place on a terminal, else a line each 10 s at most) and goes out with
        the run's heartbeat, so that `quark runs`, `quark follow` and the page show it of any
        process. Loops may be nested. Nothing is printed beside a tqdm bar, with QUARK_QUIET or
        with QUARK_PROGRESS=0. A loop's step costs half a microsecond.

        Args:
            iterable: What is iterated. Without one, call `advance()` of what is returned.
            total: How many steps; or the sizes of nested loops from the outermost on, such as
                `(epochs, len(loader))`: then each call, once an epoch, goes on counting where
                the last one was. By default the length of `iterable`, where it has one.
            start: What is done already, as `total` is given. By default 0, and in a run that
                was resumed with `from_step=` that step, where `total` is given.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
        """
        from quark_core.writers.progress import open_progress

        return open_progress(self._run, iterable, total, start)

    def read_aggregates(
        self,
        key: str | None = None,
        *,
        rank: int | None = None,
        all_attempts: bool = False,
    ) -> AggregateTable:
        """Flush, then return what was timed and aggregated, windows of all ranks put together.

        Mean and deviation are those of all values; quantiles are within 6 %.

        Args:
            key: Only this one, as it was given or as it is stored.
            rank: Only of this rank; of all of them by default.
            all_attempts: Also windows that a later attempt, resumed from an earlier step, has
                hidden.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.records.kinds.provenance import AggregateRecord
        from quark_core.runs.aggregates import build_query, summarize_records

        query = build_query(key, rank, all_attempts=all_attempts)
        found: Any = self._run.read(AggregateRecord.KIND, query).to_records()
        return summarize_records(found)


def _tell_late(run: OpenRun) -> None:
    if run.warns_first("timed_late"):
        _log.warning("run %s is over or its logger is closed: blocks are no longer timed",
                     run.context.run_id)  # fmt: skip
