"""Processes that a training forks have their points in event files, and long names stay apart."""

import multiprocessing
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


def log_in_child(session, first):
    metrics = quark.MetricsLogger(session)
    for step in range(first, first + 20):
        metrics.log("child", float(step), step=step)


class Dataset:
    def __init__(self, session):
        self.session = session

    def __len__(self):
        return 12

    def __getitem__(self, index):
        quark.MetricsLogger(self.session).log("worker", float(index), step=index)
        return index


def test_forked_children_are_in_event_files(start, read_points):
    session = start()
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    session.flush("stored")
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=log_in_child, args=(session, first)) for first in (0, 100)]
    for child in children:
        child.start()
    for step in range(1, 50):
        metrics.log("m", float(step), step=step)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    session.end_run()
    assert read_points(session, "m") == [(step, float(step)) for step in range(50)]
    steps = [*range(20), *range(100, 120)]
    assert read_points(session, "child") == [(step, float(step)) for step in steps]


def test_workers_of_a_data_loader_are_in_event_files(start, read_points):
    data = pytest.importorskip("torch.utils.data")
    session = start()
    loader = data.DataLoader(
        Dataset(session), num_workers=2, batch_size=2, multiprocessing_context="fork"
    )
    metrics = quark.MetricsLogger(session)
    for step, batch in enumerate(loader):
        metrics.log("m", float(batch[0]), step=step)
    session.end_run()
    assert read_points(session, "m") == [(step, 2.0 * step) for step in range(6)]
    assert read_points(session, "worker") == [(step, float(step)) for step in range(12)]


@pytest.mark.filterwarnings("ignore:metric .* is outside Quark's naming rule:RuntimeWarning")
def test_long_and_odd_names_stay_apart_in_event_files(start, read_points):
    names = ["x" * 250, "x" * 249 + "y", "損失/測試 🙂", "a\\b", "%", "Loss", "loss"]
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for index, name in enumerate(names):
            metrics.log(name, float(index), step=0)
    for index, name in enumerate(names):
        assert read_points(session, name) == [(0, float(index))], name
