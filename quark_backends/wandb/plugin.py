"""Declares the W&B mirror."""

from __future__ import annotations

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.forking import importing
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def _open(config: BackendConfig) -> Backend:
    with importing():
        from quark_backends.wandb.backend import WandbBackend

    return WandbBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The W&B mirror."""
    return [
        BackendDefinition(
            name="wandb",
            summary="a run of Weights & Biases: wandb, or wandb:ENTITY/PROJECT?mode=offline",
            open=_open,
            capabilities=frozenset(
                {Capability.IDEMPOTENT, Capability.GROUPS, Capability.ARTIFACTS}
            ),
        )
    ]
