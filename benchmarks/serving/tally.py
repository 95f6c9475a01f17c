"""What was sent and what is there, for each fault."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One fault.

    Attributes:
        row: Its row of the fault checklist.
        fault: What was done.
        times: How often it struck, or requests that it struck.
        batches: Batches that were handed to the lane.
        acknowledged: Of them, those that the service has acknowledged at the end.
        points: Records that were logged.
        lost: Of them, those that are not in the store at the end.
        doubled: Records that are there more than once.
        note: What else there is to say.
    """

    row: int
    fault: str
    times: int
    batches: int
    acknowledged: int
    points: int
    lost: int
    doubled: int
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)
