"""What is asked of a backend before and after it is opened: its libraries, and what it declares."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from quark_core.backends.belonging import SupportsBelonging
from quark_core.backends.contract import (
    Backend,
    BackendDefinition,
    Capability,
    SupportsArtifacts,
    SupportsChanges,
    SupportsGenerations,
    SupportsGrid,
    SupportsGroups,
    SupportsPages,
    SupportsPrimary,
    SupportsRead,
    SupportsReplay,
    SupportsSearch,
    SupportsSeries,
)
from quark_core.backends.coordination import SupportsCoordination
from quark_core.backends.edits import SupportsEdits
from quark_core.backends.removal import SupportsRemoval
from quark_core.errors import BackendContractError, BackendUnusable


def find_missing_library(definition: BackendDefinition) -> str | None:
    """Name of the first library that a backend needs and this Python lacks, or None."""
    for name in definition.needs:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return name
        # A mere folder of that name, such as a library's own files, has no origin.
        if found is None or found.origin is None:
            return name
    return None


def require_libraries(definition: BackendDefinition) -> None:
    """Refuse to open a backend whose libraries are not installed.

    Raises:
        BackendUnusable: One is not; the message says how to install it.
    """
    missing = find_missing_library(definition)
    if missing is not None:
        how = definition.install or f"pip install {missing}"
        raise BackendUnusable(
            f"{missing} is not installed: {how}; the records wait", backend=definition.name
        )


PROTOCOLS: Mapping[Capability, type] = {
    Capability.PRIMARY: SupportsPrimary,
    Capability.READ: SupportsRead,
    Capability.GROUPS: SupportsGroups,
    Capability.REPLAY: SupportsReplay,
    Capability.SERIES: SupportsSeries,
    Capability.SEARCH: SupportsSearch,
    Capability.PAGES: SupportsPages,
    Capability.GRID: SupportsGrid,
    Capability.GENERATIONS: SupportsGenerations,
    Capability.ARTIFACTS: SupportsArtifacts,
    Capability.REMOVAL: SupportsRemoval,
    Capability.CHANGES: SupportsChanges,
    Capability.EDITS: SupportsEdits,
    Capability.BELONGING: SupportsBelonging,
    Capability.COORDINATION: SupportsCoordination,
}
"""What a backend has that declares a capability."""

# Whatever a run's only store does not keep is lost, and nobody would notice.
_PRIMARY_NEEDS = {
    Capability.READ: "nothing of a run could be read",
    Capability.IDEMPOTENT: "what is sent again after a lost reply would be there twice",
    Capability.GENERATIONS: "what analyze() finds would be kept nowhere",
}


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
    for capability, protocol in PROTOCOLS.items():
        if capability in declared and not isinstance(backend, protocol):
            raise refuse(f"declares {capability} but does not implement {protocol.__name__}")
        if capability not in declared and isinstance(backend, protocol):
            raise refuse(f"implements {protocol.__name__} but does not declare {capability}")
    if Capability.GENERATIONS in declared and Capability.PRIMARY not in declared:
        raise refuse(
            "declares generations without primary: a mirror gets what analyzers find as batches, "
            "and is asked for it nowhere else. Leave generations out"
        )
    missing = sorted(_PRIMARY_NEEDS.keys() - declared)
    if Capability.PRIMARY in declared and missing:
        reasons = "; ".join(_PRIMARY_NEEDS[each] for each in missing)
        raise refuse(
            f"declares primary without {', '.join(missing)}: {reasons}. Implement it, or leave "
            "primary out and use the backend as a mirror"
        )
    return backend
