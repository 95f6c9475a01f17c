"""Declares the TensorBoard mirror."""

from __future__ import annotations

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.forking import importing
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def _open(config: BackendConfig) -> Backend:
    with importing():
        from quark_backends.tensorboard.backend import TensorboardBackend

    return TensorboardBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The TensorBoard mirror."""
    return [
        BackendDefinition(
            name="tensorboard",
            summary="event files for TensorBoard, in the run's folder or tensorboard:DIR",
            open=_open,
            capabilities=frozenset(
                {Capability.IDEMPOTENT, Capability.GROUPS, Capability.ARTIFACTS}
            ),
            own_process=True,
        )
    ]
