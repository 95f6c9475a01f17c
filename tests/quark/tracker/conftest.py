"""What tests of the tracker share."""

import logging
import os
from dataclasses import replace

import pytest
from recorded_calls import Recorder

import quark
from quark.tracker import tracker
from quark_core.backends.registry import default_registry

VARIABLES = (
    *("QUARK_TRACKER_BACKENDS", "QUARK_BACKENDS", "EZPZ_TRACKER_BACKENDS", "EZPZ_TRACKERS"),
    *("WB_PROJECT", "WANDB_PROJECT", "WB_PROJECT_NAME", "MLFLOW_EXPERIMENT_NAME"),
    *("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_ENTITY", "WANDB_BASE_URL"),
    *("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty working directory, no variables of the launcher's, no names of other tests."""
    monkeypatch.chdir(tmp_path)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    # On a busy machine a thread takes its time to begin, which is not worth a warning here.
    for limit in ("_START_TIMEOUT_S", "_WATCH_TIMEOUT_S"):
        monkeypatch.setattr(tracker, limit, 60.0)
    known = dict(tracker._registered)
    yield
    tracker._registered.clear()
    tracker._registered.update(known)


@pytest.fixture
def recorder():
    quark.register_backend("recorder", Recorder)


@pytest.fixture
def define(monkeypatch):
    """Make a Quark backend known under its name, for this test."""

    def define_one(definition):
        known = default_registry()._definitions.get(definition.name)
        if known is not None:
            # What it stands in for is asked for, and described, as ever.
            definition = replace(definition, tracker=known.tracker, describe_run=known.describe_run)
        monkeypatch.setitem(default_registry()._definitions, definition.name, definition)

    return define_one


@pytest.fixture
def said(caplog):
    """The warnings of Quark, as texts."""
    caplog.set_level(logging.WARNING, logger="quark")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def read():
    """Metrics of a run as (key, step, value), in order."""

    def read_all(tracker, folder="."):
        session = quark.open_run(tracker.run_id, folder)
        records = quark.MetricsLogger(session).read(include_non_finite=True)
        return [(r.metric_key, r.step, r.value) for r in records]

    return read_all


@pytest.fixture
def child_environment():
    return {k: v for k, v in os.environ.items() if k not in VARIABLES}
