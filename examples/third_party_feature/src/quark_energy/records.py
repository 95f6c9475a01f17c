"""The record kind `energy`."""

from __future__ import annotations

from typing import ClassVar

from quark_core.api import (
    FieldRules,
    SchemaValidationError,
    StreamRecord,
    TrainingSession,
    start_fields,
)

__all__ = ["EnergyRecord", "record_energy"]


class EnergyRecord(StreamRecord, frozen=True, gc=False):
    """The energy that one device has used since the record before.

    Attributes:
        device: Name of the device, such as `gpu0`.
        joules: The energy.
        step: Step counter, or None.
    """

    device: str
    joules: float
    step: int | None = None

    KIND: ClassVar[str] = "energy"
    TABLE: ClassVar[str] = "energy_use"
    RULES: ClassVar[FieldRules] = FieldRules(names=("device",), finite=("joules",))

    def check(self) -> None:
        """Refuse energy that flows back."""
        if self.joules < 0:
            raise SchemaValidationError("EnergyRecord.joules must not be negative")


def record_energy(
    session: TrainingSession, device: str, joules: float, step: int | None = None
) -> None:
    """Write one record to a run.

    Raises:
        SchemaValidationError: A negative or infinite energy, or an empty name.
    """
    session.write([EnergyRecord(*start_fields(None), device, joules, step)])
