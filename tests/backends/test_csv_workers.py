"""Processes that a training forks log to the CSV mirror too, and long names are kept apart."""

import multiprocessing
import os

import pytest

import quark

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")


def read_steps(mirror, run_id, key):
    session = quark.open_run(mirror, run_id)
    return sorted(record.step for record in quark.MetricsLogger(session).read(metric_key=key))


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


def test_forked_children_are_in_the_csv_files(tmp_path):
    mirror = f"csv:{tmp_path / 'out'}"
    session = quark.start_run(project="p", storage_dir=tmp_path, backends=mirror)
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
    assert read_steps(mirror, session.run_id, "m") == list(range(50))
    assert read_steps(mirror, session.run_id, "child") == [*range(20), *range(100, 120)]


def test_workers_of_a_data_loader_are_in_the_csv_files(tmp_path):
    data = pytest.importorskip("torch.utils.data")
    mirror = f"csv:{tmp_path / 'out'}"
    session = quark.start_run(project="p", storage_dir=tmp_path, backends=mirror)
    loader = data.DataLoader(
        Dataset(session), num_workers=2, batch_size=2, multiprocessing_context="fork"
    )
    metrics = quark.MetricsLogger(session)
    for step, batch in enumerate(loader):
        metrics.log("m", float(batch[0]), step=step)
    session.end_run()
    assert read_steps(mirror, session.run_id, "m") == list(range(6))
    assert read_steps(mirror, session.run_id, "worker") == list(range(12))


@pytest.mark.filterwarnings("ignore:metric .* is outside Quark's naming rule:RuntimeWarning")
def test_long_and_odd_names_stay_apart_in_csv(tmp_path):
    names = [
        "x" * 250,
        "x" * 249 + "y",
        "損失/測試 🙂",
        '"quoted", name',
        "a\nb",
        "=1+1",
        "Loss",
        "loss",
    ]
    mirror = f"csv:{tmp_path / 'out'}"
    with quark.start_run(project="p", storage_dir=tmp_path, backends=mirror) as session:
        metrics = quark.MetricsLogger(session)
        for index, name in enumerate(names):
            metrics.log(name, float(index), step=0)
    opened = quark.MetricsLogger(quark.open_run(mirror, session.run_id))
    for index, name in enumerate(names):
        assert [record.value for record in opened.read(metric_key=name)] == [float(index)], name
