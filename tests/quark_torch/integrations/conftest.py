"""What the tests of the frameworks share: a folder of their own, and a look at what was kept."""

import os

import pytest
from set_for_tests import SET_FOR_TESTS

import quark


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith("QUARK_") and name not in SET_FOR_TESTS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(tmp_path):
    """The runs that were kept, the oldest first, each opened for reading."""

    def find():
        found = quark.search_runs(storage_dir=tmp_path)
        return [quark.open_run(run.run_id, tmp_path) for run in reversed(found)]

    return find


@pytest.fixture
def read():
    """(step, value) of every point of a metric."""

    def points(run, key):
        records = quark.MetricsLogger(run).read(metric_key=key)
        return [(record.step, record.value) for record in records]

    return points
