"""Conformance of a primary: what starts, resumes and lists runs, and keeps what analyzers find."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from quark_core.backends.contract import (
    BackendConfig,
    BackendDefinition,
    Capability,
    Generation,
    SupportsRead,
    SupportsSearch,
)
from quark_core.backends.edits import RUN_EDITED, STOP_REQUESTED, BelongingEdit, RunEdit
from quark_core.backends.grids import NOT_FINITE, GridQuery
from quark_core.errors import (
    BackendRejected,
    InvalidRunStateError,
    RunNotFoundError,
    SchemaValidationError,
)
from quark_core.records import EventRecord, StreamRecord
from quark_core.records.columns import Columns
from quark_core.records.kinds.provenance import SOURCES_KEY, FingerprintRecord
from quark_core.records.query import Query, RunSearch
from quark_core.runs.following import read_grid_of_records as read_records
from quark_core.runs.following import read_series
from quark_core.runs.reading import iterate, reduce_columns
from quark_core.runs.run_search import build_page_search, build_search, find_page, find_runs
from quark_core.search.fallback import search_page_by_reading, summarize_by_reading
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker
from quark_core.testing.kit import RUN_ID, BackendKit, Observe, Opener, needs

_RUN = RUN_ID


class StoreConformance(BackendKit):
    """Standard tests of resumed runs, curves, parts, search and generations."""

    @needs(Capability.READ)
    def test_points_that_a_resumed_run_does_again_are_hidden(self, opened: Any) -> None:
        """Readers leave them out, unless they ask for all attempts."""
        first = BatchMaker(_RUN)
        opened.write(first.start())
        opened.write(first.metrics(*[("m", step, float(step)) for step in range(6)]))
        opened.write(first.metrics(("m", None, 9.0)))
        second = BatchMaker(_RUN, attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 999)
        opened.write(second.start(from_step=4))
        opened.write(second.metrics(("m", 4, 40.0)))

        def read(**filters: Any) -> list[float]:
            return list(opened.read(_RUN, "metric", Query(**filters))["value"])

        assert read() == [0.0, 1.0, 2.0, 3.0, 40.0]
        assert read(step_min=3) == [3.0, 40.0]
        assert read(limit=2) == [3.0, 40.0]
        assert read(all_attempts=True) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 40.0]

    @needs(Capability.READ)
    def test_an_attempt_that_repeats_steps_replaces_them(self, opened: Any) -> None:
        """Also where it does not say from where it goes on: each rank has each step once."""
        for attempt, begin in enumerate((0, 60, 70, 80)):
            maker = BatchMaker(
                _RUN,
                attempt=attempt,
                writer_id=f"writer{attempt}",
                started_us=FIRST_TIME_US + 10_000 * attempt,
            )
            other = BatchMaker(_RUN, attempt=attempt, rank=1, writer_id=f"rank{attempt}")
            opened.write(maker.start())
            for step in range(begin, 100 if attempt in (0, 3) else begin + 20):
                opened.write(maker.metrics(("m", step, attempt + step / 100)))
                opened.write(other.metrics(("m", step, -1.0 - attempt)))

        def read(**filters: Any) -> Columns:
            found: Columns = opened.read(_RUN, "metric", Query(**filters))
            return found

        rows = read(rank=0)
        assert rows["step"].tolist() == list(range(100))
        assert rows["attempt"].tolist() == [0] * 60 + [1] * 10 + [2] * 10 + [3] * 20
        assert read(rank=1)["step"].tolist() == list(range(100))
        assert read(rank=0, step_min=65, step_max=72)["attempt"].tolist() == [1] * 5 + [2] * 3
        assert read(all_attempts=True).count == 320
        assert sum(part.count for part in iterate(opened, _RUN, "metric", Query(), 17)) == 200
        for points in (None, 10):
            curve = read_series(opened, _RUN, "m", points, rank=0)
            assert (curve.points, curve.step[0]) == (100, 0)
            assert np.diff(curve.step).min() > 0
        (found,) = summarize_by_reading(opened, _RUN).metrics.values()
        assert (found.count, found.last_step, found.low, found.high) == (200, 99, -4.0, 3.99)
        opened.write(maker.lifecycle(("status", {"status": "completed", "exit_code": 0})))
        if isinstance(opened, SupportsSearch):
            (summed,) = opened.summarize(_RUN).metrics.values()
            assert summed == found

    @needs(Capability.READ)
    def test_an_attempt_replaces_no_more_than_it_repeats(self, opened: Any) -> None:
        """Series by series, and what goes back within an attempt stays."""
        first = BatchMaker(_RUN)
        opened.write(first.start())
        for step in range(0, 50, 10):
            opened.write(first.metrics(("loss", step, 0.0), ("val", step, 0.0)))
        opened.write(first.metrics(("loss", 20, 0.5), ("once", 3, 0.0)))
        for epoch in range(4):
            opened.write(first.metrics(("acc", None, 0.0), epoch=epoch))
        opened.write(first.metrics(("plain", None, 0.0), epoch=None))
        opened.write(first.layers(10, {"head": 1.0}))
        opened.write(first.layers(20, {"head": 1.0}))
        opened.write(first.events("saved", step=20))
        second = BatchMaker(_RUN, attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 999)
        opened.write(second.start())
        # Another cadence, and late evaluations of what the first attempt has come to.
        opened.write(second.metrics(("loss", 15, 1.0), ("loss", 25, 1.0), ("val", 20, 1.0)))
        opened.write(second.metrics(("loss", 5, 2.0), ("acc", None, 1.0), epoch=2))
        opened.write(second.metrics(("plain", None, 1.0), epoch=None))
        opened.write(second.layers(20, {"head": 2.0}))

        def read(key: str) -> list[tuple[int, float]]:
            rows = opened.read(_RUN, "metric", Query(equals={"metric_key": key}))
            return list(zip(rows["step"].tolist(), rows["value"].tolist(), strict=True))

        assert read("loss") == [(0, 0.0), (10, 0.0), (30, 0.0), (40, 0.0), (15, 1.0), (25, 1.0),
                                (5, 2.0)]  # fmt: skip
        assert read("val") == [(0, 0.0), (10, 0.0), (30, 0.0), (40, 0.0), (20, 1.0)]
        assert read("once") == [(3, 0.0)]
        assert [value for _, value in read("acc")] == [0.0, 0.0, 0.0, 1.0]
        assert [value for _, value in read("plain")] == [0.0, 1.0]
        layers = opened.read(_RUN, "layer", Query())
        shown = sorted(zip(layers["step"].tolist(), layers["norm"].tolist(), strict=True))
        assert shown == [(10, 1.0)] * 2 + [(20, 2.0)] * 2
        assert opened.read(_RUN, "event", Query(equals={"event_type": "saved"})).count == 1

    @needs(Capability.SERIES)
    def test_a_curve_keeps_every_extreme(self, backend: Any, maker: BatchMaker) -> None:
        """However few entries it has, and it says how many points they stand for."""
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

    @needs(Capability.SERIES)
    def test_a_curve_is_of_one_rank_or_across_ranks(self, opened: Any) -> None:
        """Never of one rank after another, and it says of which."""
        first, second = BatchMaker(_RUN), BatchMaker(_RUN, rank=1, writer_id="rank1")
        opened.write(first.start())
        opened.write(first.metrics(*[("m", step, float(step)) for step in range(300)]))
        opened.write(second.metrics(*[("m", step, 500.0 + step) for step in range(300)]))
        opened.write(second.metrics(("own", 3, 7.0), ("own", 4, 8.0)))
        own = opened.read_series(_RUN, "own", max_points=None)
        assert (own.ranks, own.exact, own.last.tolist()) == ((1,), True, [7.0, 8.0])
        one = opened.read_series(_RUN, "m", max_points=None, rank=1)
        assert (one.ranks, one.exact) == ((1,), True)
        assert one.last.tolist() == [500.0 + step for step in range(300)]
        for max_points in (None, 300, 3, 1):
            across = opened.read_series(_RUN, "m", max_points=max_points)
            assert (across.ranks, across.exact, across.points) == ((0, 1), False, 600)
            assert len(across) == (max_points or 300)
            assert np.diff(across.step).min(initial=1) > 0
            np.testing.assert_array_equal(across.low, across.low_step)
            np.testing.assert_array_equal(across.high, 500.0 + across.high_step)
            np.testing.assert_allclose(across.mean, (across.low + across.high) / 2)
        parts = list(opened.iterate(_RUN, "metric", Query(rank=1), rows=64))
        assert {rank for part in parts for rank in part["rank"].tolist()} == {1}
        assert sum(part.count for part in parts) == 302

    @needs(Capability.SERIES)
    def test_parts_are_what_a_read_returns(self, backend: Any, maker: BatchMaker) -> None:
        """In its order, no part much larger than asked for."""
        for step in range(50):
            backend.write(maker.metrics(("a", step, 1.0), ("b", step, 2.0)))
        for query in (Query(), Query(step_min=10, step_max=30), Query(equals={"metric_key": "b"})):
            parts = list(backend.iterate(_RUN, "metric", query, rows=20))
            assert max(part.count for part in parts) <= 40
            records = [record for part in parts for record in part.to_records()]
            assert tuple(records) == backend.read(_RUN, "metric", query).to_records()
        with pytest.raises(RunNotFoundError):
            list(backend.iterate("absent", "metric", Query(), rows=20))

    @needs(Capability.SEARCH)
    def test_summaries_are_what_reading_says(self, opened: Any) -> None:
        """At once after each write; and runs are found by them."""
        maker = BatchMaker(_RUN)
        opened.write(maker.start(tags=["x"]))
        for step in range(3):
            opened.write(maker.metrics(("m", step, 3.0 - step), ("bad", step, math.inf)))
            found = opened.summarize(_RUN)
            assert found.metrics == summarize_by_reading(opened, _RUN).metrics
            assert (found.newest_step, found.metrics["m"].last) == (step, 3.0 - step)
        other = BatchMaker("run1", writer_id="writer1", started_us=FIRST_TIME_US + 1_000_000)
        opened.write(other.start(project="another"))
        assert [run.run_id for run in opened.search(RunSearch())] == ["run1", _RUN]
        assert [run.run_id for run in opened.search(RunSearch(project="another"))] == ["run1"]
        assert len(opened.search(RunSearch(limit=1))) == 1
        with pytest.raises(RunNotFoundError):
            opened.summarize("absent")

    @needs(Capability.PAGES)
    def test_pages_are_what_a_search_finds(self, opened: Any) -> None:
        """Each run once, whatever it is sorted by, with the columns that were asked for."""
        for place in range(7):
            maker = BatchMaker(
                f"run{place}", writer_id=f"writer{place}", started_us=FIRST_TIME_US + 1_000 * place
            )
            opened.write(maker.start(project="one" if place % 3 else "two", tags=["x", "y"]))
            if place:
                value = math.nan if place == 4 else place % 3 / 2
                opened.write(maker.metrics(("m@1", 0, 2.0), ("m@1", place, value)))
        columns = ["m@1", "min(m@1)", "config.lr", "tags", "state", "created", "absent", "step"]
        for order_by in (None, "m@1", "-min(m@1)", "step", "config.lr"):
            rows: list[Any] = []
            after: str | None = None
            while True:
                asked = build_page_search(
                    order_by=order_by, columns=columns, limit=3, after=after, count=True
                )
                page = opened.search_page(asked)
                assert (page.count, page.columns) == (7, tuple(columns))
                rows += page.rows
                after = page.next
                if after is None:
                    break
            whole = build_page_search(order_by=order_by, columns=columns, limit=7)
            assert repr(rows) == repr(list(search_page_by_reading(opened, whole).rows))
        with pytest.raises(SchemaValidationError):
            opened.search_page(build_page_search(order_by="m@1", after="AAAA"))
        names = opened.list_names(None, "", 10)
        assert (names.metrics, [tag.tag for tag in names.tags]) == (("m@1",), ["x", "y"])
        assert [(key.key, key.types, key.values) for key in names.config] == [
            ("lr", ("number",), (0.1,))
        ]
        assert opened.list_names("two", "x", 10).tags[0].runs == 3
        assert opened.list_names("one", "absent", 10).metrics == ()

    @needs(Capability.GRID)
    def test_a_grid_is_what_the_records_say(self, backend: Any, maker: BatchMaker) -> None:
        """Of each cell the maximum, of what is not finite a mark, in the order of the model."""
        for step in range(30):
            norms = {"stem": 1.0 + step, "head": math.nan if step == 7 else 3.0, "a": None}
            backend.write(maker.layers(step, norms, nan_count=int(step == 9)))
        other = BatchMaker(_RUN, rank=1, writer_id="rank1")
        backend.write(other.layers(40, {"late": 9.0}))
        for fields in (
            {"summary_type": "gradient"}, {"bins": 4}, {"low": 5, "high": 8, "rank": 0},
            {"under": "head"}, {"by": "rank"}, {"rows": 2},
        ):  # fmt: skip
            query = GridQuery.build("layer", "norm", **fields)
            grid, known = (
                read(_RUN, query) for read in (backend.read_grid, partial(read_records, backend))
            )
            for name in ("names", "exact", "depth", "left_out", "points"):
                assert getattr(grid, name) == getattr(known, name)
            for name in ("starts", "ends", "values", "marks"):
                np.testing.assert_array_equal(getattr(grid, name), getattr(known, name))
        grid = backend.read_grid(_RUN, GridQuery.build("layer", "norm"))
        assert grid.names == ("stem", "head", "a", "late")
        assert grid.marks[1, 7] == grid.marks[0, 9] == NOT_FINITE
        assert grid.marks[2].sum() == NOT_FINITE
        assert backend.read_grid(_RUN, GridQuery.build("parameter", "value_norm")).names == ()
        with pytest.raises(RunNotFoundError):
            backend.read_grid("absent", GridQuery.build("layer", "norm"))

    @needs(Capability.GENERATIONS)
    def test_generations_replace_what_was_before_them(self, backend: Any) -> None:
        """Readers take everything from an analyzer's newest replacing one on."""

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

    @needs(Capability.REMOVAL)
    def test_a_removed_run_is_hidden_and_comes_back(self, backend: Any, maker: BatchMaker) -> None:
        """Out of the trash as it was, or never again once the trash is emptied."""
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
        # What comes into the trash after somebody was asked about it stays there.
        assert backend.collect_trash(run_ids=[]).runs == ()
        assert [usage.run_id for usage in backend.list_trash()] == [_RUN]
        backend.collect_trash(run_ids=[_RUN])
        assert backend.list_trash() == []
        with pytest.raises(RunNotFoundError):
            backend.restore_runs([_RUN])
        assert [stored.run.id for stored in backend.list_runs()] == ["run1"]

    @needs(Capability.EDITS)
    def test_an_edit_changes_the_run_and_is_an_event(self, backend: Any, maker: BatchMaker) -> None:
        """While the run goes on and after its end; who did what, and what was before."""
        with pytest.raises(RunNotFoundError):
            backend.edit_run("absent", RunEdit(name="a"), by="anna@box")
        before = backend.load_run(_RUN).run
        edited = backend.edit_run(
            _RUN, RunEdit(name="first", add_tags=("a", "b"), archived=True), by="anna@box"
        )
        assert edited == backend.load_run(_RUN)
        assert (edited.run.name, edited.run.tags) == (
            "first",
            tuple(sorted({*before.tags, "a", "b"})),
        )
        assert edited.run.archived_at is not None
        assert (edited.state, edited.run.notes) == ("running", before.notes)
        backend.write(maker.lifecycle(("tag", {"tag": "own"})))
        backend.write(maker.lifecycle(("status", {"status": "completed"})))
        backend.edit_run(_RUN, RunEdit(name="second", remove_tags=("a", "c")), by="ben@box")
        last = backend.edit_run(_RUN, RunEdit(name="", notes="n", archived=False), by="anna@box")
        found = last.run
        assert (found.name, found.notes, found.archived_at) == (None, "n", None)
        assert found.tags == tuple(sorted({*before.tags, "b", "own"}))
        assert last.state == "completed"
        events = [
            record.payload
            for record in backend.read(_RUN, "event", Query()).to_records()
            if record.event_type == RUN_EDITED
        ]
        # A store that knows better who it was says so behind what it is told.
        assert [event["by"].split()[0] for event in events] == ["anna@box", "ben@box", "anna@box"]
        names = [event["changes"]["name"] for event in events]
        assert names == [
            {"before": before.name, "after": "first"},
            {"before": "first", "after": "second"},
            {"before": "second", "after": None},
        ]

    @needs(Capability.EDITS)
    def test_archived_runs_are_searched_where_that_is_asked_for(self, backend: Any) -> None:
        """Lists and reads have them anyway."""
        other = BatchMaker("run1", writer_id="writer1", started_us=FIRST_TIME_US + 1_000_000)
        backend.write(other.start())
        backend.edit_run(_RUN, RunEdit(archived=True), by="anna@box")

        def search(**options: Any) -> list[str]:
            found = find_runs(backend, build_search(**options))
            page = find_page(backend, build_page_search(count=True, **options))
            assert [row.run_id for row in page.rows] == [run.run_id for run in found]
            assert page.count == len(found)
            return [run.run_id for run in found]

        assert search() == ["run1"]
        assert search(archived=True) == ["run1", _RUN]
        assert {stored.run.id for stored in backend.list_runs()} == {"run1", _RUN}

    @needs(Capability.EDITS)
    def test_a_request_to_stop_stands_for_the_newest_attempt(
        self, backend: Any, maker: BatchMaker
    ) -> None:
        """The first one does, every one is an event, and who resumes the run is not asked."""
        assert backend.find_stop(_RUN) is None
        with pytest.raises(RunNotFoundError):
            backend.request_stop("absent", by="anna@box")
        first = backend.request_stop(_RUN, by="anna@box", reason="it diverges")
        assert (first.by.split()[0], first.reason) == ("anna@box", "it diverges")
        assert first.seen_at is None
        assert backend.request_stop(_RUN, by="ben@box") == first
        assert backend.find_stop(_RUN) == first
        assert backend.load_run(_RUN).stop == first
        backend.write(maker.lifecycle(("stop_seen", {"id": "another"})))
        assert backend.load_run(_RUN).stop == first
        backend.write(maker.lifecycle(("stop_seen", {"id": first.id})))
        assert backend.load_run(_RUN).stop.seen_at is not None
        said = [
            record.payload["by"].split()[0]
            for record in backend.read(_RUN, "event", Query()).to_records()
            if record.event_type == STOP_REQUESTED
        ]
        assert said == ["anna@box", "ben@box"]
        backend.write(maker.lifecycle(("status", {"status": "interrupted"})))
        with pytest.raises(InvalidRunStateError, match="interrupted"):
            backend.request_stop(_RUN, by="anna@box")
        second = BatchMaker(_RUN, attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 999)
        backend.write(second.start())
        assert backend.find_stop(_RUN) is None
        assert backend.load_run(_RUN).stop is None


class PrimaryConformance(BackendKit):
    """Standard tests of backends that declare PRIMARY."""

    @needs(Capability.PRIMARY)
    def test_one_attempt_is_started_once(self, backend: Any) -> None:
        """Of two processes that resume a run at the same moment, one is refused."""
        with pytest.raises(BackendRejected):
            backend.write(BatchMaker(self.RUN_ID, writer_id="other").start())

    @needs(Capability.PRIMARY)
    def test_batches_of_a_run_that_was_never_started_are_rejected(
        self, open_backend: Opener
    ) -> None:
        """A primary knows every run that it holds records of."""
        with pytest.raises(BackendRejected):
            open_backend().write(BatchMaker("absent").metrics(("m", 0, 0.0)))

    @needs(Capability.PRIMARY)
    @pytest.mark.usefixtures("backend")
    def test_opening_for_reading_changes_nothing(
        self,
        definition: BackendDefinition,
        config: BackendConfig,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """What is opened read-only reads, and refuses to write."""
        reader = definition.open(dataclasses.replace(config, read_only=True))
        assert isinstance(reader, SupportsRead)
        assert reader.load_run(self.RUN_ID).run.id == self.RUN_ID
        with pytest.raises(Exception, match=r"(?i)read"):
            reader.write(maker.metrics(("m", 0, 0.0)))
        assert observe() == []

    @needs(Capability.PRIMARY)
    def test_two_of_it_in_one_process_do_not_know_of_each_other(
        self, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """As two sessions of one process have it: closing one leaves the other open."""
        one, other = open_backend(), open_backend(run_id="run1")
        second = BatchMaker("run1", writer_id="writer1")
        one.write(maker.start())
        other.write(second.start())
        one.write(maker.metrics(("m", 0, 1.0)))
        other.write(second.metrics(("m", 0, 2.0)))
        reader = open_backend(read_only=True)
        assert isinstance(reader, SupportsRead)
        one.close()
        other.write(second.metrics(("m", 1, 3.0)))
        assert reader.read(self.RUN_ID, "metric", Query())["value"].tolist() == [1.0]
        other.close()
        assert reader.read("run1", "metric", Query())["value"].tolist() == [2.0, 3.0]


class BelongingConformance(BackendKit):
    """Standard tests of backends that declare BELONGING."""

    @needs(Capability.BELONGING)
    def test_a_run_has_the_groups_and_fields_that_its_records_say(
        self, backend: Any, maker: BatchMaker
    ) -> None:
        """Those of a batch that comes twice once; progress goes when the run ends."""
        batch = maker.lifecycle(
            ("group", {"add": ["paper/fig3", "idea"]}),
            ("fields", {"set": {"gpu": "V100", "n": {"x": 1.5}}}),
            ("group", {"add": ["paper"], "remove": ["idea"]}),
            ("fields", {"set": {"n": 2}, "remove": ["gpu", "absent"]}),
            ("heartbeat", {"progress": {"done": 1.0, "total": 4.0}}),
        )
        backend.write(batch)
        backend.write(batch)
        stored = backend.load_run(_RUN)
        assert stored.run.groups == ("paper", "paper/fig3")
        assert dict(stored.fields) == {"n": 2}
        assert stored.progress is not None
        assert (stored.progress.done, stored.progress.total) == (1.0, 4.0)
        head = maker._head("fingerprint")
        backend.write(maker.batch([FingerprintRecord(*head, "code", SOURCES_KEY, "c0de")]))
        backend.write(maker.lifecycle(("status", {"status": "completed"})))
        stored = backend.load_run(_RUN)
        assert (stored.progress, stored.digests.code) == (None, "c0de")
        for where, found in (
            ("'paper' in groups and field.n == 2", [_RUN]),
            ("group == 'idea'", []),
            ("code_digest == 'c0de' and fingerprint.sources == 'c0de'", [_RUN]),
        ):
            assert [r.run_id for r in find_runs(backend, build_search(where=where))] == found

    @needs(Capability.BELONGING)
    def test_projects_and_groups_are_described(self, backend: Any, maker: BatchMaker) -> None:
        """What is said of them stays whatever their runs do; a run is grouped after its end too."""
        backend.write(maker.lifecycle(("group", {"add": ["paper/fig3"]})))
        backend.write(maker.lifecycle(("status", {"status": "completed"})))
        project = backend.load_run(_RUN).project.name
        edit = BelongingEdit(description="D", set_fields={"k": [1, None]}, add_tags=("b", "a"))
        made = backend.update_project(project, edit, by="anna@box")
        assert (made.description, made.tags, made.runs) == ("D", ("a", "b"), 1)
        assert backend.load_project(project) == made
        assert dict(made.fields) == {"k": [1, None]}
        with pytest.raises(SchemaValidationError):
            backend.update_project("absent", edit, by="anna@box")
        with pytest.raises(SchemaValidationError):
            backend.load_project("absent")
        backend.update_group(project, "paper", BelongingEdit(description="P"), by="anna@box")
        backend.update_group(project, "later", BelongingEdit(add_tags=("t",)), by="anna@box")
        backend.edit_run(_RUN, RunEdit(add_groups=("own",)), by="anna@box")
        groups = backend.list_groups(project)
        assert [(group.path, group.runs, group.description) for group in groups] == [
            ("later", 0, None),
            ("own", 1, None),
            ("paper", 1, "P"),
            ("paper/fig3", 1, None),
        ]
        backend.update_group(project, "later", BelongingEdit(remove_tags=("t",)), by="ben@box")
        assert backend.list_groups(project) == groups[1:]
        assert backend.list_groups("absent") == []
