"""Declares the embedded store."""

from __future__ import annotations

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def _open(config: BackendConfig) -> Backend:
    from quark_backends.embedded.filesystem import find_network_filesystem

    if find_network_filesystem(config.storage_dir) is not None:
        from quark_backends.embedded.journal_backend import JournalBackend

        return JournalBackend(config)
    from quark_backends.embedded.backend import EmbeddedBackend

    return EmbeddedBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The embedded store."""
    return [
        BackendDefinition(
            name="embedded",
            summary="SQLite under storage_dir/.quark; the default, needs no server",
            open=_open,
            capabilities=frozenset(
                {
                    Capability.PRIMARY,
                    Capability.READ,
                    Capability.IDEMPOTENT,
                    Capability.GROUPS,
                    Capability.REPLAY,
                }
            ),
        )
    ]
