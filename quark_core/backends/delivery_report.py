"""What was delivered to which backend, and what was not and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """State of one backend's lane. All counts are records.

    `submitted == delivered + waiting + dropped + unknown + sum(quarantined)`
    holds at every moment.

    Attributes:
        backend: Name of the backend.
        primary: Whether it is the run's primary.
        state: opening, ready, retrying, resting, paused (credentials refused) or closed.
        submitted: Records handed to the lane.
        delivered: Acknowledged by the backend.
        waiting: Not yet acknowledged.
        quarantined: Refused for good, by reason.
        dropped: Gone from memory before the backend took them.
        unknown: In flight when the lane was given up or the backend's process
            ended, to a backend that may or may not have stored them.
        errors: Failed attempts, by reason.
    """

    backend: str
    primary: bool
    state: str
    submitted: int
    delivered: int
    waiting: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    unknown: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything that was submitted is at the backend."""
        return self.delivered == self.submitted

    def describe(self) -> str:
        """One line for a person."""
        parts = [f"{self.delivered} delivered"]
        parts += [
            f"{count} {what}"
            for what, count in (
                ("waiting", self.waiting),
                ("dropped", self.dropped),
                ("unknown", self.unknown),
            )
            if count
        ]
        parts += [f"{count} refused ({reason})" for reason, count in self.quarantined.items()]
        if self.errors and not self.complete:
            parts.append("last errors: " + "; ".join(list(self.errors)[-2:]))
        return f"{self.backend}: " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """State of all lanes of one process's stream into a run.

    Attributes:
        lanes: One report per backend.
        uncovered: Records that were for a moment (until they were journaled)
            not safe from SIGKILL, because shared memory had no room for them.
    """

    lanes: tuple[LaneReport, ...] = ()
    uncovered: int = 0

    @property
    def complete(self) -> bool:
        """Whether every backend has everything."""
        return all(lane.complete for lane in self.lanes)

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {"lanes": [asdict(lane) for lane in self.lanes], "uncovered": self.uncovered}
