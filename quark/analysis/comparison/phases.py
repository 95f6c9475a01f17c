"""Phases of two sides, matched by name and by how much they overlap."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quark.analysis.comparison.results import PhaseDiff
from quark_core.records import PhaseRecord


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A phase of one side, of several runs by the medians of its bounds."""

    name: str
    display_name: str
    unit: str
    start: float
    end: float
    run_count: int

    @property
    def length(self) -> float:
        """Steps that it covers, both ends included."""
        return self.end - self.start + 1.0


def compare_phases(
    primary: Sequence[Sequence[PhaseRecord]], reference: Sequence[Sequence[PhaseRecord]]
) -> tuple[PhaseDiff, ...]:
    """Match phases of one name, those that overlap most first; each side is a list of runs.

    Phases of one name that do not overlap at all are matched in their order.
    """
    sides = (_collect(primary), _collect(reference))
    pairs = sorted(
        (-_overlap(one, two), abs(one.start - two.start), i, j)
        for i, one in enumerate(sides[0])
        for j, two in enumerate(sides[1])
        if (one.name, one.unit) == (two.name, two.unit)
    )
    matched: dict[int, int] = {}
    for _, _, i, j in pairs:
        if i not in matched and j not in matched.values():
            matched[i] = j
    lone = set(range(len(sides[1]))) - set(matched.values())
    diffs = [
        _make_diff(one, sides[1][matched[i]] if i in matched else None)
        for i, one in enumerate(sides[0])
    ]
    diffs += [_make_diff(None, sides[1][j]) for j in sorted(lone)]
    return tuple(sorted(diffs, key=_order))


def _collect(runs: Sequence[Sequence[PhaseRecord]]) -> list[_Stretch]:
    """The phases of a side: the first of a name in all runs together, the second, and so on."""
    groups: dict[tuple[str, str, int], list[tuple[int, int, PhaseRecord]]] = {}
    for run in runs:
        seen: dict[tuple[str, str], int] = {}
        bounds = [(bound, record) for record in run if (bound := _bound(record)) is not None]
        for (unit, start, end), record in sorted(bounds, key=lambda item: item[0]):
            place = seen[record.phase_name, unit] = seen.get((record.phase_name, unit), -1) + 1
            groups.setdefault((record.phase_name, unit, place), []).append((start, end, record))
    return [
        _Stretch(
            name,
            group[0][2].display_name,
            unit,
            float(statistics.median(start for start, _, _ in group)),
            float(statistics.median(end for _, end, _ in group)),
            len(group),
        )
        for (name, unit, _), group in groups.items()
    ]


def _bound(record: PhaseRecord) -> tuple[str, int, int] | None:
    if record.step_start is not None and record.step_end is not None:
        return "step", record.step_start, record.step_end
    if record.epoch_start is not None and record.epoch_end is not None:
        return "epoch", record.epoch_start, record.epoch_end
    return None


def _overlap(one: _Stretch, two: _Stretch) -> float:
    shared = min(one.end, two.end) - max(one.start, two.start) + 1.0
    either = max(one.end, two.end) - min(one.start, two.start) + 1.0
    return max(0.0, shared) / either


def _make_diff(one: _Stretch | None, two: _Stretch | None) -> PhaseDiff:
    shown = one or two
    assert shown is not None
    both = one is not None and two is not None
    return PhaseDiff(
        phase_name=shown.name,
        display_name=shown.display_name,
        presence="both" if both else "primary_only" if one else "reference_only",
        unit=shown.unit,
        primary_start=one.start if one else None,
        primary_end=one.end if one else None,
        reference_start=two.start if two else None,
        reference_end=two.end if two else None,
        overlap=_overlap(one, two) if one and two else None,
        duration_difference=one.length - two.length if one and two else None,
        start_difference=one.start - two.start if one and two else None,
        primary_run_count=one.run_count if one else 0,
        reference_run_count=two.run_count if two else 0,
    )


def _order(diff: PhaseDiff) -> tuple[float, float, str]:
    starts = [start for start in (diff.primary_start, diff.reference_start) if start is not None]
    return min(starts), max(starts), diff.phase_name
