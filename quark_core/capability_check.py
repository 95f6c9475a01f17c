"""Holds what a backend declares against what it is."""

from __future__ import annotations

from collections.abc import Mapping

from quark_core.artifacts.contract import SupportsArtifacts
from quark_core.backend import (
    Backend,
    BackendDefinition,
    Capability,
    SupportsGenerations,
    SupportsGroups,
    SupportsPrimary,
    SupportsRead,
    SupportsReplay,
    SupportsSearch,
    SupportsSeries,
)
from quark_core.errors import BackendContractError
from quark_core.keeping import SupportsRemoval

__all__ = ["check_capabilities"]

_PROTOCOLS: Mapping[Capability, type] = {
    Capability.PRIMARY: SupportsPrimary,
    Capability.READ: SupportsRead,
    Capability.GROUPS: SupportsGroups,
    Capability.REPLAY: SupportsReplay,
    Capability.SERIES: SupportsSeries,
    Capability.SEARCH: SupportsSearch,
    Capability.GENERATIONS: SupportsGenerations,
    Capability.ARTIFACTS: SupportsArtifacts,
    Capability.REMOVAL: SupportsRemoval,
}
_PRIMARY_NEEDS = frozenset({Capability.READ, Capability.IDEMPOTENT})


def check_capabilities(definition: BackendDefinition, backend: object) -> Backend:
    """Compare what a definition declares with what was opened, and return the backend.

    Raises:
        BackendContractError: A declared capability is not there, or one is
            there that was not declared.
    """

    def refuse(reason: str) -> BackendContractError:
        return BackendContractError(
            f"backend {definition.name!r} {reason}", backend=definition.name
        )

    if not isinstance(backend, Backend):
        raise refuse(f"opened a {type(backend).__name__}, which has no write() and close()")
    declared = frozenset(definition.capabilities)
    for capability, protocol in _PROTOCOLS.items():
        if capability in declared and not isinstance(backend, protocol):
            raise refuse(f"declares {capability} but does not implement {protocol.__name__}")
        if capability not in declared and isinstance(backend, protocol):
            raise refuse(f"implements {protocol.__name__} but does not declare {capability}")
    if Capability.PRIMARY in declared and not declared >= _PRIMARY_NEEDS:
        missing = ", ".join(sorted(_PRIMARY_NEEDS - declared))
        raise refuse(f"declares primary without {missing}")
    return backend
