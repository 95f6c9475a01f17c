"""What is said of a phase: a sentence with figures, and the evidence behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quark_core.analysis.curves import Curve
from quark_core.analysis.phase_config import PhaseAnalyzerThresholds
from quark_core.analysis.phase_cuts import Lines
from quark_core.analysis.phase_signs import Rise
from quark_core.analysis.phase_tracks import Track
from quark_core.json_object import JsonObject
from quark_core.records import EvidenceRecord

__all__ = ["PhaseText", "Segment", "describe"]

_TELLING = {
    "initialization_adaptation": "{key} {change} before learning set in",
    "rapid_learning": "{key} {change}, {noise} times its noise",
    "stabilization": "{key} {change}, slowly or no more",
    "stagnation": "{key} hardly changes any more: it {change}, {noise} times its noise",
}


@dataclass(frozen=True)
class Segment:
    """One phase from its first to its last step, or epoch."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class PhaseText:
    """What a record of a phase says."""

    summary: str
    evidence: tuple[EvidenceRecord, ...]
    metadata: JsonObject


@dataclass(frozen=True)
class _Course:
    """How a curve went over a segment."""

    points: int
    start: float
    end: float
    relative: float
    noise: float
    slope: float
    certainty: float


def describe(
    segment: Segment,
    curve: Curve,
    track: Track | None,
    rise: Rise | None,
    thresholds: PhaseAnalyzerThresholds,
) -> PhaseText:
    """Say what a phase is and what shows it."""
    where = _tell_place(segment, curve.unit)
    if segment.name == "divergence" and rise is None:
        return _describe_non_finite(segment, curve, where)
    course = None if track is None else _follow(track, segment)
    evidence: list[EvidenceRecord] = []
    metadata: dict[str, object] = {"curve": curve.key, "unit": curve.unit}
    summary = f"{curve.key} has no point of its own in {where}."
    if rise is not None:
        summary, made = _describe_rise(segment, rise, where, curve.unit)
        evidence += made
    elif course is not None:
        words = _TELLING[segment.name].format(
            key=curve.key, change=_tell_change(course), noise=_figure(course.noise)
        )
        summary = f"{words} ({where})."
    if course is not None:
        evidence += _describe_course(segment, curve, course, where, thresholds)
        metadata |= {
            "points": course.points,
            "relative_change": _plain(course.relative),
            "change_over_noise": _plain(course.noise),
            f"height_per_{curve.unit}": _plain(course.slope),
        }
    return PhaseText(summary, tuple(evidence), JsonObject(metadata))


def _describe_course(
    segment: Segment,
    curve: Curve,
    course: _Course,
    where: str,
    thresholds: PhaseAnalyzerThresholds,
) -> list[EvidenceRecord]:
    threshold = None
    if segment.name == "rapid_learning":
        threshold = float(thresholds.rapid_learning_min_relative_change)
    elif segment.name == "stagnation":
        threshold = float(thresholds.stagnation_max_relative_change)
    bounds = _bounds(segment, curve.unit)
    evidence = [
        EvidenceRecord(
            "metric",
            curve.key,
            f"{curve.key} {_tell_change(course)} over {where}, {course.points} points: "
            f"{_figure(course.noise)} times the noise of one point.",
            course.relative,
            threshold,
            *bounds,
        )
    ]
    if np.isfinite(course.certainty):
        evidence.append(
            EvidenceRecord(
                "slope",
                curve.key,
                f"Its slope is {_figure(course.certainty)} times the slope's standard error.",
                course.certainty,
                5.0 if segment.name == "rapid_learning" else 4.0,
                *bounds,
            )
        )
    return evidence


def _describe_rise(
    segment: Segment, rise: Rise, where: str, unit: str
) -> tuple[str, list[EvidenceRecord]]:
    levels = (
        f"{rise.key} is at {_figure(rise.final)} at the end, "
        f"{_figure(rise.best)} at its best ({unit} {rise.best_step})"
    )
    if segment.name == "divergence":
        summary = f"{levels}, and does not come back ({where})."
        fact = f"It rose by {_percent(rise.size)} of what it had fallen before."
    else:
        summary = f"{levels}"
        if rise.train_change is not None:
            summary += f", while the training curve changed by {_percent(rise.train_change)}"
        summary += f" ({where})."
        fact = f"It rose by {_percent(rise.size)} of its lowest level."
    evidence = [
        EvidenceRecord(
            "metric", rise.key, fact, rise.size, rise.threshold, *_bounds(segment, unit)
        ),
        EvidenceRecord(
            "noise",
            rise.key,
            f"The rise is {_figure(rise.strength)} times the standard error of the levels.",
            rise.strength,
            5.0,
            *_bounds(segment, unit),
        ),
    ]
    return summary, evidence


def _describe_non_finite(segment: Segment, curve: Curve, where: str) -> PhaseText:
    inside = curve.between(segment.start, segment.end)
    count = int((~np.isfinite(inside.value)).sum())
    summary = f"{curve.key} is NaN or infinite until the end: {count} values ({where})."
    evidence = EvidenceRecord(
        "metric", curve.key, summary, float(count), 0.0, *_bounds(segment, curve.unit)
    )
    metadata = JsonObject({"curve": curve.key, "unit": curve.unit, "non_finite": count})
    return PhaseText(summary, (evidence,), metadata)


def _tell_place(segment: Segment, unit: str) -> str:
    if segment.start == segment.end:
        return f"{unit} {segment.start}"
    return f"{unit}s {segment.start} to {segment.end}"


def _follow(track: Track, segment: Segment) -> _Course | None:
    low = int(np.searchsorted(track.step, segment.start, side="left"))
    high = int(np.searchsorted(track.step, segment.end, side="right"))
    if high <= low:
        return None
    width = max(1, min(3, (high - low) // 2))
    start, end = track.read(low, low + width), track.read(high - width, high)
    height = track.height
    moved = float(np.median(height[high - width : high]) - np.median(height[low : low + width]))
    span = float(track.middle[-1] - track.middle[0])
    line = Lines(track).fit(low, high)
    return _Course(
        points=int(track.points[low:high].sum()),
        start=start,
        end=end,
        relative=(end - start) / abs(start) if start else 0.0,
        noise=abs(moved) / float(np.median(track.point_noise[low:high])),
        slope=line.slope / span if span else 0.0,
        certainty=line.certainty if high - low > 2 else np.nan,
    )


def _tell_change(course: _Course) -> str:
    if course.start == course.end:
        return f"stayed at {_figure(course.start)}"
    verb = "fell" if course.end < course.start else "rose"
    percent = _percent(abs(course.relative)) if course.start else ""
    amount = f" ({percent})" if percent else ""
    return f"{verb} from {_figure(course.start)} to {_figure(course.end)}{amount}"


def _bounds(segment: Segment, unit: str) -> tuple[int | None, int | None]:
    return (segment.start, segment.end) if unit == "step" else (None, None)


def _figure(value: float) -> str:
    return f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def _plain(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None
