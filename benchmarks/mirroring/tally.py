"""What was logged and what each backend has of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from mirroring.ledger import Ledger, Point, Points
from mirroring.readers import expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One backend after one training.

    Attributes:
        part: What was done.
        backend: The backend.
        times: How often the training was killed.
        points: Points that were logged, those in flight at a kill aside.
        lost: Of them, those that the backend has not.
        unknown: Records of which the mirror itself says that it may lack them.
        doubled: Points that are there more than once.
        other: Points that are there and were never logged, or have another value.
        differs: Points in flight at a kill that the embedded store has and this
            backend has not, or the other way round.
    """

    part: str
    backend: str
    times: int
    points: int
    lost: int
    unknown: int
    doubled: int
    other: int
    differs: int

    @property
    def is_right(self) -> bool:
        """Whether nothing is lost beyond what the mirror told, and nothing is there twice."""
        return self.lost <= self.unknown and not (self.doubled or self.other or self.differs)

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def count(
    part: str,
    ledger: Ledger,
    found: dict[str, Points],
    *,
    loose: set[int] = frozenset(),  # type: ignore[assignment]
    unknown: dict[str, int] | None = None,
    times: int = 0,
) -> list[Tally]:
    """Hold what each backend has against what was logged.

    Args:
        part: What was done.
        ledger: What was logged.
        found: Backend -> its points.
        loose: Steps in flight at a kill: they may be there or not, as in the embedded store.
        unknown: Backend -> records that it says it may lack.
        times: How often the training was killed.
    """
    certain: list[Point] = []
    perhaps: list[Point] = []
    for step in range(ledger.begun):
        (perhaps if step in loose else certain).extend(ledger.list_points(step))
    stored = [point for point in perhaps if found["embedded"][expect("embedded", point)]]
    tallies = []
    for backend, points in found.items():
        must = Counter(expect(backend, point) for point in certain)
        may = Counter(expect(backend, point) for point in perhaps)
        kept = Counter(expect(backend, point) for point in stored)
        tallies.append(
            Tally(
                part=part,
                backend=backend,
                times=times,
                points=len(certain),
                lost=(must - points).total(),
                unknown=(unknown or {}).get(backend, 0),
                doubled=sum(n - 1 for n in points.values() if n > 1),
                other=len(points.keys() - must.keys() - may.keys()),
                differs=sum((points[each] > 0) != (kept[each] > 0) for each in may),
            )
        )
    return tallies
