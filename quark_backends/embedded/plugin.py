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


def _migrate(config: BackendConfig, migrated_at: str) -> int:
    from quark_backends.embedded.filesystem import find_network_filesystem
    from quark_backends.store.layout import StoreLayout
    from quark_backends.store.migration import migrate
    from quark_core.errors import SchemaMigrationError

    network = find_network_filesystem(config.storage_dir)
    if network is not None and StoreLayout(config.storage_dir).db_path.exists():
        raise SchemaMigrationError(
            f"storage_dir {config.storage_dir} lies on a network file system ({network}), where "
            "a database cannot be altered safely: migrate it where it lies on a local disk"
        )
    return migrate(config.storage_dir, migrated_at)


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
                    Capability.SERIES,
                    Capability.SEARCH,
                    Capability.GENERATIONS,
                    Capability.ARTIFACTS,
                    Capability.REMOVAL,
                }
            ),
            migrate=_migrate,
        )
    ]
