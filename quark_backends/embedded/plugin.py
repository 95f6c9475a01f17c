"""Declares the embedded store."""

from __future__ import annotations

from quark_backends.declaration import declare
from quark_core.backends.contract import Backend, BackendConfig, BackendDefinition, Capability


def _open(config: BackendConfig) -> Backend:
    from quark_backends.store.databases.layout import find_network_filesystem

    if find_network_filesystem(config.storage_dir) is not None:
        from quark_backends.embedded.journal_backend import JournalBackend

        return JournalBackend(config)
    from quark_backends.embedded.backend import EmbeddedBackend

    return EmbeddedBackend(config)


def _migrate(config: BackendConfig, migrated_at: str) -> int:
    from quark_backends.store.databases.layout import StoreLayout, find_network_filesystem
    from quark_backends.store.databases.sqlite import migrate
    from quark_core.errors import SchemaMigrationError

    network = find_network_filesystem(config.storage_dir)
    if network is not None and StoreLayout(config.storage_dir).db_path.exists():
        raise SchemaMigrationError(
            f"storage_dir {config.storage_dir} is on a network file system ({network}), so its "
            "database cannot be migrated safely. Migrate it on a local disk"
        )
    return migrate(config.storage_dir, migrated_at)


quark_register_backends = declare(
    BackendDefinition(
        name="embedded",
        summary="SQLite in storage_dir/.quark (default, needs no server)",
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
                Capability.PAGES,
                Capability.GRID,
                Capability.GENERATIONS,
                Capability.ARTIFACTS,
                Capability.REMOVAL,
                Capability.CHANGES,
                Capability.EDITS,
                Capability.BELONGING,
                Capability.COORDINATION,
            }
        ),
        migrate=_migrate,
        stays_inside=True,
        own_process=False,
        is_default_primary=True,
    )
)
