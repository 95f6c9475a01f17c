"""PhaseAnalyzer: the phases of a training, and where one became the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import msgspec
import numpy as np

from quark.analysis.config import PhaseAnalyzerConfig, PhaseAnalyzerThresholds, check_config
from quark.analysis.curves import Curve
from quark.analysis.evidence import place_findings
from quark.analysis.metric_roles import (
    PART_KEYS,
    CurvePart,
    find_part,
    prefer_objective,
)
from quark.analysis.outputs import AnalysisTarget, identify, open_analysis
from quark.analysis.phase_change_points import (
    Rise,
    find_divergence,
    find_non_finite,
    find_overfitting,
)
from quark.analysis.phase_segmentation import (
    RAPID,
    Lines,
    Names,
    Track,
    cut_track,
    name_blocks,
    reduce_curve,
)
from quark.analysis.run_data import RunData
from quark_core.config.objective import read_objective
from quark_core.errors import SchemaValidationError
from quark_core.records import EvidenceRecord, PhaseRecord
from quark_core.records.base import start_fields
from quark_core.records.checks import check_choice
from quark_core.records.json_object import JsonObject
from quark_core.records.names import decode_name
from quark_core.records.query import check_index

PhaseName = Literal[
    "initialization_adaptation",
    "rapid_learning",
    "stabilization",
    "stagnation",
    "overfitting_onset",
    "divergence",
]

_OVERFITTING = "overfitting_onset"
_DIVERGENCE = "divergence"
_SLIVER = 0.02

_TELLING = {
    "initialization_adaptation": "{key} {change} before learning set in",
    "rapid_learning": "{key} {change}, {noise} times its noise",
    "stabilization": "{key} {change}, slowly or no more",
    "stagnation": "{key} hardly changes any more: it {change}, {noise} times its noise",
}


@dataclass(frozen=True)
class _Curves:
    """The curves of a run that phases rest on, all over steps or all over epochs."""

    main: Curve
    is_accuracy: bool
    validation: Curve | None
    validation_is_accuracy: bool
    is_validation_only: bool
    first: int
    last: int


def find_phases(
    data: RunData, config: PhaseAnalyzerConfig
) -> tuple[tuple[PhaseRecord, ...], tuple[str, ...]]:
    """The phases of a run in order, and what stood in the way."""
    curves, notes = _choose_curves(data, config)
    if curves is None:
        return (), tuple(notes)
    track = reduce_curve(curves.main, is_accuracy=curves.is_accuracy)
    bad_from = find_non_finite(curves.main)
    starts: list[tuple[int, str]] = []
    rises: dict[str, Rise | None] = {}
    if track is not None:
        validation = reduce_curve(curves.validation, is_accuracy=curves.validation_is_accuracy)
        signs = _find_signs(curves, track, validation, bad_from, config)
        names = _segment(track, config)
        if validation is not None and RAPID not in names:
            others = _segment(validation, config)
            if RAPID in others:
                # What the noise of batches hides is seen where there is none.
                track, names = validation, others
        edges = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist()]
        starts = [(int(track.step[edge]), str(names[edge])) for edge in edges]
        starts[0] = (curves.first, starts[0][1])
        for name, rise in signs:
            rises[name] = rise
            starts = _overlay(starts, rise.step, name, curves.last)
    if bad_from is not None:
        rises.setdefault(_DIVERGENCE, None)
        starts = _overlay(starts, bad_from, _DIVERGENCE, curves.last)
        if starts[0][0] > curves.first:
            starts[0] = (curves.first, starts[0][1])
    if not starts:
        notes.append(
            f"{decode_name(curves.main.key)} has no finite value and too few points to tell a phase"
        )
        return (), tuple(notes)
    phases = tuple(
        _make(curves, track, config.thresholds, rises, segment)
        for segment in _close(starts, curves.last)
    )
    return place_findings(phases, data), tuple(notes)


def _choose_curves(data: RunData, config: PhaseAnalyzerConfig) -> tuple[_Curves | None, list[str]]:
    metrics = data.metrics
    of_train, of_validation = config.train_loss_metric_keys, config.val_loss_metric_keys
    usual = PART_KEYS["train loss"], PART_KEYS["validation loss"]
    named = read_objective(data.config)
    # Keys that the caller passed come before what the run was started with.
    if named is not None and (of_train, of_validation) == usual:
        of_train = prefer_objective(of_train, named.metric, named.mode, held_out=False)
        of_validation = prefer_objective(of_validation, named.metric, named.mode, held_out=True)
    keys: dict[CurvePart, tuple[str, ...]] = {
        "train loss": of_train,
        "train accuracy": config.train_accuracy_metric_keys,
        "validation loss": of_validation,
        "validation accuracy": config.val_accuracy_metric_keys,
    }
    found = {part: find_part(metrics, part, its) for part, its in keys.items()}
    present = {role: data.place_on_steps(c) for role, c in found.items() if c is not None}
    present = {role: curve for role, curve in present.items() if len(curve)}
    if not present:
        return None, [
            "the run has no training or validation loss or accuracy; its metrics are "
            + (_list(metrics) if metrics else "none")
        ]
    main_role = next(iter(present))
    main = present[main_role]
    notes = []
    for role in [role for role, curve in present.items() if curve.unit != main.unit]:
        other = present.pop(role)
        notes.append(
            f"{decode_name(other.key)} is known in {other.unit}s and {decode_name(main.key)} in "
            f"{main.unit}s, and nothing says which belong together: it was left out"
        )
    validation_role = next(
        (r for r in ("validation loss", "validation accuracy") if r in present and r != main_role),
        None,
    )
    return _Curves(
        main=main,
        is_accuracy=main_role.endswith("accuracy"),
        validation=None if validation_role is None else present[validation_role],
        validation_is_accuracy=validation_role == "validation accuracy",
        is_validation_only=main_role.startswith("validation"),
        first=min(int(curve.step[0]) for curve in present.values()),
        last=max(int(curve.step[-1]) for curve in present.values()),
    ), notes


def _segment(track: Track, config: PhaseAnalyzerConfig) -> Names:
    lines = Lines(track)
    return name_blocks(track, lines, cut_track(track, lines), config.thresholds)


def _find_signs(
    curves: _Curves,
    track: Track,
    validation: Track | None,
    bad_from: int | None,
    config: PhaseAnalyzerConfig,
) -> list[tuple[str, Rise]]:
    """Overfitting, then divergence, which comes over it."""
    thresholds = config.thresholds
    divergence = find_divergence(track, validation, thresholds)
    if curves.is_validation_only:
        # A validation loss alone that is still better than at the start has turned, no more.
        overfitting = find_overfitting(track, None, thresholds)
        if overfitting is not None and divergence is not None:
            final = 1.0 - overfitting.final if track.is_accuracy else overfitting.final
            if final < float(np.median(track.level[:3])):
                divergence = None
            else:
                overfitting = None
    elif validation is None:
        overfitting = None
    else:
        # What breaks down may look like overfitting until it does.
        end = bad_from if divergence is None else divergence.step
        ours, theirs = track.before(end), validation.before(end)
        overfitting = None
        if ours is not None and theirs is not None:
            overfitting = find_overfitting(theirs, ours, thresholds)
    found = ((_OVERFITTING, overfitting), (_DIVERGENCE, divergence))
    return [(name, rise) for name, rise in found if rise is not None]


def _overlay(
    starts: list[tuple[int, str]], step: int, name: str, last: int
) -> list[tuple[int, str]]:
    """Segments with everything from a step on being one phase."""
    kept = [item for item in starts if item[0] < step]
    if len(kept) > 1 and step - kept[-1][0] <= _SLIVER * (last - kept[0][0]):
        kept.pop()
    return [*kept, (step, name)]


def _close(starts: list[tuple[int, str]], last: int) -> list[Segment]:
    merged: list[tuple[int, str]] = []
    for step, name in starts:
        if not merged or merged[-1][1] != name:
            merged.append((step, name))
    ends = [step - 1 for step, _ in merged[1:]] + [last]
    return [Segment(name, step, end) for (step, name), end in zip(merged, ends, strict=True)]


def _make(
    curves: _Curves,
    track: Track | None,
    thresholds: PhaseAnalyzerThresholds,
    rises: dict[str, Rise | None],
    segment: Segment,
) -> PhaseRecord:
    curve = curves.main
    if track is not None and curves.validation is not None and track.key == curves.validation.key:
        curve = curves.validation
    text = describe(segment, curve, track, rises.get(segment.name), thresholds)
    bounds: dict[str, Any] = {}
    if curves.main.unit == "epoch":
        bounds = {"epoch_start": segment.start, "epoch_end": segment.end}
    else:
        inside = curves.main.between(segment.start, segment.end).epoch
        known = inside[inside >= 0]
        bounds = {
            "step_start": segment.start,
            "step_end": segment.end,
            "epoch_start": int(known.min()) if len(known) else None,
            "epoch_end": int(known.max()) if len(known) else None,
        }
    return PhaseRecord(
        *start_fields(None),
        segment.name,
        segment.name.replace("_", " ").capitalize(),
        text.summary,
        evidence=text.evidence,
        metadata=text.metadata,
        **bounds,
    )


def _list(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


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
    summary = f"{decode_name(curve.key)} has no point of its own in {where}."
    if rise is not None:
        summary, made = _describe_rise(segment, rise, where, curve.unit)
        evidence += made
    elif course is not None:
        words = _TELLING[segment.name].format(
            key=decode_name(curve.key), change=_tell_change(course), noise=_figure(course.noise)
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
            f"{decode_name(curve.key)} {_tell_change(course)} over {where}, {course.points} "
            f"points: {_figure(course.noise)} times the noise of one point.",
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
        f"{decode_name(rise.key)} is at {_figure(rise.final)} at the end, "
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
    summary = (
        f"{decode_name(curve.key)} is NaN or infinite until the end: {count} values ({where})."
    )
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


_ANALYZER = "phases"


@dataclass(frozen=True, kw_only=True)
class PhaseAnalysisResult:
    """Result of a phase analysis.

    Attributes:
        run_id: ID of the run.
        phases: Phases in order. They cover the run from its first to its last step, without gaps or
            overlaps.
        generation: Number under which the phases are stored, from 1, or None.
        stored: Whether the phases are stored.
        notes: Reasons for missing or unstored phases, and curves that could not be used.
    """

    run_id: str
    phases: tuple[PhaseRecord, ...]
    generation: int | None = None
    stored: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a new dict of JSON values."""
        return {
            "run_id": self.run_id,
            "generation": self.generation,
            "stored": self.stored,
            "phases": [phase.to_dict() for phase in self.phases],
            "notes": list(self.notes),
        }


class PhaseAnalyzer:
    """Segmentation of a run into training phases.

    Uses the training and validation losses, or the accuracies of a run without losses. The same
    records give the same phases. Thread-safe.

    Args:
        session: A TrainingSession in any state, or a RunContext. A running run can be analyzed at
            any time.
        config: Options. Defaults to `PhaseAnalyzerConfig()`.

    Raises:
        SchemaValidationError: An argument has the wrong type.
        RunNotFoundError: The run does not exist.
        SessionStoreError: The store cannot be opened.
    """

    def __init__(self, session: object, *, config: PhaseAnalyzerConfig | None = None) -> None:
        self._config = check_config(config, PhaseAnalyzerConfig)
        self._target: AnalysisTarget = open_analysis(session)

    @property
    def config(self) -> PhaseAnalyzerConfig:
        """The options."""
        return self._config

    def analyze(
        self, *, replace_existing: bool | None = None, store: bool | None = None
    ) -> PhaseAnalysisResult:
        """Flush the run, find its phases and store them.

        Mirrors receive the phases too, as with `AnalyzerEngine.analyze`. If the store cannot be
        written, the phases are only returned.

        Args:
            replace_existing: Whether to hide the phases of earlier analyses. Defaults to
                `replace_existing_outputs` of the config.
            store: Whether to store the phases. Defaults to True, or to False for a run that was
                opened for reading.

        Raises:
            SchemaValidationError: `replace_existing` or `store` is not a bool.
            SessionStoreError: The store cannot be read, or is busy or full. Nothing was stored.
        """
        replaces = replace_existing
        if replaces is None:
            replaces = self._config.replace_existing_outputs
        if not isinstance(replaces, bool):
            raise SchemaValidationError(
                f"replace_existing must be True, False or None, not {type(replaces).__name__}"
            )
        target = self._target
        refusal = target.refuse(store)
        result = analyze_phases(target.load(), self._config)
        generation = None
        if refusal is None:
            generation = target.write(_ANALYZER, replaces, {PhaseRecord.KIND: result.phases})
            refusal = target.refusal
        notes = result.notes
        if refusal is not None:
            notes = (*notes, f"not stored: {refusal}")
        return PhaseAnalysisResult(
            run_id=target.run_id,
            phases=identify(result.phases, target.run_id, _ANALYZER, generation),
            generation=generation,
            stored=generation is not None,
            notes=notes,
        )

    def read_phases(
        self,
        *,
        phase_name: str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        limit: int | None = None,
    ) -> tuple[PhaseRecord, ...]:
        """Read stored phases, in the order of the run.

        Args:
            phase_name: Name of the phase.
            step: Step that the phase contains.
            step_min, step_max: Range of steps that the phase overlaps, inclusive. Phases that are
                known in epochs only do not match.
            limit: Maximum number of phases; the last are kept. Defaults to all.

        Raises:
            SchemaValidationError: The phase name is unknown, or a bound is not a non-negative
                integer.
            SessionStoreError: The store cannot be read, or does not store results.
        """
        if phase_name is not None:
            check_choice(phase_name, "phase_name", get_args(PhaseName))
        exact, low, high, most = (
            check_index(value, argument)
            for argument, value in (
                ("step", step), ("step_min", step_min), ("step_max", step_max), ("limit", limit),
            )
        )  # fmt: skip
        columns = self._target.read_outputs(PhaseRecord.KIND, _ANALYZER)
        first, last = columns["step_start"], columns["step_end"]
        kept = np.full(columns.count, True)
        if phase_name is not None:
            kept &= columns["phase_name"] == phase_name
        if (exact, low, high) != (None, None, None):
            kept &= first >= 0
        for bound in (exact, low):
            if bound is not None:
                kept &= last >= bound
        for bound in (exact, high):
            if bound is not None:
                kept &= first <= bound
        return columns.take(kept).keep_newest(most).to_records()  # type: ignore[return-value]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PhaseAnalyzer belongs to its process and cannot be pickled or copied. Pass "
            "session.context to the other process, and create a PhaseAnalyzer from it there"
        )


def analyze_phases(data: RunData, config: PhaseAnalyzerConfig | None = None) -> PhaseAnalysisResult:
    """Find the phases of a run that is read already; nothing is stored."""
    found, notes = find_phases(data, config or PhaseAnalyzerConfig())
    phases = [msgspec.structs.replace(phase, time_us=data.newest_us) for phase in found]
    return PhaseAnalysisResult(
        run_id=data.run_id,
        phases=identify(phases, data.run_id, _ANALYZER, None),
        notes=notes,
    )
