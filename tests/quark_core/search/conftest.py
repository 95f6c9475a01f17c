"""Runs that real sessions have logged."""

import warnings

import pytest

import quark
from quark_core.records.base import start_fields
from quark_core.records.kinds.provenance import FingerprintRecord


@pytest.fixture
def log_run(monkeypatch):
    """Makes one ended run: its values by metric key, in steps from 0."""

    def log(
        storage_dir,
        run_id,
        project="vision",
        *,
        status="completed",
        values=(),
        fields=(),
        fingerprints=(),
        **arguments,
    ):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        session = quark.start_run(project=project, storage_dir=storage_dir, **arguments)
        with quark.MetricsLogger(session) as metrics, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for key, points in dict(values).items():
                for step, value in enumerate(points):
                    metrics.log(key, value, step=step)
        if fields:
            session.annotate(**fields)
        for key, digest in dict(fingerprints).items():
            session.write([FingerprintRecord(*start_fields(None), "data", key, digest)])
        session.end_run(status)

    return log


@pytest.fixture
def three_runs(tmp_path, log_run):
    """A storage root with three runs."""
    root = tmp_path / "runs"
    log_run(
        root,
        "first",
        tags=["baseline"],
        name="resnet50 baseline",
        config={"lr": 3e-4, "optimizer": {"name": "adamw"}},
        values={"val/loss": [0.9, 0.25], "acc@1": [0.5]},
    )
    log_run(
        root,
        "second",
        config={"lr": 1e-3, "optimizer": {"name": "sgd"}},
        values={"val/loss": [0.8, 0.4, float("nan")]},
    )
    log_run(root, "third", "text", status="failed", config={"lr": 1e-3})
    return root
