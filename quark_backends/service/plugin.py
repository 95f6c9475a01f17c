"""Declares the client of the Quark persistence service."""

from __future__ import annotations

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def _open(config: BackendConfig) -> Backend:
    from quark_backends.service.client.backend import ServiceBackend

    return ServiceBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The persistence service."""
    return [
        BackendDefinition(
            name="service",
            summary="A Quark persistence service: QUARK_PERSISTENCE_URL and QUARK_USER_KEY",
            open=_open,
            capabilities=frozenset(
                {
                    Capability.PRIMARY,
                    Capability.READ,
                    Capability.IDEMPOTENT,
                    Capability.GROUPS,
                    Capability.REPLAY,
                    Capability.SERIES,
                    Capability.SEARCH,
                    Capability.GENERATIONS,
                    Capability.ARTIFACTS,
                }
            ),
            schemes=("quark", "http", "https"),
        )
    ]
