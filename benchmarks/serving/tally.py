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


def print_tallies(tallies: list[Tally]) -> None:
    """Print all of them as a table."""
    head = ("row", "fault", "times", "batches", "acked", "points", "lost", "doubled", "")
    rows = [
        (
            str(t.row),
            t.fault,
            f"{t.times:,}",
            f"{t.batches:,}",
            f"{t.acknowledged:,}",
            f"{t.points:,}",
            f"{t.lost:,}",
            f"{t.doubled:,}",
            t.note,
        )
        for t in tallies
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print()
    for row in [head, *rows]:
        cells = [
            text.ljust(width) if column in (1, 8) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
