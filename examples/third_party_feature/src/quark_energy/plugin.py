"""Declares the record kind and the command.

Quark imports this module in every process that starts or opens a run, so it imports nothing but
the marker.
"""

from __future__ import annotations

from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_commands", "quark_register_record_kinds"]


@hookimpl
def quark_register_record_kinds() -> list[str]:
    """The module of `EnergyRecord`."""
    return ["quark_energy.records"]


@hookimpl
def quark_register_commands() -> dict[str, str]:
    """The command `quark energy`."""
    return {"energy": "quark_energy.command:energy"}
