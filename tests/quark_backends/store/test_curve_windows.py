"""Curves of many metrics through windows: what the store reduces is what the points are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import START_US, Store, Writer
from tiers import count_examples

from quark_backends.store.reading import curves, stored_rows
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.reading.stored_rows import StoredRows
from quark_backends.store.upkeep import compaction
from quark_core.backends.curves import AXES, EACH_RANK, CurveQuery, Window, reduce_curves
from quark_core.errors import RunNotFoundError
from quark_core.records.query import Query

KEYS = ("loss", "val/loss", "absent")


def fill(writer, key, values, *, steps=None, times=None, epochs=None, batch=2_000):
    """Log one metric, by default a point a step."""
    count = len(values)
    steps = range(count) if steps is None else steps
    rows = []
    for place, (value, step) in enumerate(zip(values, steps, strict=True)):
        named = {"step": None if step is None else int(step)}
        if epochs is not None or step is None:
            named["epoch"] = 0 if epochs is None else int(epochs[place])
        if times is not None:
            named["time_us"] = int(times[place])
        rows.append(writer.metric(key, float(value), **named))
    for start in range(0, count, batch):
        writer.write(rows[start : start + batch])


def read(store, **asked):
    query = CurveQuery(keys=KEYS, **{"entries": None, **asked})
    return store.reader.read_series_many(store.run_id, query)


def reduce(store, *, entries=None, window=None, ranks=None, all_attempts=False):
    """The curves as every point says that they are."""
    rows = store.reader.read(store.run_id, "metric", Query(all_attempts=all_attempts))
    window = Window() if window is None else window
    return reduce_curves(rows, CurveQuery(keys=KEYS, entries=entries, window=window, ranks=ranks))


def check_same(found, points):
    """A reduced curve stands for exactly the points of another that is not reduced."""
    assert [(c.key, c.attempt, c.rank, c.ranks) for c in found] == [
        (c.key, c.attempt, c.rank, c.ranks) for c in points
    ]
    for curve, every in zip(found, points, strict=True):
        assert curve.points == every.points
        assert curve.non_finite.sum() == every.non_finite.sum()
        some = not np.isnan(every.low).all()
        assert np.isnan(curve.low).all() != some
        if some:
            assert np.nanmin(curve.low) == np.nanmin(every.low)
            assert np.nanmax(curve.high) == np.nanmax(every.high)
        bad = curve.non_finite > 0
        known = set(every.non_finite_step[every.non_finite > 0].tolist())
        assert set(curve.non_finite_step[bad].tolist()) <= known
        assert (curve.non_finite_step[~bad] == -1).all()
        if bad.any() and len(known) == 1:
            assert set(curve.non_finite_step[bad].tolist()) == known


def check_entries(curve, every, axis):
    """Each entry has the low and high of its points, which are those up to the next one."""
    places = getattr(curve, axis)
    assert bool((np.diff(places) >= 0).all())
    assert places[0] == getattr(every, axis)[0]
    edges = np.append(np.cumsum(curve.count) - curve.count, curve.points)
    if bool((np.diff(getattr(every, axis)) >= 0).all()) and len(every) == every.points:
        for entry, (start, end) in enumerate(itertools.pairwise(edges)):
            part = every.last[start:end]
            finite = part[np.isfinite(part)]
            if len(finite):
                assert (curve.low[entry], curve.high[entry]) == (finite.min(), finite.max())
            assert curve.count[entry] == end - start


def test_a_window_is_exact_where_it_holds_few_points(tmp_path):
    store = Store(tmp_path)
    try:
        values = np.sin(np.arange(30_000) / 99)
        fill(store.writer, "loss", values)
        store.compact()
        (curve,) = read(store, entries=100, window=Window(low=12_345, high=12_400)).curves
        assert curve.exact
        assert curve.step.tolist() == list(range(12_345, 12_401))
        np.testing.assert_array_equal(curve.last, values[12_345:12_401])
        (wide,) = read(store, entries=100, window=Window(low=5, high=29_990)).curves
        assert (wide.exact, wide.points, len(wide)) == (False, 29_986, 100)
        assert not read(store, window=Window(low=40_000, high=50_000)).curves
        with pytest.raises(RunNotFoundError):
            store.reader.read_series_many("absent", CurveQuery(keys=KEYS, entries=5))
    finally:
        store.close()


@pytest.mark.parametrize("axis", ["step", "time_us"])
def test_of_a_wide_window_points_are_read_at_its_edges_only(tmp_path, monkeypatch, axis):
    monkeypatch.setattr(compaction, "CHUNK_ROWS", 640)
    store = Store(tmp_path)
    try:
        fill(store.writer, "loss", np.sin(np.arange(10_000) / 99))
        store.compact()
        read_chunks, opened = StoredRows.read_chunks, []

        def note(self, writer, kind, entries):
            opened.extend(entry.pk for entry in entries)
            return read_chunks(self, writer, kind, entries)

        monkeypatch.setattr(StoredRows, "read_chunks", note)
        low, high = (100, 9_900) if axis == "step" else (START_US + 100_000, START_US + 9_900_000)
        window = Window(axis=axis, low=low, high=high)
        (curve,) = read(store, entries=20, window=window).curves
        assert (len(curve), curve.points) == (20, 9_801)
        assert len(opened) == 2
        (whole,) = read(store, entries=20).curves
        assert whole.points == 10_000
        assert len(opened) == 2
    finally:
        store.close()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_spike_of_one_point_is_in_every_window_that_has_it(tmp_path, compacted):
    store = Store(tmp_path)
    try:
        values = np.zeros(20_000)
        values[9_999], values[123], values[15_000] = 400.0, -400.0, math.nan
        fill(store.writer, "loss", values)
        fill(store.writer, "val/loss", values[::-1])
        if compacted:
            store.compact()
        for entries in (1, 50, 300):
            for low, high in ((0, 19_999), (9_000, 19_999), (9_999, 9_999), (None, 9_999)):
                window = Window(low=low, high=high)
                first, _ = read(store, entries=entries, window=window).curves
                assert np.nanmax(first.high) == 400.0
                assert first.high_step[np.nanargmax(first.high)] == 9_999
        first, second = read(store, entries=50).curves
        assert first.non_finite_step.max() == 15_000
        assert second.non_finite_step.max() == 19_999 - 15_000
    finally:
        store.close()


@st.composite
def metrics(draw, count):
    """Values, steps, epochs and times of one metric, regular or as bad as they come."""
    seed = draw(st.integers(0, 1_000))
    generator = np.random.default_rng(seed)
    values = generator.normal(size=count).round(3)
    share = draw(st.sampled_from([0, 0, 0.002, 0.7]))
    values[generator.random(count) < share] = draw(st.sampled_from([math.nan, math.inf]))
    shape = draw(st.sampled_from(["line", "backwards", "gaps", "jumps", "shuffled", "none"]))
    steps = np.arange(count)
    if shape == "backwards":
        steps = steps[::-1]
    elif shape == "gaps":
        steps = np.cumsum(generator.integers(0, 4, count))
    elif shape == "jumps":
        steps = steps.copy()
        steps[generator.random(count) < 0.01] = count * 2
    elif shape == "shuffled":
        steps = generator.integers(0, count, count)
    elif shape == "none":
        steps = [None] * count
    times = START_US + 1_000 * np.arange(count)
    if draw(st.booleans()):
        times[count // 3 :] -= 700 * count
    epochs = np.arange(count) // draw(st.sampled_from([70, 10_000]))
    return values, steps, times, epochs if shape == "none" or draw(st.booleans()) else None


@pytest.mark.long
@settings(max_examples=count_examples(100))
@given(data=st.data())
def test_any_window_of_anything_agrees_with_the_points(tmp_path_factory, monkeypatch, data):
    count = 900
    # So few points are in many chunks then.
    monkeypatch.setattr(compaction, "CHUNK_ROWS", data.draw(st.sampled_from([200, 8_192])))
    store = Store(tmp_path_factory.mktemp("store"))
    try:
        for key in KEYS[:2]:
            values, steps, times, epochs = data.draw(metrics(count))
            fill(store.writer, key, values, steps=steps, times=times, epochs=epochs, batch=300)
            if data.draw(st.booleans()):
                store.compact()
        axis = data.draw(st.sampled_from(AXES))
        size = {"step": count, "epoch": 12, "time_us": 1_000 * count}[axis]
        offset = START_US if axis == "time_us" else 0
        bounds = st.none() | st.integers(-size // 5 + offset, size + offset).map(
            lambda n: max(0, n)
        )
        low, high = data.draw(bounds), data.draw(bounds)
        if low is not None and high is not None:
            low, high = min(low, high), max(low, high)
        window = Window(axis=axis, low=low, high=high)
        entries = data.draw(st.sampled_from([1, 2, 7, 100, 4_000]))
        found = read(store, entries=entries, window=window).curves
        check_same(found, reduce(store, window=window))
        for curve, every in zip(found, reduce(store, window=window), strict=True):
            assert len(curve) <= entries
            assert curve.exact == (every.points <= entries)
            check_entries(curve, every, axis)
        again = read(store, entries=entries, window=window).curves
        check_same(again, found)
    finally:
        store.close()


def test_ranks_and_attempts_are_told_apart(tmp_path):
    store = Store(tmp_path)
    try:
        values = np.arange(9_000, dtype=float)
        fill(store.writer, "loss", values)
        other = Writer(store, 0, rank=1)
        fill(other, "loss", values + 100_000)
        resumed = store.start(from_step=5_000)
        fill(resumed, "loss", values[:50], steps=range(5_000, 5_050))
        for compacted in (False, True):
            if compacted:
                store.compact()
            for entries in (None, 20):
                each = read(store, entries=entries, ranks=EACH_RANK).curves
                assert [(c.attempt, c.rank, c.points) for c in each] == [
                    (0, 0, 5_000),
                    (0, 1, 5_000),
                    (1, 0, 50),
                ]
                check_same(each, reduce(store, ranks=EACH_RANK))
                across = read(store, entries=entries).curves
                assert [(c.attempt, c.rank, c.ranks, c.points) for c in across] == [
                    (0, None, (0, 1), 10_000),
                    (1, None, (0,), 50),
                ]
                check_same(across, reduce(store))
                one = read(store, entries=entries, ranks=(1, 7)).curves
                assert [(c.attempt, c.rank) for c in one] == [(0, 1)]
                assert np.diff(across[0].step).min() > 0
                every = read(store, entries=entries, all_attempts=True).curves
                assert [c.points for c in every] == [18_000, 50]
    finally:
        store.close()


def test_a_damaged_rollup_costs_time_and_nothing_else(tmp_path):
    store = Store(tmp_path)
    try:
        fill(store.writer, "loss", np.arange(20_000) % 777)
        store.compact()
        store.connection.execute("UPDATE chunk SET rollup = substr(rollup, 1, 50)")
        window = Window(low=3, high=18_000)
        check_same(read(store, entries=30, window=window).curves, reduce(store, window=window))
    finally:
        store.close()


def test_a_long_tail_is_read_in_parts(tmp_path, monkeypatch):
    store = Store(tmp_path)
    try:
        values = np.sin(np.arange(20_000) / 77)
        values[4_321] = math.inf
        fill(store.writer, "loss", values)
        fill(store.writer, "other", values[:3_000])
        monkeypatch.setattr(curves, "_KEPT_ROWS", 100)
        monkeypatch.setattr(curves, "_PART_ROWS", 3_000)
        monkeypatch.setattr(stored_rows, "_BACKLOG_ROWS", 10_000)
        for entries in (None, 5, 100, 4_000):
            for window in (Window(), Window(low=777, high=19_000)):
                found = read(store, entries=entries, window=window).curves
                check_same(found, reduce(store, window=window))
        assert store.reader.met_backlog()
    finally:
        store.close()


def test_a_tail_that_is_kept_grows_and_goes(tmp_path):
    store = Store(tmp_path)
    try:
        reader = StoreReader(store.connect_reader)
        for round_ in range(6):
            fill(
                store.writer,
                "loss",
                np.arange(500) + round_,
                steps=range(round_ * 500, (round_ + 1) * 500),
            )
            if round_ == 3:
                store.compact()
            query = CurveQuery(keys=KEYS, entries=None)
            (curve,) = reader.read_series_many(store.run_id, query).curves
            assert curve.step.tolist() == list(range((round_ + 1) * 500))
        reader.close()
    finally:
        store.close()
