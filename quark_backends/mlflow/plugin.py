"""Declares the MLflow mirror."""

from __future__ import annotations

from quark_backends.declaration import declare, load_late, open_late
from quark_core.api import BackendDefinition, Capability, TrackerForm

_open = open_late(__name__, "quark_backends.mlflow.backend:MlflowBackend")

quark_register_backends = declare(
    BackendDefinition(
        name="mlflow",
        summary="a run as a run of an MLflow server, at mlflow+URI",
        open=_open,
        # SQL stores keep one of two points that agree in key, step, value and time, and the
        # mirror sends a point with the same time again; what it acknowledged, it never resends.
        capabilities=frozenset(
            {
                Capability.READ,
                Capability.IDEMPOTENT,
                Capability.GROUPS,
                Capability.ARTIFACTS,
            }
        ),
        needs=("mlflow",),
        install='pip install "quark-tracker[mlflow]"',
        describe_run=load_late("quark_backends.mlflow.tracker_backend:describe_run"),
        tracker=TrackerForm(
            make=load_late("quark_backends.mlflow.tracker_backend:MLflowBackend"),
            project_variables=("MLFLOW_EXPERIMENT_NAME",),
        ),
    )
)
