"""What the tests of the frameworks share: a small model, its data, and a look at what was kept."""

import importlib
import os
import warnings

import pytest

import quark
from quark_core.runs.stop_requests import StopLookout

torch = pytest.importorskip("torch")


def import_or_skip(*names):
    """The modules of a framework, or a skip; what they warn of at import is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            pytest.importorskip(name.split(".")[0], exc_type=ImportError)
        return [importlib.import_module(name) for name in names]


def ask_to_stop(session):
    """What `quark stop` does, and what the session does at its next heartbeat."""
    quark.stop_run(session, reason="enough")
    lookout = StopLookout(session.open_run)
    lookout.look()
    lookout._thread.join()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith("QUARK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


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
