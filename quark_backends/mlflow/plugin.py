"""Declares the MLflow mirror."""

from __future__ import annotations

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.forking import importing
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def _open(config: BackendConfig) -> Backend:
    with importing():
        from quark_backends.mlflow.backend import MlflowBackend

    return MlflowBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The MLflow mirror."""
    return [
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
            own_process=True,
        )
    ]
