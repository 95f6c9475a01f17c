"""Processes that a training forks have their points in event files, and long names stay apart."""

import os

import pytest

import quark

pytest.importorskip("tensorboard")
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


@pytest.fixture
def read_points(read_events):
    """(step, value) of every point of a metric, in whatever folder of the run, sorted."""

    def read(session, name):
        root = session.run_path / "tensorboard"
        folders = {path.parent for path in root.rglob("events.out.tfevents.*")}
        return sorted(point for folder in folders for point in read_events(folder).points(name))

    return read


@pytest.mark.long
def test_forked_children_are_in_event_files(start, read_points, log_in_forks):
    session = start()
    log_in_forks(session)
    assert read_points(session, "m") == [(step, float(step)) for step in range(50)]
    steps = [*range(20), *range(100, 120)]
    assert read_points(session, "child") == [(step, float(step)) for step in steps]


@pytest.mark.long
def test_workers_of_a_data_loader_are_in_event_files(start, read_points, log_in_workers):
    session = start()
    log_in_workers(session)
    assert read_points(session, "m") == [(step, 2.0 * step) for step in range(6)]
    assert read_points(session, "worker") == [(step, float(step)) for step in range(12)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")
def test_long_and_odd_names_stay_apart_in_event_files(start, read_points):
    names = ["x" * 250, "x" * 249 + "y", "損失/測試 🙂", "a\\b", "%", "Loss", "loss"]
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for index, name in enumerate(names):
            metrics.log(name, float(index), step=0)
    for index, name in enumerate(names):
        assert read_points(session, name) == [(0, float(index))], name
