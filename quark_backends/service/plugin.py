"""Declares the client of the Quark persistence service."""

from __future__ import annotations

from quark_backends.declaration import declare, load_late
from quark_core.backends.contract import BackendDefinition, Capability

SERVICE = BackendDefinition(
    name="service",
    summary="A Quark server: QUARK_PERSISTENCE_URL and QUARK_USER_KEY",
    open=load_late("quark_backends.service.client.backend:ServiceBackend"),
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
    schemes=("quark", "http", "https"),
    remote=True,
    own_process=False,
)
"""The service as a backend; `dataclasses.replace` makes one of it that opens it otherwise."""

quark_register_backends = declare(SERVICE)
