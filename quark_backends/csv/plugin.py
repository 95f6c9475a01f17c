"""Declares the CSV mirror."""

from __future__ import annotations

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Capability, RankPolicy
from quark_core.forking import importing
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def _open(config: BackendConfig) -> Backend:
    with importing():
        from quark_backends.csv.backend import CsvBackend

    return CsvBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The CSV mirror."""
    return [
        BackendDefinition(
            name="csv",
            summary="records of every kind as CSV and JSON, in the run's folder or csv:DIR",
            open=_open,
            capabilities=frozenset(
                {
                    Capability.READ,
                    Capability.IDEMPOTENT,
                    Capability.GROUPS,
                    Capability.ARTIFACTS,
                }
            ),
            rank_policy=RankPolicy.SESSION,
        )
    ]
