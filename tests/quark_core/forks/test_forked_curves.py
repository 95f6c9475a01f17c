"""A fork's curves begin with those of its parent, wherever they are read."""

import contextlib
import logging

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.backends.curves import CurveQuery
from quark_core.records.query import Query
from quark_core.runs import following
from quark_core.runs.following import (
    read_changes,
    read_heads,
    read_mark,
    read_series,
    read_series_many,
)
from quark_core.runs.reading import iterate, read_rows

LAST = 5


def log_steps(session, values, key="loss"):
    metrics = quark.MetricsLogger(session)
    for step, value in values:
        metrics.log(key, value, step=step)
    session.open_run.flush()
    return metrics


def run(root, values, key="loss", **arguments):
    with quark.start_run(project="p", storage_dir=root, **arguments) as session:
        log_steps(session, values, key)
    return session.run_id


def show(rows):
    return [
        (row.step, row.value)
        for row in (rows if isinstance(rows, (list, tuple)) else rows.to_records())
    ]


@pytest.fixture
def root(tmp_path):
    return tmp_path


@pytest.fixture
def parent(root):
    return run(root, [(step, 10.0 - step) for step in range(10)], config={"lr": 0.1})


@pytest.fixture
def child(root, parent):
    return run(root, [(6, 60.0), (7, 70.0)], fork_from=(parent, LAST))


EXPECTED = [*((step, 10.0 - step) for step in range(LAST + 1)), (6, 60.0), (7, 70.0)]


def test_every_way_to_read_a_curve_gives_the_parents_beginning(root, parent, child):
    opened = quark.open_run(child, storage_dir=root)
    metrics = quark.MetricsLogger(opened)
    assert show(metrics.read(metric_key="loss")) == EXPECTED
    assert show(metrics.read(step_min=4, step_max=6)) == EXPECTED[4:7]
    assert show(metrics.read(step=5)) == EXPECTED[5:6]
    assert show(metrics.read(limit=3)) == EXPECTED[-3:]
    assert metrics.columns()["step"].tolist() == [step for step, _ in EXPECTED]
    reader = opened.open_run.reader
    parts = list(iterate(reader, child, "metric", Query(), rows=2))
    assert [row for part in parts for row in show(part)] == EXPECTED
    assert [row for part in iterate(reader, child, "metric", Query(limit=4)) for row in show(part)]
    series = quark.series(opened, "loss")
    assert list(zip(series.step.tolist(), series.last.tolist(), strict=True)) == EXPECTED
    short = quark.series(opened, "loss", max_points=2)
    assert len(short) == 2
    assert short.points == len(EXPECTED)
    assert short.high.max() == 70.0
    assert short.low.min() == 5.0
    # The parent is what it was.
    assert len(show(read_rows(reader, parent, "metric", Query()))) == 10


def test_the_parents_points_are_earlier_attempts(root, child):
    opened = quark.open_run(child, storage_dir=root)
    assert set(quark.MetricsLogger(opened).columns()["attempt"].tolist()) == {-1, 0}


@pytest.mark.parametrize("axis", ["step", "time_us"])
def test_curves_through_a_window_have_both_parts(root, child, axis):
    reader = quark.open_run(child, storage_dir=root).open_run.reader
    query = CurveQuery.build(["loss"], entries=None, axis=axis)
    found = read_series_many(reader, child, query)
    shown = [
        point
        for curve in found.curves
        for point in zip(curve.step.tolist(), curve.last.tolist(), strict=True)
    ]
    assert shown == EXPECTED
    assert [curve.attempt for curve in found.curves] == [-1, 0]
    late = CurveQuery.build(["loss"], entries=10, low=6)
    assert [c.attempt for c in read_series_many(reader, child, late).curves] == [0]
    early = CurveQuery.build(["loss"], entries=10, high=4)
    assert [c.points for c in read_series_many(reader, child, early).curves] == [5]


def test_what_search_and_tables_know_counts_the_beginning(root, parent, child):
    (found,) = [run for run in quark.search_runs(storage_dir=root) if run.run_id == child]
    loss = found.metrics["loss"]
    assert (loss.count, loss.first, loss.last, loss.low, loss.high) == (8, 10.0, 70.0, 5.0, 70.0)
    assert (loss.last_step, found.newest_step) == (7, 7)
    low = quark.search_runs(storage_dir=root, where="min(loss) < 5.5 and max(loss) > 50")
    assert [run.run_id for run in low] == [child]


def test_a_fork_that_has_logged_nothing_is_its_parents_beginning(root, parent):
    with quark.start_run(project="p", storage_dir=root, fork_from=(parent, LAST)) as session:
        assert show(quark.MetricsLogger(session).read()) == EXPECTED[: LAST + 1]
        (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == session.run_id]
        assert (found.newest_step, found.metrics["loss"].last) == (LAST, 5.0)


@pytest.mark.parametrize(
    ("axis", "read"), [("step", "_read_own_curves"), ("time_us", "_read_metrics")]
)
def test_what_comes_while_the_curves_are_read_is_in_them_or_comes_later(
    root, monkeypatch, axis, read
):
    first = quark.start_run(project="p", storage_dir=root)
    log_steps(first, [(0, 0.0), (1, 1.0)])
    second = quark.start_run(project="p", storage_dir=root, fork_from=(first, 3))
    opened = quark.open_run(second.run_id, storage_dir=root)
    reader, child = opened.open_run.reader, second.run_id
    read_truly = getattr(following, read)
    later = [2, 3]

    def read_and_go_on(reader, run_id, *arguments):
        found = read_truly(reader, run_id, *arguments)
        if run_id == first.run_id and later:
            step = later.pop(0)
            log_steps(first, [(step, float(step))])
        return found

    monkeypatch.setattr(following, read, read_and_go_on)
    curves = read_series_many(reader, child, CurveQuery.build(["loss"], entries=None, axis=axis))
    monkeypatch.undo()
    came = read_changes(reader, child, curves.cursor, kinds=["metric"])
    rows = came.records.get("metric")
    steps = [step for curve in curves.curves for step in curve.step.tolist()]
    assert steps + ([] if rows is None else rows["step"].tolist()) == [0, 1, 2, 3][: 4 - len(later)]
    for session in (first, second):
        session.end_run()


@contextlib.contextmanager
def settled_run(root, **arguments):
    """A run of which nothing comes but what is logged, once it is made out what it is made of."""
    with quark.start_run(project="p", storage_dir=root, **arguments) as session:
        session.open_run.background.join()
        yield session


def test_what_comes_is_followed_into_fork_and_parent_alike(root, monkeypatch):
    monkeypatch.setattr("quark_core.delivery.stream.HEARTBEAT_S", 3600.0)
    with (
        settled_run(root) as first,
        settled_run(root, fork_from=(first, 3)) as second,
    ):
        follow_both(root, first, second)


def follow_both(root, first, second):
    log_steps(first, [(0, 0.0), (1, 1.0)])
    log_steps(second, [(4, 40.0)])
    opened = quark.open_run(second.run_id, storage_dir=root)
    reader, child = opened.open_run.reader, second.run_id
    everything = read_changes(reader, child, {})
    assert show(everything.records["metric"]) == [(0, 0.0), (1, 1.0), (4, 40.0)]
    curves = read_series_many(reader, child, CurveQuery.build(["loss"], entries=None))
    heads = read_heads(reader, child)
    assert dict(curves.cursor) == dict(heads.cursor)
    mark = read_mark(reader, child)
    assert not read_changes(reader, child, heads.cursor)
    # The parent goes on: up to the step of the fork its points are the fork's too.
    log_steps(first, [(2, 2.0), (3, 3.0), (4, 4.0)])
    log_steps(second, [(5, 50.0)])
    assert read_mark(reader, child) != mark
    came = read_changes(reader, child, heads.cursor)
    assert show(came.records["metric"]) == [(2, 2.0), (3, 3.0), (5, 50.0)]
    assert not read_changes(reader, child, came.cursor)
    # A cursor of the run itself is none of the fork.
    assert read_changes(reader, child, read_heads(reader, first.run_id).cursor).stale


def test_the_parent_of_the_same_process_is_flushed_before(root):
    with quark.start_run(project="p", storage_dir=root) as first:
        metrics = quark.MetricsLogger(first)
        for step in range(2_000):
            metrics.log("loss", float(step), step=step)
        with quark.start_run(project="p", storage_dir=root, fork_from=(first, 1_500)) as second:
            (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == second.run_id]
            assert found.metrics["loss"].count == 1_501


def test_a_fork_of_a_fork_has_both_beginnings(root, parent, child):
    grandchild = run(root, [(7, -7.0)], fork_from=(child, 6))
    opened = quark.open_run(grandchild, storage_dir=root)
    rows = quark.MetricsLogger(opened).read()
    assert show(rows) == [*EXPECTED[:7], (7, -7.0)]
    assert [row.attempt for row in rows] == [-2] * 6 + [-1, 0]
    assert len({row.run_id for row in rows}) == 3
    # Before the step of the first fork nothing is left of the child.
    early = run(root, [(3, -3.0)], fork_from=(child, 2))
    opened = quark.open_run(early, storage_dir=root)
    assert show(quark.MetricsLogger(opened).read()) == [*EXPECTED[:3], (3, -3.0)]
    (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == early]
    assert (found.metrics["loss"].count, found.metrics["loss"].low) == (4, -3.0)


@pytest.mark.long
def test_a_chain_of_fifty_forks_is_read_as_one_curve(root):
    last = run(root, [(0, 0.0), (1, 0.0)])
    for step in range(1, 51):
        last = run(root, [(step, float(step)), (step + 1, -1.0)], fork_from=(last, step - 1))
    opened = quark.open_run(last, storage_dir=root)
    rows = show(quark.MetricsLogger(opened).read())
    assert rows == [*((step, float(step)) for step in range(51)), (51, -1.0)]
    assert quark.series(opened, "loss", max_points=10).points == 52
    (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == last]
    assert found.metrics["loss"].count == 52


def test_what_attempts_of_the_parent_have_hidden_stays_hidden(root):
    with quark.start_run(project="p", storage_dir=root) as first:
        log_steps(first, [(step, float(step)) for step in range(6)])
    with quark.resume_run(
        run_id=first.run_id, storage_dir=root, reopen=True, from_step=3
    ) as resumed:
        log_steps(resumed, [(step, step * 100.0) for step in range(3, 6)])
    child = run(root, [(5, -5.0)], fork_from=(first, 4))
    metrics = quark.MetricsLogger(quark.open_run(child, storage_dir=root))
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 300.0), (4, 400.0), (5, -5.0)]
    assert show(metrics.read()) == expected
    assert sorted({row.attempt for row in metrics.read()}) == [-2, -1, 0]
    assert len(metrics.read(all_attempts=True)) == 8
    (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == child]
    assert (found.metrics["loss"].count, found.metrics["loss"].high) == (6, 400.0)


def test_a_fork_that_is_resumed_before_its_step_does_the_parents_steps_again(root, parent):
    with quark.start_run(project="p", storage_dir=root, fork_from=(parent, LAST)) as session:
        log_steps(session, [(6, 60.0)])
    with quark.resume_run(
        run_id=session.run_id, storage_dir=root, reopen=True, from_step=3
    ) as again:
        log_steps(again, [(3, 33.0)])
    opened = quark.open_run(session.run_id, storage_dir=root)
    assert opened.context.run.fork_step == 2
    assert show(quark.MetricsLogger(opened).read()) == [*EXPECTED[:3], (3, 33.0)]
    (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == session.run_id]
    assert (found.metrics["loss"].count, found.newest_step) == (4, 3)
    with quark.resume_run(
        run_id=session.run_id, storage_dir=root, reopen=True, from_step=0
    ) as again:
        log_steps(again, [(0, 0.5)])
    opened = quark.open_run(session.run_id, storage_dir=root)
    assert show(quark.MetricsLogger(opened).read()) == [(0, 0.5)]


def test_a_fork_whose_parent_was_removed_is_told_of_once_and_read(root, parent, child, caplog):
    removed = CliRunner().invoke(cli, ["rm", parent, "-d", str(root), "--yes"])
    assert removed.exit_code == 0, removed.output
    opened = quark.open_run(child, storage_dir=root)
    with caplog.at_level(logging.WARNING, "quark"):
        for _ in range(2):
            assert show(quark.MetricsLogger(opened).read()) == EXPECTED[6:]
    told = [record for record in caplog.records if "was forked from" in record.getMessage()]
    assert len(told) == 1
    assert parent in told[0].getMessage()
    assert quark.series(opened, "loss").step.tolist() == [6, 7]
    with pytest.raises(quark.RunNotFoundError, match=r"fork_from .*trash"):
        quark.start_run(project="p", storage_dir=root, fork_from=(parent, 1))


def test_points_without_a_step_are_nobodys_but_the_runs_that_logged_them(root):
    with quark.start_run(project="p", storage_dir=root) as first:
        metrics = quark.MetricsLogger(first)
        metrics.log("acc", 0.5, epoch=0)
        metrics.log("loss", 1.0, step=0)
        metrics.log("loss", 0.5, step=1)
    child = run(root, [(1, 7.0)], fork_from=(first, 0))
    all_of_it = run(root, [(2, 7.0)], fork_from=(first, 1))
    for fork, count in ((child, 2), (all_of_it, 3)):
        rows = quark.MetricsLogger(quark.open_run(fork, storage_dir=root)).read()
        assert [row.metric_key for row in rows] == ["loss"] * count
        (found,) = [r for r in quark.search_runs(storage_dir=root) if r.run_id == fork]
        assert set(found.metrics) == {"loss"}
        assert found.metrics["loss"].count == count


def test_what_the_fork_logs_before_its_step_stands_beside_the_parents(root, parent):
    child = run(root, [(2, 22.0), (6, 60.0)], fork_from=(parent, LAST))
    opened = quark.open_run(child, storage_dir=root)
    rows = quark.MetricsLogger(opened).read(step=2)
    assert [(row.attempt, row.value) for row in rows] == [(-1, 8.0), (0, 22.0)]


def test_ranks_of_parent_and_fork_are_kept_apart(root, parent, child):
    reader = quark.open_run(child, storage_dir=root).open_run.reader
    assert read_series(reader, child, "loss", 100, rank=0).points == len(EXPECTED)
    assert read_series(reader, child, "loss", 100, rank=1).points == 0
    assert read_rows(reader, child, "metric", Query(rank=1)).count == 0
