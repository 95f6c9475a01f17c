"""Keeps figures right while a resumed run repeats steps, which replaces earlier points.

What a batch replaces is no difference that could be added to figures: these are made again of
what is visible. That reads the run's metrics, so that it is done now and then while steps are
repeated, and once more when the attempt ends or the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from quark_backends.store.databases.connection import StoreConnection
from quark_backends.store.reading.attempt_reaches import AttemptReaches, load_attempt_writers
from quark_core.records import MetricRecord
from quark_core.records.attempts import Reach
from quark_core.records.codec import DecodedBody

# Making figures again may take one part of so many of a writer's time.
_SHARE = 20
_KEPT_RUNS = 256
# Below so many rows plain Python is as quick as numpy is to set up.
_FEW_ROWS = 64


@dataclass(slots=True)
class _Run:
    """What is known of a run.

    Attributes:
        attempt: Its newest attempt that has logged metrics.
        reached: Metric -> how far earlier attempts had come.
        is_due: Whether points were replaced that the figures count.
        rests_until: When the figures may be made again, by the monotonic clock.
    """

    attempt: int
    reached: dict[str, Reach] = field(default_factory=dict)
    is_due: bool = False
    rests_until: float = 0.0


class Overlaps:
    """Knows of which runs the figures must be made again; belongs to one thread.

    Args:
        connection: The store.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._runs: dict[int, _Run] = {}

    def knows(self, run_pk: int, attempt: int) -> bool:
        """Whether `note` need not read what the run has stored."""
        run = self._runs.get(run_pk)
        return run is not None and run.attempt >= attempt

    def note(self, run_pk: int, attempt: int, body: DecodedBody) -> bool:
        """Take note of a batch of metrics; whether the figures must be made again now.

        Args:
            run_pk: The run.
            attempt: The attempt of its writer.
            body: The batch, which is stored already.
        """
        known = self.knows(run_pk, attempt)
        run = self._runs[run_pk] if known else self._load(run_pk, attempt)
        if attempt < run.attempt:
            run.is_due = True  # it comes late: what it repeats of is not known here
        elif run.reached and _repeats(run.reached, body):
            run.is_due = True
        return run.is_due and time.monotonic() >= run.rests_until

    def settle(self, run_pk: int, attempt: int) -> bool:
        """Whether the figures must be made again for good, since an attempt begins or ends."""
        if attempt < 1:
            return False
        run = self._runs.get(run_pk)
        if run is None:
            run = self._load(run_pk, attempt)
        return run.is_due

    def rest(self, run_pk: int, duration_s: float) -> None:
        """The figures of a run were made again, which took so long."""
        run = self._runs.get(run_pk)
        if run is not None:
            run.is_due = False
            run.rests_until = time.monotonic() + _SHARE * duration_s

    def forget(self) -> None:
        """The transaction was undone: what is known of runs may not be so."""
        self._runs.clear()

    def _load(self, run_pk: int, attempt: int) -> _Run:
        writers = load_attempt_writers(self._connection, run_pk)
        run = _Run(max([attempt, *(writer.attempt for writer in writers)]))
        while len(self._runs) >= _KEPT_RUNS:
            del self._runs[next(iter(self._runs))]
        self._runs[run_pk] = run
        if any(each.has_from_step for each in writers if each.attempt == run.attempt):
            return run
        kind, reaches = MetricRecord.KIND, AttemptReaches()
        earlier = [each for each in writers if each.attempt < run.attempt]
        found = reaches.find(self._connection, earlier, kind, needs_first=False)
        for its in found.values():
            for series, reach in its.items():
                known = run.reached.get(series)
                if known is None or (reach.on_epochs, -reach.last) < (known.on_epochs, -known.last):
                    run.reached[series] = reach
        newest = [each for each in writers if each.attempt == run.attempt]
        for series, reach in (
            reaches.find(self._connection, newest, kind).get(run.attempt, {}).items()
        ):
            known = run.reached.get(series)
            if known is not None and reach.first <= known.last:
                run.is_due = True
        return run


def _repeats(reached: Mapping[str, Reach], body: DecodedBody) -> bool:
    """Whether a batch has points where earlier attempts had come already."""
    column = body.column("metric_key")
    if column.encoding in ("c", "t"):
        texts = [column.head] if column.encoding == "c" else column.head[0]
        if reached.keys().isdisjoint(texts):
            return False
    if body.count > _FEW_ROWS:
        steps = body.to_array("step")
        # Mostly all of them are beyond whatever was reached.
        if int(steps.min()) > max(reach.last for reach in reached.values()):
            return False
    for key, step, epoch in zip(
        body.to_list("metric_key"), body.to_list("step"), body.to_list("epoch"), strict=True
    ):
        reach = reached.get(key)
        if reach is not None:
            place = epoch if reach.on_epochs and step is None else step
            if place is not None and place <= reach.last:
                return True
    return False
