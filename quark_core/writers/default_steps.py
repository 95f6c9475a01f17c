"""Which step a call has that gives none: the session's, or one that its logger counts.

`session.step(n)` is one attribute of the run, which every writer of this process looks at
where a call gives no step. `StepCount` is of one logger made with `auto_step=True`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from quark_core.errors import QuarkError, SchemaValidationError, SessionStoreError
from quark_core.runs.step_counters import read_step

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")

_MAX_NAMES = 100_000


class StepScope:
    """What `session.step(n)` returns: the step is set already, and a `with` block takes it back.

    As a context manager it puts back, at the end of the block, what was set before the call.
    Outside of a `with` block nothing need be done with it.
    """

    __slots__ = ("_before", "_run", "step")

    def __init__(self, run: OpenRun, step: object) -> None:
        self.step = read_step(run, step)
        self._run = run
        self._before = run.step
        run.step = self.step

    def __repr__(self) -> str:
        return f"StepScope({self.step})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.step = self._before


class StepCount:
    """Counts the steps of a logger whose calls give none; takes no lock.

    A call with several metrics is a step of its own. Single values belong to the step that is
    counted until one of their names comes again, which begins the next: `log("loss", …)` and
    `log("accuracy", …)` of one turn of a loop share a step.

    Args:
        first: The first step.
    """

    def __init__(self, first: int) -> None:
        self._numbers = count(first)
        self._current = -1
        self._names: dict[Any, int] = {}

    def count_call(self, names: Iterable[Any]) -> int:
        """The step of a call that logs several metrics."""
        self._current = step = next(self._numbers)
        if len(self._names) > _MAX_NAMES:
            self._names = {}
        self._names.update(dict.fromkeys(names, step))
        return step

    def count_value(self, name: Any) -> int:
        """The step of a call that logs one value."""
        step = self._current
        if step < 0 or self._names.get(name, -1) >= step:
            return self.count_call((name,))
        self._names[name] = step
        return step


def find_next_step(run: OpenRun) -> int:
    """The step that a logger of this run counts from: 0, or after the newest of a resumed run.

    A store that cannot be read now costs a warning: counting then begins at 0.
    """
    run_id = run.context.run_id
    if not run.context.run.attempt or run.reader is None or run_id is None:
        return 0
    from quark_core.runs.searching import summarize_run

    try:
        if run.begun_offline:
            raise SessionStoreError("the run has begun without its store")
        run.flush()
        newest = summarize_run(run.reader, run_id).newest_step
    except QuarkError as error:
        _log.warning("run %s: its newest step cannot be read, so steps are counted from 0: %s",
                     run_id, error)  # fmt: skip
        return 0
    return 0 if newest is None else newest + 1


def describe_missing_step(call: str) -> SchemaValidationError:
    """The error of a call that gives neither step nor epoch.

    Args:
        call: What to write, but for the step: `log("loss", …`.
    """
    return SchemaValidationError(
        f"step or epoch must be given: write metrics.{call}, step=step). "
        "Or say session.step(step) once for all calls that follow, or make the logger with "
        "MetricsLogger(session, auto_step=True), which counts by itself."
    )
