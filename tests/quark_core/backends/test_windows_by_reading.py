"""Curves of several metrics through a window: no extreme is lost, no point counted twice."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import count_examples

from quark_core.backends.curves import (
    AXES,
    EACH_RANK,
    CurveQuery,
    Window,
    check_cursor,
    reduce_curves,
)
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.columns import Columns
from quark_core.records.names import split_name

VALUES = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), st.floats(-1e6, 1e6, width=32)
)


def build(keys=("m",), *, entries=None, **asked):
    return CurveQuery.build(keys, entries=entries, **asked)


@st.composite
def points(draw):
    """Rows of two metrics, of some ranks and attempts, with steps as they come."""
    count = draw(st.integers(0, 40))
    rows = []
    for sequence in range(count):
        attempt, rank = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        step = draw(st.one_of(st.none(), st.integers(0, 12)))
        epoch = draw(st.integers(0, 3)) if step is None else draw(st.none() | st.integers(0, 3))
        head = ("run0", f"w{attempt}{rank}", attempt, rank, sequence, draw(st.integers(0, 50)))
        key = draw(st.sampled_from(["loss", "val/loss"]))
        rows.append(MetricRecord(*head, key, *split_name(key), draw(VALUES), step, epoch))
    rows.sort(key=lambda row: (row.attempt, row.rank, row.sequence))
    return rows


windows = st.builds(
    lambda axis, bounds: Window(axis=axis, low=bounds[0], high=bounds[1]),
    st.sampled_from(AXES),
    st.one_of(
        st.tuples(st.none(), st.none()),
        st.tuples(st.none(), st.integers(0, 20)),
        st.tuples(st.integers(0, 20), st.none()),
        st.lists(st.integers(0, 20), min_size=2, max_size=2).map(sorted).map(tuple),
    ),
)


def is_within(row, window):
    place = getattr(row, window.axis)
    if window.low is None and window.high is None:
        return True
    low, high = window.low, window.high
    return place is not None and (low is None or place >= low) and (high is None or place <= high)


def check_curve(curve, rows, window):
    """A curve stands for exactly these points."""
    finite = [row for row in rows if math.isfinite(row.value)]
    assert curve.points == len(rows)
    assert int(curve.non_finite.sum()) == len(rows) - len(finite)
    if finite:
        assert np.nanmin(curve.low) == min(row.value for row in finite)
        assert np.nanmax(curve.high) == max(row.value for row in finite)
    places = getattr(curve, window.axis)
    assert bool((np.diff(places) >= 0).all())
    starts = sorted(-1 if (at := getattr(row, window.axis)) is None else at for row in rows)
    assert places[0] == starts[0]
    has_bad = curve.non_finite > 0
    steps = {-1 if row.step is None else row.step for row in rows if not math.isfinite(row.value)}
    assert set(curve.non_finite_step[has_bad].tolist()) <= steps
    assert (curve.non_finite_step[~has_bad] == -1).all()
    for low, step in zip(curve.low.tolist(), curve.low_step.tolist(), strict=True):
        if not math.isnan(low):
            assert any(
                row.value == low and (-1 if row.step is None else row.step) == step
                for row in finite
            )


@pytest.mark.long
@settings(max_examples=count_examples(300))
@given(
    points(), windows, st.none() | st.integers(1, 12), st.sampled_from([None, EACH_RANK, (0, 2)])
)
def test_every_point_of_the_window_is_in_one_curve(rows, window, entries, ranks):
    columns = Columns.from_records("metric", rows)
    keys = ("val/loss", "absent", "loss")
    query = CurveQuery(keys=keys, entries=entries, window=window, ranks=ranks)
    curves = reduce_curves(columns, query)
    wanted = [row for row in rows if is_within(row, window)]
    if isinstance(ranks, tuple):
        wanted = [row for row in wanted if row.rank in ranks]
    groups = {}
    for row in wanted:
        rank = None if ranks is None else row.rank
        groups.setdefault((keys.index(row.metric_key), row.attempt, rank or 0), []).append(row)
    assert [(keys.index(c.key), c.attempt, c.rank or 0) for c in curves] == sorted(groups)
    for curve, group in zip(curves, (groups[name] for name in sorted(groups)), strict=True):
        assert entries is None or len(curve) <= entries
        assert set(curve.ranks) == {row.rank for row in group}
        assert (curve.rank is None) == (ranks is None)
        check_curve(curve, group, window)
        if curve.exact:
            assert len(curve) == len(group)
        if len(curve.ranks) == 1 and (entries is None or len(group) <= entries):
            assert curve.exact


def test_steps_that_go_back_are_sorted_within_a_rank_and_attempt():
    steps = [(0, 0, 3), (0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 0, 1)]
    rows = [
        MetricRecord("run0", f"w{a}{r}", a, r, n, n, "m", None, "m", float(n), step)
        for n, (a, r, step) in enumerate(steps)
    ]
    columns = Columns.from_records("metric", rows)
    each = reduce_curves(columns, build(["m"], ranks=EACH_RANK))
    assert [(c.attempt, c.rank, c.step.tolist(), c.last.tolist()) for c in each] == [
        (0, 0, [1, 2, 3], [1.0, 2.0, 0.0]),
        (0, 1, [2], [3.0]),
        (1, 0, [1], [4.0]),
    ]
    first, second = reduce_curves(columns, build(["m"]))
    assert (first.step.tolist(), first.count.tolist()) == ([1, 2, 3], [1, 2, 1])
    assert (first.ranks, second.ranks, first.exact) == ((0, 1), (0,), False)


@pytest.mark.parametrize(
    ("check", "argument", "named"),
    [
        (lambda given: build(axis=given), "loss", "axis must be one of .*relative_us"),
        (lambda given: build(low=given), -1, "low"),
        (lambda given: build(high=given), 1.5, "high"),
        (lambda given: build(low=given, high=3), 4, "low must not be above high"),
        (lambda given: build(entries=given), 0, "entries"),
        (lambda given: build(entries=given), "many", "entries"),
        (build, "loss", "keys"),
        (build, [3], "keys"),
        (lambda given: build(ranks=given), "all", "ranks"),
        (lambda given: build(ranks=given), [None], "ranks"),
        (lambda given: build(ranks=given), [-1], "ranks"),
        (check_cursor, [("w", 1)], "cursor"),
        (check_cursor, {"w": -1}, "cursor"),
        (check_cursor, {3: 1}, "cursor"),
        (check_cursor, {"w": None}, "cursor"),
    ],
)
def test_a_bad_argument_is_named(check, argument, named):
    with pytest.raises(SchemaValidationError, match=named):
        check(argument)


def test_keys_and_ranks_are_there_once():
    assert build(["b", "a", "b"]).keys == ("b", "a")
    assert build(ranks=[3, 0, 3]).ranks == (0, 3)
    assert build(ranks="each").ranks == EACH_RANK
    assert build().ranks is None


def test_bounds_since_the_run_began_become_times():
    query = build(axis="relative_us", low=5, high=2**63 - 1)
    assert query.since_start
    absolute = query.begin_at(1_000)
    assert absolute == build(axis="time_us", low=1_005, high=2**63 - 1)
    assert absolute.begin_at(1_000) == absolute
    # Without bounds there is nothing to be counted from anywhere.
    assert build(axis="relative_us") == build(axis="time_us")
