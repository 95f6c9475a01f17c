"""Forks: what a run that was forked has of its parents, their points up to the step of the fork.

A fork (`start_run(fork_from=…)`) stores only what it logs itself. Whoever reads it by the
functions of `quark_core.runs` (`reading`, `following`) is given the points of its parent before
its own, out of the same store, so that no backend need know of it. The parent's points come as
earlier attempts: -1 is the parent's newest one, and what a grandparent has is below that.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quark_core.errors import RunNotFoundError
from quark_core.records import MetricRecord
from quark_core.records.kinds.diagnostics import (
    LayerSummaryRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
)
from quark_core.records.query import Query
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.records import RunRecord
    from quark_core.records.columns import Columns

_log = logging.getLogger("quark")

FORKED_KINDS = frozenset(
    record.KIND
    for record in (
        MetricRecord,
        LayerSummaryRecord,
        ParameterSummaryRecord,
        ParameterDistributionRecord,
    )
)
"""Kinds that are curves over steps, which a fork goes on with. What a run said, produced and
ran on (events, artifacts, samples, batches, telemetry) stays its own."""

_MOST_ANCESTORS = 1_000
_MOST_KNOWN = 100_000

# By reader, the runs that are no forks: what is none never becomes one.
_plain_runs: MutableMapping[object, set[str]] = weakref.WeakKeyDictionary()
_told: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class Beginning:
    """What one run gives to a fork that descends from it.

    Attributes:
        run_id: The run whose points they are.
        last_step: The last step of them.
        shift: What is added to the numbers of its attempts, so that all are below 0.
        created_at: When that run began.
    """

    run_id: str
    last_step: int
    shift: int
    created_at: str

    def bound(self, query: Query) -> Query | None:
        """The query for its part of what is asked of the fork; None where it has none.

        A point without a step is nobody's but the run's that logged it.
        """
        low = query.step if query.step is not None else query.step_min
        if low is not None and low > self.last_step:
            return None
        high = self.last_step if query.step_max is None else min(query.step_max, self.last_step)
        return replace(query, step_max=high)

    def adopt(self, rows: Columns) -> Columns:
        """Its rows as the fork has them."""
        return rows.shift_attempts(self.shift)

    def select(self, rows: Columns) -> Columns:
        """Of rows that it has logged those that the fork has, as the fork has them."""
        steps = rows["step"]
        return self.adopt(rows.take((steps >= 0) & (steps <= self.last_step)))


def find_beginnings(
    reader: SupportsRead, run_id: str, kind: str = MetricRecord.KIND
) -> tuple[Beginning, ...]:
    """What a run's curves begin with, the oldest first; nothing where it is no fork.

    A parent that the store no longer has is told of once, and left out with all before it.

    Args:
        reader: An opened backend that reads.
        run_id: The run.
        kind: What is read of it.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    if kind not in FORKED_KINDS or _is_plain(reader, run_id):
        return ()
    try:
        run = reader.load_run(run_id).run
    except (RunNotFoundError, NotImplementedError):
        return ()  # whoever reads it says so, or it is nobody who keeps runs
    if not _is_fork(run):
        _note_plain(reader, run_id)
        return ()
    return _list_ancestors(reader, run)


def _list_ancestors(reader: SupportsRead, run: RunRecord) -> tuple[Beginning, ...]:
    found: list[Beginning] = []
    # A folder that somebody has made may say anything, even that a run descends from itself.
    seen, shift, last_step = {run.id}, 0, run.fork_step
    while _is_fork(run):
        assert run.parent_run_id is not None
        assert run.fork_step is not None
        if run.parent_run_id in seen or len(seen) > _MOST_ANCESTORS:
            break
        last_step = run.fork_step if last_step is None else min(last_step, run.fork_step)
        try:
            parent = reader.load_run(run.parent_run_id).run
        except RunNotFoundError:
            _tell_missing(str(run.id), run.parent_run_id, run.fork_step)
            break
        shift -= parent.attempt + 1
        found.append(Beginning(run.parent_run_id, last_step, shift, parent.created_at))
        seen.add(run.parent_run_id)
        run = parent
    return tuple(reversed(found))


def _is_fork(run: RunRecord) -> bool:
    # A reader of somebody else's may say anything.
    return isinstance(run.fork_step, int) and run.fork_step >= 0 and run.parent_run_id is not None


def read_with_beginnings(reader: SupportsRead, run_id: str, kind: str) -> Columns:
    """All rows of a kind that a run has, those that a fork has of its parents first.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    from quark_core.records.columns import Columns as Rows

    own = reader.read(run_id, kind, Query())
    parts = []
    for beginning in find_beginnings(reader, run_id, kind):
        with contextlib.suppress(RunNotFoundError):
            query = Query(step_max=beginning.last_step)
            parts.append(beginning.adopt(reader.read(beginning.run_id, kind, query)))
    some = [part for part in (*parts, own) if part.count]
    return Rows.concatenate(kind, some) if some else own


def _tell_missing(run_id: str, parent_run_id: str, step: int) -> None:
    """Say once that the beginning of a fork's curves is gone."""
    if (run_id, parent_run_id) in _told:
        return
    _told.add((run_id, parent_run_id))
    _log.warning(
        "run %s was forked from %s at step %d, but this store does not have that run (it was "
        "removed or is in the trash). The curves of the fork start at its own first points",
        clean_line(run_id),
        clean_line(parent_run_id),
        step,
    )


def _is_plain(reader: object, run_id: str) -> bool:
    try:
        return run_id in _plain_runs.get(reader, ())
    except TypeError:
        return False  # it cannot be held weakly


def _note_plain(reader: object, run_id: str) -> None:
    try:
        known = _plain_runs.setdefault(reader, set())
    except TypeError:
        return
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known.add(run_id)
