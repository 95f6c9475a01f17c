"""Curves and parts are read from any backend that reads, at the store's own pace if it has one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quark
from quark_core.backends import grids
from quark_core.backends.grids import EMPTY, FINITE, NOT_FINITE, GridBuilder, GridQuery
from quark_core.backends.series import Series, check_max_points, reduce_points
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import LayerSummaryRecord, ParameterSummaryRecord, SystemTelemetryRecord
from quark_core.records.columns import Columns
from quark_core.records.query import Query
from quark_core.runs.following import read_grid, read_series
from quark_core.runs.reading import iterate, read_rows


class Plain:
    """A backend that reads, and no more."""

    def __init__(self, columns):
        self.columns = columns
        self.reads = 0

    def read(self, run_id, kind, query):
        self.reads += 1
        if run_id != "r":
            raise RunNotFoundError(run_id)
        return self.columns.select(query) if kind == "metric" else Columns.empty(kind)

    def load_run(self, run_id):
        raise RunNotFoundError(run_id)

    def list_runs(self, *, project=None, limit=None):
        return []


class WithSeries(Plain):
    """One that can do better, and remembers what it was asked."""

    asked = None

    def read_series(self, run_id, key, *, max_points, all_attempts=False, rank=None):
        self.asked = (run_id, key, max_points, all_attempts, rank)
        none = np.empty(0, dtype=np.int64)
        return reduce_points(key, none, none, none, np.empty(0), max_points)

    def iterate(self, run_id, kind, query, *, rows):
        self.asked = (run_id, kind, query, rows)
        yield self.columns


@pytest.fixture
def columns():
    records = [
        quark.MetricRecord("r", "w", 0, 0, i, i, key, None, key, float(i), step=i)
        for i, key in enumerate(["a", "b"] * 50)
    ]
    return Columns.from_records("metric", records)


def test_one_rank_of_a_backend_that_only_reads_is_read_right():
    records = [
        quark.MetricRecord("r", f"w{rank}", 0, rank, i, i, "m", None, "m", float(i), step=i)
        for rank in range(3)
        for i in range(20)
    ]
    reader = Plain(Columns.from_records("metric", records))
    for limit, steps in ((None, list(range(20))), (3, [17, 18, 19]), (0, [])):
        query = Query(rank=1, limit=limit)
        found = read_rows(reader, "r", "metric", query)
        assert (found["step"].tolist(), set(found["rank"].tolist()) - {1}) == (steps, set())
        parts = list(iterate(reader, "r", "metric", query, 7))
        assert [step for part in parts for step in part["step"].tolist()] == steps
    assert read_series(reader, "r", "m", rank=2).ranks == (2,)
    across = read_series(reader, "r", "m", 10)
    assert (across.ranks, across.count.tolist()) == ((0, 1, 2), [6] * 10)


@pytest.mark.parametrize("rows", [1, 7, 100, 1000])
def test_parts_put_together_are_what_read_returns(columns, rows):
    for query in (Query(), Query(equals={"metric_key": "a"}, limit=30), Query(step=101)):
        whole = Plain(columns).read("r", "metric", query)
        parts = list(iterate(Plain(columns), "r", "metric", query, rows))
        assert all(0 < part.count <= rows for part in parts)
        joined = [record for part in parts for record in part.to_records()]
        assert tuple(joined) == whole.to_records()


def test_nothing_is_read_before_the_first_part_is_asked_for(columns):
    reader = Plain(columns)
    parts = iterate(reader, "r", "metric", Query())
    assert reader.reads == 0
    assert next(parts).count == 100
    with pytest.raises(RunNotFoundError):
        next(iterate(reader, "other", "metric", Query()))


def test_a_backend_that_can_do_better_is_asked_to(columns):
    reader = WithSeries(columns)
    query = Query(limit=3)
    assert list(iterate(reader, "r", "metric", query, 5)) == [columns]
    assert reader.asked == ("r", "metric", query, 5)
    assert read_series(reader, "r", "a", 9, True, 2).points == 0
    assert reader.asked == ("r", "a", 9, True, 2)
    assert reader.reads == 0


def test_a_curve_of_a_backend_that_only_reads(columns):
    series = read_series(Plain(columns), "r", "b", 10)
    assert (len(series), series.points, series.exact) == (10, 50, False)
    assert series.low[0] == 1.0
    assert series.high_step[-1] == 99
    assert read_series(Plain(columns), "r", "absent").points == 0


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, None, "9"])
def test_a_bad_size_of_parts_is_refused(columns, rows):
    with pytest.raises(SchemaValidationError, match="rows"):
        iterate(Plain(columns), "r", "metric", Query(), rows)


def test_a_logger_reads_curves_and_parts_of_what_was_just_logged(metrics):
    for step in range(1000):
        metrics.log_many({"train/loss": 1000.0 - step, "mAP": float(step)}, step=step)
    series = metrics.series("train/loss", max_points=10)
    assert isinstance(series, Series)
    assert (len(series), series.points) == (10, 1000)
    assert series.low.min() == 1.0
    every = metrics.series("train/loss")
    assert every.exact
    assert every.last.tolist() == [1000.0 - step for step in range(1000)]
    parts = list(metrics.iterate(metric_key="train/loss", step_min=10, rows=64))
    assert sum(part.count for part in parts) == 990
    assert np.concatenate([part["step"] for part in parts]).tolist() == list(range(10, 1000))


@pytest.mark.filterwarnings("ignore:metric:RuntimeWarning")
def test_either_form_of_a_name_finds_its_curve(session, metrics):
    metrics.log("mAP@50", 0.5, step=0)
    stored = "mAP_x40_50"
    for name in ("mAP@50", stored):
        assert quark.series(session, name).last.tolist() == [0.5]
        assert quark.series(session, name).key == stored
        assert sum(part.count for part in metrics.iterate(metric_key=name)) == 1


def test_parts_take_every_filter_of_columns(metrics):
    for step, value in enumerate([1.0, math.nan, 2.0, math.inf, 3.0]):
        metrics.log("loss", value, step=step, epoch=step // 2, namespace="train")
    for filters in (
        {"namespace": "train"},
        {"metric_name": "loss", "limit": 2},
        {"epoch": 1},
        {"epoch_min": 1, "epoch_max": 1},
        {"step": 4},
        {"step_max": 2, "include_non_finite": False},
    ):
        parts = list(metrics.iterate(**filters, rows=2))
        columns = metrics.columns(**filters)
        found = [row for part in parts for row in part["sequence"].tolist()]
        assert found == columns["sequence"].tolist()
        assert found
    with pytest.raises(SchemaValidationError, match="step_min"):
        metrics.iterate(step_min=-1)


def test_a_curve_of_a_run_that_was_ended_or_is_known_by_its_context(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
        assert quark.series(session.context, "m").last.tolist() == [1.0]
    for run in (session, session.context, quark.open_run(session.run_id, tmp_path)):
        assert quark.series(run, "m").last.tolist() == [1.0]
        assert quark.series(run, "absent", max_points=5).points == 0


def test_a_run_that_keeps_nothing_has_no_points(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        assert quark.series(session, "m").points == 0
        assert list(metrics.iterate()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"key": ""}, "key"),
        ({"key": 3}, "key"),
        ({"key": "m", "max_points": 0}, "max_points must be a positive integer, or None"),
        ({"key": "m", "max_points": -3}, "max_points must be a positive integer, or None"),
        ({"key": "m", "max_points": 1.5}, "max_points must be a positive integer, or None"),
        ({"key": "m", "max_points": True}, "max_points must be a positive integer, or None"),
        ({"key": "m", "max_points": 2**63}, "max_points must fit in 64 bits"),
    ],
)
def test_bad_arguments_are_named(session, arguments, named):
    with pytest.raises(SchemaValidationError, match=f"^{named}"):
        quark.series(session, **arguments)
    with pytest.raises(SchemaValidationError, match=f"^{named}"):
        quark.MetricsLogger(session).series(**arguments)


def test_what_is_no_run_is_refused(session):
    with pytest.raises(SchemaValidationError, match=r"^run must be .*quark\.open_run\('abc'\)"):
        quark.series("abc", "m")
    with pytest.raises(SchemaValidationError, match=r"^run must be .*quark\.open_run\(run_id\)"):
        quark.series(3, "m")
    quark.MetricsLogger(session).log("m", 1.0, step=0)
    session.end_run()
    (summary,) = quark.search_runs(storage_dir=session.context.storage_dir)
    with pytest.raises(SchemaValidationError, match=r"^run must be .*not RunSummary") as caught:
        quark.series(summary, "m")
    assert f"quark.open_run({session.run_id!r})" in str(caught.value)
    opened = quark.open_run(summary.run_id, storage_dir=session.context.storage_dir)
    assert quark.series(opened, "m").points == 1


def reduce_values(values, max_points=None, steps=None):
    steps = list(range(len(values))) if steps is None else steps
    array = np.array(steps, dtype=np.int64)
    return reduce_points(
        "k",
        array,
        np.where(array < 0, 3, -1),
        array * 10 + 5,
        np.array(values, dtype=np.float64),
        max_points,
    )


points = st.lists(
    st.tuples(
        st.floats() | st.sampled_from([0.1, 1e308, -1e308, math.nan, math.inf]),
        st.integers(-1, 1000),
    ),
    max_size=60,
)


@given(points, st.none() | st.integers(1, 70))
def test_each_entry_says_the_truth_about_its_points(pairs, max_points):
    values = [value for value, _ in pairs]
    steps = [step for _, step in pairs]
    series = reduce_values(values, max_points, steps)
    assert series.points == len(values)
    assert len(series) == (len(values) if max_points is None else min(len(values), max_points))
    assert series.exact == (len(series) == len(values))
    if len(series):
        assert series.count.max() - series.count.min() <= 1
    start = 0
    for entry in range(len(series)):
        stop = start + int(series.count[entry])
        part = list(zip(values[start:stop], steps[start:stop], strict=True))
        finite = [(value, step) for value, step in part if math.isfinite(value)]
        assert series.step[entry] == part[0][1]
        assert series.time_us[entry] == part[0][1] * 10 + 5
        assert series.epoch[entry] == (3 if part[0][1] < 0 else -1)
        assert series.last[entry] == part[-1][0] or math.isnan(part[-1][0])
        assert series.non_finite[entry] == len(part) - len(finite)
        if finite:
            low, high = min(v for v, _ in finite), max(v for v, _ in finite)
            assert (series.low[entry], series.high[entry]) == (low, high)
            assert series.low_step[entry] == next(s for v, s in finite if v == low)
            assert series.high_step[entry] == next(s for v, s in finite if v == high)
            assert low <= series.mean[entry] <= high
            exact = math.fsum(v / len(finite) for v, _ in finite)
            size = max(abs(low), abs(high))
            assert math.isclose(series.mean[entry], exact, rel_tol=1e-9, abs_tol=size * 1e-9)
        else:
            assert math.isnan(series.low[entry])
            assert math.isnan(series.high[entry])
            assert math.isnan(series.mean[entry])
            assert series.low_step[entry] == series.high_step[entry] == -1
        start = stop
    assert start == len(values)


def test_a_spike_of_one_point_among_a_million_is_seen():
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[654_321] = 1e6
    values[123_456] = -1e6
    series = reduce_values(values, 1000)
    assert len(series) == 1000
    top, bottom = int(series.high.argmax()), int(series.low.argmin())
    assert (series.high[top], series.high_step[top]) == (1e6, 654_321)
    assert (series.low[bottom], series.low_step[bottom]) == (-1e6, 123_456)


def test_a_mean_of_values_whose_sum_is_too_large_is_right():
    series = reduce_values([1.5e308, 1.7e308, 1.6e308, 1.0], 1)
    assert series.mean[0] == pytest.approx(1.2e308)


def test_an_exact_series_is_its_points():
    series = reduce_values([2.0, math.nan, math.inf, -1.0], 4, [5, 6, 7, -1])
    assert series.exact
    assert series.step.tolist() == [5, 6, 7, -1]
    assert series.last.tolist()[0::3] == [2.0, -1.0]
    assert series.last[2] == math.inf
    for figure in (series.low, series.high, series.mean):
        assert figure[[0, 3]].tolist() == [2.0, -1.0]
        assert np.isnan(figure[[1, 2]]).all()
    assert series.low_step.tolist() == [5, -1, -1, -1]
    assert series.non_finite.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("bound", [0, -1, 1.5, True, "3", 2**63])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(SchemaValidationError, match="max_points"):
        check_max_points(bound)


def test_no_bound_stays_none():
    assert check_max_points(None) is None
    assert check_max_points(np.int32(7)) == 7


NAMES = ["stem", "blocks.2", "blocks.10", "head"]


def head(sequence, rank=0):
    return "run0", f"writer{rank}", 0, rank, sequence, 1_767_225_600_000_000


def make_layers(steps=range(0, 40, 2), rank=0, norm=lambda place, step: 10.0 * place + step):
    """Activations in the model's order, gradients in the opposite one."""
    records = []
    for step in steps:
        for summary, direction, names in (
            ("activation", "forward", NAMES), ("gradient", "backward", NAMES[::-1]),
        ):  # fmt: skip
            for name in names:
                value = norm(NAMES.index(name), step)
                records.append(
                    LayerSummaryRecord(
                        *head(len(records), rank), name, "Linear", summary, direction, 0, 100,
                        step, norm=value if summary == "activation" else 2 * value,
                        nan_count=0, inf_count=0,
                    )
                )  # fmt: skip
    return records


def make_grid(records, field="norm", kind="layer", parts=1, **asked):
    builder = GridBuilder(GridQuery.build(kind, field, **asked))
    columns = Columns.from_records(kind, records)
    size = -(-columns.count // parts)
    for start in range(0, columns.count, size):
        builder.add_columns(columns.take(slice(start, start + size)))
    return builder.make_grid()


@pytest.mark.parametrize("parts", [1, 7])
def test_a_grid_of_few_steps_has_a_column_for_each(parts):
    grid = make_grid(make_layers(), summary_type="gradient", parts=parts)
    assert (grid.names, grid.exact, grid.depth) == (tuple(NAMES), True, None)
    assert grid.starts.tolist() == grid.ends.tolist() == list(range(0, 40, 2))
    expected = 2 * (10.0 * np.arange(4)[:, None] + np.arange(0, 40, 2))
    np.testing.assert_array_equal(grid.values, expected)
    assert (grid.marks == FINITE).all()
    assert grid.points == 80


@pytest.mark.parametrize("held", [2_000_000, 50])
def test_more_steps_than_columns_become_stretches_that_keep_the_maximum(held, monkeypatch):
    monkeypatch.setattr(grids, "_HELD_ROWS", held)
    spike = {(2, 333): 1e6}
    records = make_layers(range(500), norm=lambda p, s: spike.get((p, s), float(p)))
    grid = make_grid(records, summary_type="activation", bins=16, parts=40)
    assert not grid.exact
    assert 8 <= len(grid.starts) <= 16
    assert grid.starts[0] == 0
    assert (grid.starts[1:] == grid.ends[:-1] + 1).all()
    column = int(np.searchsorted(grid.ends, 333))
    assert grid.values[2, column] == 1e6
    grid.values[2, column] = 2.0
    np.testing.assert_array_equal(grid.values, np.arange(4.0)[:, None] + 0 * grid.starts)
    inside = make_grid(records, summary_type="activation", bins=16, low=330, high=340, parts=3)
    assert (inside.exact, inside.starts.tolist()) == (True, list(range(330, 341)))


def test_what_is_not_finite_is_told_from_what_is_not_there():
    records = make_layers([0, 4])
    broken = [
        replace_fields(records[0], norm=math.nan),
        replace_fields(records[1], norm=math.inf),
        replace_fields(records[2], norm=5.0, nan_count=3),
        replace_fields(records[3], norm=None),
        *(replace_fields(record, norm=None, inf_count=2) for record in records[8:9]),
    ]
    grid = make_grid(broken, summary_type="activation")
    assert grid.names == ("stem", "blocks.2", "blocks.10")
    assert grid.marks.tolist() == [
        [NOT_FINITE, NOT_FINITE], [NOT_FINITE, EMPTY], [NOT_FINITE, EMPTY]
    ]  # fmt: skip
    np.testing.assert_array_equal(grid.values, [[np.nan] * 2, [np.nan] * 2, [5.0, np.nan]])


def replace_fields(record, **fields):
    import msgspec

    return msgspec.structs.replace(record, **fields)


def test_rows_stand_in_the_order_of_the_model():
    gradients = [r for r in make_layers([3]) if r.summary_type == "gradient"]
    assert make_grid(gradients).names == tuple(NAMES)
    late = [*make_layers([3]), replace_fields(make_layers([9])[0], module_name="late")]
    assert make_grid(late, under="blocks.10").names == ("blocks.10",)
    assert make_grid(late).names == (*NAMES, "late")


def test_more_rows_than_asked_for_are_folded_by_module():
    records = [
        ParameterSummaryRecord(
            *head(i), f"blocks.{i // 4}.fc", "Linear", f"blocks.{i // 4}.fc.{name}", "weight",
            "float32", 1, step=0, gradient_norm=float(i), non_finite_gradient_count=int(i == 6),
        )
        for i, name in enumerate(["weight", "bias", "gain", "shift"] * 5)
    ]  # fmt: skip
    grid = make_grid(records, "gradient_norm", "parameter", rows=5)
    assert (grid.names, grid.depth, grid.left_out) == (
        tuple(f"blocks.{i}.fc" for i in range(5)), 3, 0,
    )  # fmt: skip
    assert grid.values[:, 0].tolist() == [3.0, 7.0, 11.0, 15.0, 19.0]
    assert grid.marks[:, 0].tolist() == [FINITE, NOT_FINITE, FINITE, FINITE, FINITE]
    assert make_grid(records, "gradient_norm", "parameter", rows=4).names == ("blocks",)
    flat = [replace_fields(record, parameter_name=f"p{i}") for i, record in enumerate(records)]
    cut = make_grid(flat, "gradient_norm", "parameter", rows=4)
    assert (cut.names, cut.left_out) == (("p0", "p1", "p2", "p3"), 16)


def test_ranks_are_rows_of_telemetry():
    records = [
        SystemTelemetryRecord(*head(step, rank), "step", step, step_time_ms=rank + step / 10)
        for rank in (10, 2)
        for step in range(3)
    ]
    grid = make_grid(records, "step_time_ms", "telemetry")
    assert grid.names == ("2", "10")
    np.testing.assert_allclose(grid.values, [[2.0, 2.1, 2.2], [10.0, 10.1, 10.2]])
    by_rank = make_grid(make_layers([0], rank=3), by="rank", summary_type="gradient")
    assert (by_rank.names, by_rank.values.tolist()) == (("3",), [[60.0]])


def test_a_run_without_such_records_gives_an_empty_grid():
    grid = GridBuilder(GridQuery.build("layer", "norm")).make_grid()
    assert (grid.names, grid.values.shape, grid.exact) == ((), (0, 0), True)


class ReadOnly:
    """A backend that can only be read."""

    def __init__(self, kind, records):
        self._columns = Columns.from_records(kind, records)

    def read(self, run_id, kind, query):
        assert run_id == "run0"
        return self._columns.select(query)

    def load_run(self, run_id):
        raise NotImplementedError

    def list_runs(self, *, project=None, limit=None):
        raise NotImplementedError


def test_any_backend_that_reads_has_grids():
    records = [*make_layers(rank=0), *make_layers(rank=1, norm=lambda p, s: -1.0)]
    reader = ReadOnly("layer", records)
    asked = GridQuery.build("layer", "norm", summary_type="activation", low=3, high=9)
    grid = read_grid(reader, "run0", asked)
    assert grid.starts.tolist() == [4, 6, 8]
    np.testing.assert_array_equal(grid.values[1], [14.0, 16.0, 18.0])
    one = read_grid(reader, "run0", replace(asked, rank=1))
    assert (one.values == -1.0).all()


@pytest.mark.parametrize(
    ("kind", "field", "asked", "message"),
    [
        ("metric", "value", {}, "kind must be one of 'layer', 'parameter', 'telemetry'"),
        ("layer", "module_name", {}, "field of layer records must be one of"),
        ("layer", "step", {}, "field of layer records must be one of"),
        ("parameter", "value_norm", {"summary_type": "gradient"}, "applies to layers only"),
        ("layer", "norm", {"summary_type": "weight"}, "summary_type must be"),
        (
            "telemetry",
            "step_time_ms",
            {"by": "name"},
            "records must be one of 'rank'",
        ),
        ("layer", "norm", {"bins": 0}, "bins must be from 1 to 4000"),
        ("layer", "norm", {"rows": 3_000}, "rows must be from 1 to 2000"),
        ("layer", "norm", {"low": -1}, "low must not be negative"),
        ("telemetry", "step_time_ms", {"under": "a"}, "under must name a module"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, field, asked, message):
    with pytest.raises(SchemaValidationError, match=message):
        GridQuery.build(kind, field, **asked)
