"""Records the energy that devices use in a run."""

from quark_energy.records import EnergyRecord, record_energy

__all__ = ["EnergyRecord", "record_energy"]
