"""Processes that a training forks log to the CSV mirror too, and long names are kept apart."""

import os

import pytest

import quark
from quark_backends.csv.plugin import quark_register_backends

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


@pytest.fixture
def definition():
    return quark_register_backends()[0]


@pytest.mark.long
def test_forked_children_are_in_the_csv_files(start, tmp_path, log_in_forks):
    mirror = f"csv:{tmp_path / 'out'}"
    session = start(mirror)
    log_in_forks(session)
    assert read_steps(mirror, session.run_id, "m") == list(range(50))
    assert read_steps(mirror, session.run_id, "child") == [*range(20), *range(100, 120)]


@pytest.mark.long
def test_workers_of_a_data_loader_are_in_the_csv_files(start, tmp_path, log_in_workers):
    mirror = f"csv:{tmp_path / 'out'}"
    session = start(mirror)
    log_in_workers(session)
    assert read_steps(mirror, session.run_id, "m") == list(range(6))
    assert read_steps(mirror, session.run_id, "worker") == list(range(12))


@pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")
def test_long_and_odd_names_stay_apart_in_csv(start, tmp_path):
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
    with start(mirror) as session:
        metrics = quark.MetricsLogger(session)
        for index, name in enumerate(names):
            metrics.log(name, float(index), step=0)
    opened = quark.MetricsLogger(quark.open_run(mirror, session.run_id))
    for index, name in enumerate(names):
        assert [record.value for record in opened.read(metric_key=name)] == [float(index)], name
