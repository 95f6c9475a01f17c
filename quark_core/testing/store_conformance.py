"""The part of the conformance kit for what a store may do beyond taking and giving records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quark_core.backend import (
    BackendDefinition,
    Capability,
    Generation,
)
from quark_core.errors import RunNotFoundError
from quark_core.query import Query
from quark_core.reading import reduce_columns
from quark_core.records import EventRecord, StreamRecord
from quark_core.search.expression import RunSearch
from quark_core.search.fallback import summarize_by_reading
from quark_core.testing.batches import BatchMaker
from quark_core.testing.kit import RUN_ID, BackendKit, Opener
from quark_core.testing.samples import FIRST_TIME_US

__all__ = ["StoreConformance"]

_RUN = RUN_ID


class StoreConformance(BackendKit):
    """Standard tests of resumed runs, curves, parts, search and generations."""

    def test_points_that_a_resumed_run_does_again_are_hidden(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """Readers leave them out, unless they ask for all attempts."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        first = BatchMaker(_RUN)
        backend.write(first.start())
        backend.write(first.metrics(*[("m", step, float(step)) for step in range(6)]))
        backend.write(first.metrics(("m", None, 9.0)))
        second = BatchMaker(_RUN, attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 999)
        backend.write(second.start(from_step=4))
        backend.write(second.metrics(("m", 4, 40.0)))

        def read(**filters: Any) -> list[float]:
            return list(backend.read(_RUN, "metric", Query(**filters))["value"])

        assert read() == [0.0, 1.0, 2.0, 3.0, 40.0]
        assert read(step_min=3) == [3.0, 40.0]
        assert read(limit=2) == [3.0, 40.0]
        assert read(all_attempts=True) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 40.0]

    def test_a_curve_keeps_every_extreme(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """However few entries it has, and it says how many points they stand for."""
        backend = self._open_as(definition, open_backend, Capability.SERIES)
        maker = BatchMaker(_RUN)
        backend.write(maker.start())
        values = [math.sin(step / 9) for step in range(1_000)]
        values[333], values[777], values[500] = 50.0, -50.0, math.nan
        for begin in range(0, 1_000, 100):
            part = range(begin, begin + 100)
            backend.write(maker.metrics(*[("m", step, values[step]) for step in part]))
        every = backend.read_series(_RUN, "m", max_points=None)
        assert every.exact
        assert every.step.tolist() == list(range(1_000))
        np.testing.assert_array_equal(every.last, values)
        for max_points in (1, 7, 100):
            curve = backend.read_series(_RUN, "m", max_points=max_points)
            assert len(curve) <= max_points
            assert (curve.points, int(curve.non_finite.sum())) == (1_000, 1)
            assert (np.nanmin(curve.low), np.nanmax(curve.high)) == (-50.0, 50.0)
            assert curve.high_step[np.nanargmax(curve.high)] == 333
            assert curve.low_step[np.nanargmin(curve.low)] == 777
        columns = backend.read(_RUN, "metric", Query(equals={"metric_key": "m"}))
        assert reduce_columns("m", columns, 10).points == 1_000
        assert len(backend.read_series(_RUN, "absent", max_points=5)) == 0
        with pytest.raises(RunNotFoundError):
            backend.read_series("absent", "m", max_points=5)

    def test_parts_are_what_a_read_returns(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """In its order, no part much larger than asked for."""
        backend = self._open_as(definition, open_backend, Capability.SERIES)
        maker = BatchMaker(_RUN)
        backend.write(maker.start())
        for step in range(50):
            backend.write(maker.metrics(("a", step, 1.0), ("b", step, 2.0)))
        for query in (Query(), Query(step_min=10, step_max=30), Query(equals={"metric_key": "b"})):
            parts = list(backend.iterate(_RUN, "metric", query, rows=20))
            assert max(part.count for part in parts) <= 40
            records = [record for part in parts for record in part.to_records()]
            assert tuple(records) == backend.read(_RUN, "metric", query).to_records()
        with pytest.raises(RunNotFoundError):
            list(backend.iterate("absent", "metric", Query(), rows=20))

    def test_summaries_are_what_reading_says(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """At once after each write; and runs are found by them."""
        backend = self._open_as(definition, open_backend, Capability.SEARCH)
        maker = BatchMaker(_RUN)
        backend.write(maker.start(tags=["x"]))
        for step in range(3):
            backend.write(maker.metrics(("m", step, 3.0 - step), ("bad", step, math.inf)))
            found = backend.summarize(_RUN)
            assert found.metrics == summarize_by_reading(backend, _RUN).metrics
            assert (found.newest_step, found.metrics["m"].last) == (step, 3.0 - step)
        other = BatchMaker("run1", writer_id="writer1", started_us=FIRST_TIME_US + 1_000_000)
        backend.write(other.start(project="another"))
        assert [run.run_id for run in backend.search(RunSearch())] == ["run1", _RUN]
        assert [run.run_id for run in backend.search(RunSearch(project="another"))] == ["run1"]
        assert len(backend.search(RunSearch(limit=1))) == 1
        with pytest.raises(RunNotFoundError):
            backend.summarize("absent")

    def test_generations_replace_what_was_before_them(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """Readers take everything from an analyzer's newest replacing one on."""
        backend = self._open_as(definition, open_backend, Capability.GENERATIONS)
        backend.write(BatchMaker(_RUN).start())

        def write(replaces: bool, *names: str) -> int:
            events: list[StreamRecord] = [
                EventRecord(_RUN, "rules", 0, 0, place, FIRST_TIME_US, name, "info")
                for place, name in enumerate(names)
            ]
            generation = Generation(
                run_id=_RUN, analyzer="rules", replaces=replaces, outputs={"event": events}
            )
            return int(backend.write_generation(generation))

        def read() -> list[str]:
            return list(backend.read_outputs(_RUN, "event", "rules")["event_type"])

        assert [write(False, "a"), write(False, "b", "c")] == [1, 2]
        assert read() == ["a", "b", "c"]
        assert [write(True, "d"), write(False, "e")] == [3, 4]
        assert read() == ["d", "e"]
        assert write(True) == 5
        assert read() == []

    def test_a_removed_run_is_hidden_and_comes_back(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """Out of the trash as it was, or never again once the trash is emptied."""
        backend = self._open_as(definition, open_backend, Capability.REMOVAL)
        maker = BatchMaker(_RUN)
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.5)))
        backend.write(maker.lifecycle(("status", {"status": "completed"})))
        other = BatchMaker("run1", writer_id="writer1", started_us=FIRST_TIME_US + 1_000_000)
        backend.write(other.start())
        with pytest.raises(RunNotFoundError):
            backend.trash_runs([_RUN, "absent"])
        assert backend.list_trash() == []
        for is_last in (False, True):
            backend.trash_runs([_RUN])
            assert [usage.run_id for usage in backend.list_trash()] == [_RUN]
            with pytest.raises(RunNotFoundError):
                backend.read(_RUN, "metric", Query())
            assert [stored.run.id for stored in backend.list_runs()] == ["run1"]
            if not is_last:
                backend.restore_runs([_RUN])
                assert backend.read(_RUN, "metric", Query())["value"].tolist() == [0.5]
        backend.collect_trash()
        assert backend.list_trash() == []
        with pytest.raises(RunNotFoundError):
            backend.restore_runs([_RUN])
        assert [stored.run.id for stored in backend.list_runs()] == ["run1"]
