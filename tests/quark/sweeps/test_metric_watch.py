"""What a trial sees of what its run logs."""

import threading
from collections import deque

import quark
from quark.sweeps.trial import MetricWatch


def log(root, watch, *calls):
    """Log what is given under a watch; each call is a metric or a mapping, a value, and a place."""
    with quark.start_run(project="digits", storage_dir=root) as session:
        watch.install(session.open_run)
        metrics = quark.MetricsLogger(session)
        for metric, value, place in calls:
            if isinstance(metric, dict):
                metrics.log(metric, **place)
            else:
                metrics.log(metric, value, **place)
        return len(metrics.read(include_non_finite=True))


def test_the_newest_value_of_each_metric_is_kept(root):
    watch = MetricWatch(["val/acc", "latency"], ())
    kept = log(
        root, watch, ("val/acc", 0.1, {"step": 0}), ("loss", 9.0, {"step": 0}),
        ({"val/acc": 0.2, "latency": 5, "loss": 8.0}, None, {"step": 1}),
        ("latency", 4.0, {"epoch": 7}),
    )  # fmt: skip
    assert watch.newest == [0.2, 4.0]
    assert watch.step == 7
    assert kept == 6
    assert not watch.waiting


def test_what_is_not_finite_is_no_figure(root):
    watch = MetricWatch(["val/acc"], None)
    log(root, watch, ("val/acc", 0.1, {"step": 0}), ("val/acc", float("nan"), {"step": 1}))
    assert watch.newest == [None]
    assert [*watch.waiting] == [(0, (0.1,)), (1, (None,))]


def test_each_rung_is_reached_once_also_where_several_are_passed(root):
    watch = MetricWatch(["val/acc"], (1, 3, 9, 27))
    log(root, watch, *(("val/acc", step / 10, {"step": step}) for step in (0, 1, 2, 2, 12, 11)))
    assert [*watch.waiting] == [(1, (0.1,)), (3, (1.2,)), (9, (1.2,))]


def test_rungs_are_about_the_first_metric(root):
    told = []
    watch = MetricWatch(["val/acc", "latency"], (2,), lambda: told.append([*watch.waiting]))
    log(
        root,
        watch,
        ("latency", 1.0, {"step": 5}),
        ({"val/acc": 0.5, "latency": 2.0}, None, {"step": 5}),
    )
    # What one call logs is of one moment, in whichever order.
    assert told == [[(2, (0.5, 2.0))]]


def test_rows_have_their_metrics_in_any_order_and_company(root):
    watch = MetricWatch(["val/acc", "latency"], None)
    shapes = [
        {"latency": 1.0, "val/acc": 0.1},
        {"val/acc": 0.2, "latency": 2.0},
        {"loss": 9.0},
        {"a": 0.0, "val/acc": 0.3, "b": 0.0, "latency": 3.0},
    ]
    steps = [(shape, None, {"step": step}) for step, shape in enumerate(shapes * 2)]
    log(root, watch, *steps)
    figures = [(0.1, 1.0), (0.2, 2.0), (0.3, 3.0)] * 2
    assert [*watch.waiting] == list(zip((0, 1, 3, 4, 5, 7), figures, strict=True))


def test_more_shapes_of_rows_than_are_remembered(root):
    watch = MetricWatch(["val/acc"], None)
    rows = [
        ({f"m{step}": 0.0, "val/acc": float(step)}, None, {"step": step}) for step in range(1_500)
    ]
    log(root, watch, *rows)
    assert [*watch.waiting] == [(step, (float(step),)) for step in range(1_500)]


def test_other_loggers_and_epochs_count_too(root):
    watch = MetricWatch(["val/acc"], None)
    with quark.start_run(project="digits", storage_dir=root) as session:
        watch.install(session.open_run)
        first, second = quark.MetricsLogger(session), quark.MetricsLogger(session)
        first.log("val/acc", 0.1, epoch=0)
        second.log("val/acc", 0.2, epoch=1)
        session.write(
            [quark.MetricRecord(None, "", 0, 0, 0, 0, "val/acc", "val", "acc", 0.3, step=2)]
        )
    assert [step for step, _ in watch.waiting] == [0, 1, 2]


def test_threads_that_meet_at_a_rung_reach_it_once():
    watch = MetricWatch(["val/acc"], (1, 2))
    others = []

    class Met(deque):
        def popleft(self):
            if not others:
                others.append(threading.Thread(target=watch.note, args=([0.5], 2)))
                others[0].start()
                others[0].join(0.2)  # it waits, or it takes what this thread was about to take
            return super().popleft()

    watch._rungs = Met(watch._rungs)
    watch.note([0.5], 2)
    others[0].join()
    assert [*watch.waiting] == [(1, (0.5,)), (2, (0.5,))]
