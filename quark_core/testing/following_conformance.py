"""Conformance of backends that read for those who look on: curves in windows, what came since."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quark_core.backends.contract import BackendDefinition, Capability, SupportsRead
from quark_core.backends.curves import EACH_RANK, CurveQuery, CurveSet, reduce_curves
from quark_core.errors import RunNotFoundError
from quark_core.records.query import Query
from quark_core.runs.following import read_changes, read_heads, read_mark, read_series_many
from quark_core.testing.batches import FIRST_TIME_US, BatchMaker
from quark_core.testing.kit import RUN_ID, BackendKit, Opener

_RUN = RUN_ID


def _read_curves(
    backend: SupportsRead, keys: list[str], *, entries: int | None = None, **asked: Any
) -> CurveSet:
    return read_series_many(backend, _RUN, CurveQuery.build(keys, entries=entries, **asked))


class FollowingConformance(BackendKit):
    """Standard tests of backends that declare READ, and of what CHANGES adds to it.

    They read as `quark_core.runs.following` does, so that a backend which declares no more
    than READ is held to the same answers.
    """

    def test_a_window_has_every_extreme_of_its_points(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """However few entries; each curve is exact where the window holds few points."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        backend.write(maker.start())
        values = [math.sin(step / 9) for step in range(600)]
        values[333], values[477], values[500] = 50.0, -50.0, math.nan
        for begin in range(0, 600, 150):
            rows = [("m", step, values[step]) for step in range(begin, begin + 150)]
            backend.write(maker.metrics(*rows, ("n", begin, float(begin))))
        rows = backend.read(_RUN, "metric", Query())
        for axis, low, high in (
            ("step", None, None),
            ("step", 300, 520),
            ("step", 333, 333),
            ("time_us", int(rows["time_us"][40]), int(rows["time_us"][500])),
            ("relative_us", 20, 400),
        ):
            asked: dict[str, Any] = {"low": low, "high": high, "axis": axis}
            for entries in (None, 1, 7, 250):
                found = _read_curves(backend, ["n", "m", "no"], entries=entries, **asked)
                every = _read_curves(backend, ["n", "m", "no"], **asked)
                assert [curve.key for curve in found.curves] == [c.key for c in every.curves]
                for curve, points in zip(found.curves, every.curves, strict=True):
                    assert entries is None or len(curve) <= entries
                    assert points.exact
                    assert curve.exact == (len(points) <= (entries or len(points)))
                    assert curve.points == len(points)
                    assert np.nanmin(curve.low) == np.nanmin(points.low)
                    assert np.nanmax(curve.high) == np.nanmax(points.high)
                    bad = curve.non_finite > 0
                    assert curve.non_finite.sum() == points.non_finite.sum()
                    assert set(curve.non_finite_step[bad].tolist()) <= {500}
        (curve,) = _read_curves(backend, ["m"], entries=250, low=300, high=520).curves
        wanted = reduce_curves(rows, CurveQuery.build(["m"], entries=250, low=300, high=520))
        assert curve.step.tolist() == wanted[0].step.tolist() == list(range(300, 521))
        np.testing.assert_array_equal(curve.last, values[300:521])
        with pytest.raises(RunNotFoundError):
            read_series_many(backend, "absent", CurveQuery.build(["m"], entries=5))

    def test_ranks_and_attempts_have_curves_of_their_own(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """And none has steps that run twice; what a later attempt hides is in none."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        first, second = BatchMaker(_RUN), BatchMaker(_RUN, rank=1, writer_id="rank1")
        backend.write(first.start())
        backend.write(first.metrics(*[("m", step, float(step)) for step in range(60)]))
        backend.write(second.metrics(*[("m", step, 500.0 + step) for step in range(60)]))
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        backend.write(later.start(from_step=40))
        backend.write(later.metrics(("m", 40, -1.0), ("m", 41, -2.0)))
        each = _read_curves(backend, ["m"], ranks=EACH_RANK).curves
        assert [(c.attempt, c.rank, c.points) for c in each] == [(0, 0, 40), (0, 1, 40), (1, 0, 2)]
        assert [c.step.tolist() for c in each[:2]] == [list(range(40))] * 2
        across = _read_curves(backend, ["m"], entries=20).curves
        assert [(c.attempt, c.rank, c.ranks) for c in across] == [
            (0, None, (0, 1)),
            (1, None, (0,)),
        ]
        assert (across[0].points, across[0].low.min(), across[0].high.max()) == (80, 0.0, 539.0)
        assert np.diff(across[0].step).min() > 0
        one = _read_curves(backend, ["m"], ranks=[1]).curves
        assert [(c.attempt, c.rank) for c in one] == [(0, 1)]
        every = _read_curves(backend, ["m"], entries=20, all_attempts=True).curves
        assert [c.points for c in every] == [120, 2]

    def test_what_came_since_a_cursor_comes_once(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Nothing is missing between a curve and what is added to it, and nothing there twice."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.0), ("n", 0, 9.0)))
        found = _read_curves(backend, ["m", "late"])
        assert [curve.step.tolist() for curve in found.curves] == [[0]]
        heads = read_heads(backend, _RUN, kinds=["event"])
        assert not read_changes(backend, _RUN, found.cursor, keys=["m", "late"])
        other = BatchMaker(_RUN, rank=1, writer_id="rank1")
        backend.write(maker.metrics(("m", 1, 1.0), ("n", 1, 8.0), ("late", 1, 7.0)))
        backend.write(other.metrics(("m", 1, 5.0)))
        backend.write(maker.events("saved"))
        changes = read_changes(backend, _RUN, found.cursor, keys=["m", "late"])
        rows = changes.records["metric"]
        shown = zip(rows["metric_key"], rows["rank"], rows["step"], rows["value"], strict=True)
        assert sorted(shown) == [("late", 0, 1, 7.0), ("m", 0, 1, 1.0), ("m", 1, 1, 5.0)]
        assert set(changes.records) == {"metric"}
        assert not read_changes(backend, _RUN, changes.cursor, keys=["m", "late"])
        events = read_changes(backend, _RUN, heads.cursor, kinds=["event"]).records["event"]
        assert events["event_type"].tolist() == ["saved"]
        everything = read_changes(backend, _RUN, {}, kinds=["metric", "event"])
        assert everything.records["metric"].count == 6
        with pytest.raises(RunNotFoundError):
            read_changes(backend, "absent", {})

    def test_a_cursor_of_what_is_hidden_now_is_stale(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Who has read it is told to read anew, and not given more to add to it."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        backend.write(maker.start())
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
        found = _read_curves(backend, ["m"])
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        backend.write(later.start(from_step=4))
        backend.write(later.metrics(("m", 4, 40.0)))
        changes = read_changes(backend, _RUN, found.cursor, keys=["m"])
        assert (changes.stale, dict(changes.records)) == (True, {})
        again = _read_curves(backend, ["m"])
        assert [curve.points for curve in again.curves] == [4, 1]
        assert not read_changes(backend, _RUN, again.cursor, keys=["m"])

    def test_a_cursor_of_what_was_replaced_is_stale(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """As long as an attempt repeats steps, and no more once it has come further."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        backend.write(maker.start())
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        for step, left, is_stale in ((4, 5, True), (5, 4, True), (6, 4, False), (7, 4, False)):
            found = _read_curves(backend, ["m"])
            if step == 4:
                backend.write(later.start())
            backend.write(later.metrics(("m", step, 40.0)))
            changes = read_changes(backend, _RUN, found.cursor, keys=["m"])
            assert changes.stale is is_stale
            if not is_stale:
                assert changes.records["metric"]["step"].tolist() == [step]
            again = _read_curves(backend, ["m"])
            assert [curve.points for curve in again.curves] == [left, step - 3]
            assert not read_changes(backend, _RUN, again.cursor, keys=["m"])

    def test_what_is_never_hidden_is_followed_over_attempts(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """A later attempt hides no events: each of them comes once to who follows only those."""
        backend = self._open_as(definition, open_backend, Capability.READ)
        backend.write(maker.start())
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
        backend.write(maker.events("saved"))
        heads = read_heads(backend, _RUN, kinds=["event"])
        backend.write(maker.events("out of memory"))
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        backend.write(later.start(from_step=4))
        backend.write(later.events("resumed"))
        changes = read_changes(backend, _RUN, heads.cursor, kinds=["event"])
        assert not changes.stale
        assert sorted(changes.records["event"]["event_type"]) == ["out of memory", "resumed"]
        assert not read_changes(backend, _RUN, changes.cursor, kinds=["event"])

    def test_much_that_came_is_given_in_parts(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Each leads to the next one, and a mark says when there is something to ask for."""
        backend = self._open_as(definition, open_backend, Capability.CHANGES)
        backend.write(maker.start())
        marks = [read_mark(backend, _RUN)]
        for begin in range(0, 200, 20):
            rows = [("m", step, float(step)) for step in range(begin, begin + 20)]
            backend.write(maker.metrics(*rows))
        marks += [read_mark(backend, _RUN), read_mark(backend, _RUN)]
        assert marks[0] != marks[1] == marks[2]
        steps: list[int] = []
        cursor = read_heads(backend, _RUN).cursor
        assert not read_changes(backend, _RUN, cursor)
        changes = read_changes(backend, _RUN, {}, max_rows=30)
        assert changes.more
        while changes:
            steps += changes.records["metric"]["step"].tolist()
            changes = read_changes(backend, _RUN, changes.cursor, max_rows=30)
        assert steps == list(range(200))
        assert dict(changes.cursor) == dict(cursor)
        with pytest.raises(RunNotFoundError):
            read_mark(backend, "absent")
