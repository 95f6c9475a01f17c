"""Curves and parts are read from any backend that reads, at the store's own pace if it has one."""

import math

import numpy as np
import pytest

import quark
from quark_core.backends.series import Series, reduce_points
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.columns import Columns
from quark_core.records.query import Query
from quark_core.runs.following import read_series
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


def test_a_logger_reads_curves_and_parts_of_what_was_just_logged(session):
    metrics = quark.MetricsLogger(session)
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
def test_either_form_of_a_name_finds_its_curve(session):
    metrics = quark.MetricsLogger(session)
    metrics.log("mAP@50", 0.5, step=0)
    stored = "mAP_x40_50"
    for name in ("mAP@50", stored):
        assert quark.series(session, name).last.tolist() == [0.5]
        assert quark.series(session, name).key == stored
        assert sum(part.count for part in metrics.iterate(metric_key=name)) == 1


def test_parts_take_every_filter_of_columns(session):
    metrics = quark.MetricsLogger(session)
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
