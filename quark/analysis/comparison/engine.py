"""ComparisonEngine: compares two runs, or groups of runs, with their alerts, layers and phases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.changes import (
    compare_code,
    compare_settings,
    find_seed,
    list_agreeing,
)
from quark.analysis.comparison.comparison_groups import (
    ComparedRun,
    Target,
    describe_side,
    find_storage_dir,
    list_targets,
    load_side,
)
from quark.analysis.comparison.metrics import Pairing, compare_metrics
from quark.analysis.comparison.results import (
    AlertDiff,
    AlertMatch,
    AlertSighting,
    HealthScoreDiff,
    LayerFigureDiff,
    LayerSummaryDiff,
    ParameterDiff,
    PhaseDiff,
    RunComparisonResult,
)
from quark.analysis.comparison.summary import limit_verdicts, list_notes, summarize, tell_ends
from quark.analysis.config import ComparisonEngineConfig, check_config
from quark.analysis.curves import History, LayerHistory, ParameterHistory, spread, strip_prefixes
from quark.analysis.rule import SEVERITIES
from quark.analysis.run_data import RunData
from quark_core.backends.run_summary import StoredRun
from quark_core.presentation import note_runs
from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord, format_time
from quark_core.records.base import now_us
from quark_core.records.schema import CURRENT_SCHEMA_VERSION

_SCORES = ("overall", "optimization", "representation", "generalization", "runtime")

_Key = tuple[str, str | None]


def compare_alerts(
    primary: Sequence[Sequence[AlertRecord]],
    reference: Sequence[Sequence[AlertRecord]],
    window_steps: float,
) -> AlertDiff:
    """Match alerts by rule, culprit and step; each side is a list of runs.

    Two alerts of one rule and culprit are the same where they begin at most
    `window_steps` apart; the closest are matched first. One without a step
    matches any.
    """
    sides = (_sight(primary, window_steps), _sight(reference, window_steps))
    pairs = sorted(
        (
            (distance, i, j)
            for i, one in enumerate(sides[0])
            for j, two in enumerate(sides[1])
            if _key(one) == _key(two)
            and (distance := _measure_distance(one.step, two.step)) <= window_steps
        ),
    )
    matched = _match_first((i, j) for _, i, j in pairs)
    return AlertDiff(
        primary_only=tuple(a for i, a in enumerate(sides[0]) if i not in matched),
        reference_only=tuple(a for j, a in enumerate(sides[1]) if j not in set(matched.values())),
        shared=tuple(_match(sides[0][i], sides[1][j]) for i, j in sorted(matched.items())),
        primary_count=sum(map(len, primary)),
        reference_count=sum(map(len, reference)),
        window_steps=window_steps,
    )


def compare_health_scores(
    primary: Sequence[Sequence[HealthScoreRecord]],
    reference: Sequence[Sequence[HealthScoreRecord]],
) -> tuple[HealthScoreDiff, ...]:
    """The scores that either side has, overall first; None where a side's is not known."""
    sides = [
        [{record.score_key: record.score for record in run if record.is_known} for run in side]
        for side in (primary, reference)
    ]
    keys = {record.score_key for side in (primary, reference) for run in side for record in run}
    order = [key for key in _SCORES if key in keys] + sorted(keys - set(_SCORES))
    out = []
    for key in order:
        known = [[run[key] for run in side if key in run] for side in sides]
        one, two = (float(statistics.median(side)) if side else None for side in known)
        difference = None if one is None or two is None else one - two
        out.append(HealthScoreDiff(key, one, two, difference))
    return tuple(out)


def _match_first(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Each member with the first partner that nobody before it has."""
    matched: dict[int, int] = {}
    for i, j in pairs:
        if i not in matched and j not in matched.values():
            matched[i] = j
    return matched


def _sight(runs: Sequence[Sequence[AlertRecord]], window_steps: float) -> list[AlertSighting]:
    """The alerts of a side, those of several runs that are the same put together."""
    groups: list[list[tuple[int, AlertRecord]]] = []
    ordered = sorted(
        ((index, record) for index, run in enumerate(runs) for record in run),
        key=lambda item: (_record_key(item[1]), _step_of(item[1]), item[0]),
    )
    for index, record in ordered:
        last = groups[-1] if groups else None
        if (
            last is not None
            and _record_key(last[0][1]) == _record_key(record)
            and all(other != index for other, _ in last)
            and _measure_distance(last[0][1].step, record.step) <= window_steps
        ):
            last.append((index, record))
        else:
            groups.append([(index, record)])
    found = [_make_sighting(group) for group in groups]
    return sorted(found, key=lambda a: (-1.0 if a.step is None else a.step, *_sortable(_key(a))))


def _make_sighting(group: Sequence[tuple[int, AlertRecord]]) -> AlertSighting:
    worst = max((record for _, record in group), key=lambda record: _rank(record.severity))
    steps = [record.step for _, record in group if record.step is not None]
    rule_id, culprit = _record_key(worst)
    return AlertSighting(
        rule_id,
        culprit or None,
        worst.category,
        worst.severity,
        worst.title,
        float(statistics.median(steps)) if steps else None,
        len(group),
    )


def _match(primary: AlertSighting, reference: AlertSighting) -> AlertMatch:
    known = primary.step is not None and reference.step is not None
    change = _rank(primary.severity) - _rank(reference.severity)
    return AlertMatch(
        primary,
        reference,
        (primary.step or 0.0) - (reference.step or 0.0) if known else None,
        "worse" if change > 0 else "milder" if change < 0 else "same",
    )


def _key(sighting: AlertSighting) -> _Key:
    return sighting.rule_id, sighting.culprit


def _record_key(record: AlertRecord) -> tuple[str, str]:
    return record.rule_id, strip_prefixes(record.culprit or "")


def _sortable(key: _Key) -> tuple[str, str]:
    return key[0], key[1] or ""


def _step_of(record: AlertRecord) -> int:
    return -1 if record.step is None else record.step


def _measure_distance(one: float | None, two: float | None) -> float:
    return 0.0 if one is None or two is None else abs(one - two)


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1


Floats = NDArray[np.float64]

_LAYER_SIZES = ("rms", "norm", "std")
_LAYER_SHARES = ("dead_unit_ratio", "saturation_ratio", "zero_ratio")
_PARAMETER_SIZES = ("update_to_parameter_ratio", "gradient_norm", "update_norm", "value_norm")
_PARAMETER_SHARES = ("gradient_near_zero_ratio",)
_NOTABLE_SHARE = 0.2
_NOISE_MULTIPLE = 3.0
_MEDIAN = math.sqrt(math.pi / 2.0)


_Found = tuple[
    str, int | None, int | None, int, int, float | None, bool, tuple[LayerFigureDiff, ...], str
]
"""The fields of a layer's or parameter's diff from `presence` on, in their order."""


def compare_layers(
    primary: Sequence[RunData], reference: Sequence[RunData], factor: float
) -> tuple[LayerSummaryDiff, ...]:
    """Activations, then gradients, in the order of the model."""
    out = []
    for summary_type in ("activation", "gradient"):
        tables: list[list[Mapping[str, LayerHistory]]] = [
            [run.activations if summary_type == "activation" else run.gradients for run in side]
            for side in (primary, reference)
        ]
        for name in _order_names(tables):
            sides = [[table[name] for table in side if name in table] for side in tables]
            found = _compare_histories(sides, _LAYER_SIZES, _LAYER_SHARES, factor)
            shown = (sides[0] or sides[1])[0]
            out.append(LayerSummaryDiff(name, shown.kind, summary_type, *found))
    return tuple(out)


def compare_parameters(
    primary: Sequence[RunData], reference: Sequence[RunData], factor: float
) -> tuple[ParameterDiff, ...]:
    """Parameters, in the order of the model."""
    tables: list[list[Mapping[str, ParameterHistory]]] = [
        [run.parameters for run in side] for side in (primary, reference)
    ]
    out = []
    for name in _order_names(tables):
        sides = [[table[name] for table in side if name in table] for side in tables]
        found = _compare_histories(sides, _PARAMETER_SIZES, _PARAMETER_SHARES, factor)
        shown = (sides[0] or sides[1])[0]
        out.append(ParameterDiff(name, shown.role, *found))
    return tuple(out)


def _order_names(tables: Sequence[Sequence[Mapping[str, History]]]) -> list[str]:
    """Every name once, the primary's first, in the order in which they appear."""
    return list(dict.fromkeys(name for side in tables for table in side for name in table))


def _compare_histories(
    sides: Sequence[Sequence[History]], sizes: Sequence[str], shares: Sequence[str], factor: float
) -> _Found:
    if not sides[0] or not sides[1]:
        side = "primary" if sides[0] else "reference"
        probes = (sum(map(len, sides[0])), sum(map(len, sides[1])))
        words = f"only the {side} has it"
        return f"{side}_only", None, None, *probes, None, False, (), words
    everyone = [*sides[0], *sides[1]]
    start = max(int(item.step[0]) for item in everyone)
    end = min(int(item.step[-1]) for item in everyone)
    if start > end:
        words = "the sides were sampled over different steps"
        return "both", None, None, 0, 0, None, False, (), words
    rows = [[(item.step >= start) & (item.step <= end) for item in side] for side in sides]
    probes = (sum(int(row.sum()) for row in rows[0]), sum(int(row.sum()) for row in rows[1]))
    figures = []
    for name in (*sizes, *shares):
        values = [
            [_take_finite(item[name][row]) for item, row in zip(side, chosen, strict=True)]
            for side, chosen in zip(sides, rows, strict=True)
        ]
        kept = [[item for item in side if len(item)] for side in values]
        if kept[0] or kept[1]:
            figures.append(_compare_figure(name, kept, factor if name in sizes else None))
    main = next((f.log_ratio for f in figures if f.name in sizes and f.log_ratio is not None), None)
    notable = any(figure.notable for figure in figures)
    words = _describe(figures, probes)
    return "both", start, end, *probes, main, notable, tuple(figures), words


def _compare_figure(
    name: str, values: Sequence[Sequence[Floats]], factor: float | None
) -> LayerFigureDiff:
    """The medians of one figure; `factor` is None for shares between 0 and 1."""
    primary, reference = (
        median([float(np.median(item)) for item in side]) if side else None for side in values
    )
    if primary is None or reference is None:
        return LayerFigureDiff(name, primary, reference, None, None, False)
    difference = primary - reference
    if factor is None:
        notable = _stands_out(difference, _NOTABLE_SHARE, values, log=False)
        return LayerFigureDiff(name, primary, reference, None, difference, notable)
    if primary <= 0.0 or reference <= 0.0:
        return LayerFigureDiff(
            name, primary, reference, None, difference, (primary > 0.0) != (reference > 0.0)
        )
    ratio = math.log(primary) - math.log(reference)
    notable = _stands_out(ratio, math.log(factor), values, log=True)
    return LayerFigureDiff(name, primary, reference, ratio, difference, notable)


def _stands_out(
    difference: float, least: float, values: Sequence[Sequence[Floats]], *, log: bool
) -> bool:
    # Of most layers the difference is small, and then the noise need not be known.
    size = abs(difference)
    return size >= least and size >= _NOISE_MULTIPLE * _noise(values, log=log)


def _noise(values: Sequence[Sequence[Floats]], *, log: bool) -> float:
    """How far the medians may lie apart by how the figure moves within and between runs."""
    errors = []
    for side in values:
        within, medians = [], []
        for item in side:
            scaled = np.log(item[item > 0.0]) if log else item
            if len(scaled):
                within.append(_MEDIAN * spread(scaled) / math.sqrt(len(scaled)))
                medians.append(float(np.median(scaled)))
        if not medians:
            continue
        between = float(np.std(medians, ddof=1)) if len(medians) > 1 else 0.0
        errors.append(max(between, float(np.median(within))) / math.sqrt(len(medians)))
    return math.hypot(*errors)


def _take_finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _describe(figures: Sequence[LayerFigureDiff], probes: tuple[int, int]) -> str:
    if not figures or min(probes) == 0:
        return "one side has no sampled step within the common steps"
    notable = [figure for figure in figures if figure.notable]
    if not notable:
        return "no notable difference"
    return "; ".join(_describe_figure(figure) for figure in notable)


def _describe_figure(figure: LayerFigureDiff) -> str:
    if figure.log_ratio is None:
        return f"{figure.name} {figure.primary:.3g} instead of {figure.reference:.3g}"
    times = math.exp(min(abs(figure.log_ratio), 700.0))
    return f"{figure.name} {times:.3g} times {'larger' if figure.log_ratio > 0 else 'smaller'}"


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
    matched = _match_first((i, j) for _, _, i, j in pairs)
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


class ComparisonEngine:
    """Comparison of runs: config changes, metric differences and their significance.

    Reads only. A run without a stored analysis is analyzed in memory. Runs that are open in this
    process are flushed first. Thread-safe.

    Args:
        session: Run to judge: a TrainingSession, a RunContext, a run ID, or a list of them (seeds).
        config: Targets and options. Defaults to `ComparisonEngineConfig()`.

    Raises:
        SchemaValidationError: An argument has the wrong type. The message names it.
    """

    def __init__(self, session: object, *, config: ComparisonEngineConfig | None = None) -> None:
        self._targets = list_targets(session, "session")
        self._config = check_config(config, ComparisonEngineConfig)

    def compare(self, other: object, *, baseline: bool = False) -> RunComparisonResult:
        """Compare with a reference run or group of runs.

        Args:
            other: Reference: a TrainingSession, a RunContext, a run ID, or a list of them. IDs are
                looked up in the store of the first side.
            baseline: If True, the result's mode is `baseline` instead of `pairwise`. Defaults to
                False.

        Returns:
            The comparison. Its `primary` is the engine's own run, its `reference` is `other`.

        Raises:
            SchemaValidationError: `other` has the wrong type.
            RunNotFoundError: The run does not exist.
            SessionStoreError: The store cannot be read.
        """
        return _compare(self._targets, list_targets(other, "other"), bool(baseline), self._config)

    def compare_to_baseline(self, baseline_run: object) -> RunComparisonResult:
        """Compare with a baseline: `compare` with the mode `baseline`.

        Args:
            baseline_run: Reference, as in `compare`.

        Raises:
            SchemaValidationError: `baseline_run` has the wrong type.
            RunNotFoundError: The run does not exist.
            SessionStoreError: The store cannot be read.
        """
        targets = list_targets(baseline_run, "baseline_run")
        return _compare(self._targets, targets, True, self._config)

    @staticmethod
    def compare_runs(
        primary: object,
        reference: object,
        *,
        baseline: bool = False,
        config: ComparisonEngineConfig | None = None,
    ) -> RunComparisonResult:
        """Compare two runs or groups of runs in one call.

        Args:
            primary: Run to judge, as the argument of `ComparisonEngine`.
            reference: Run to compare with.
            baseline: If True, the result's mode is `baseline`. Defaults to False.
            config: Targets and options. Defaults to `ComparisonEngineConfig()`.

        Raises:
            SchemaValidationError: An argument has the wrong type.
            RunNotFoundError: The run does not exist.
            SessionStoreError: The store cannot be read.
        """
        sides = list_targets(primary, "primary"), list_targets(reference, "reference")
        return _compare(*sides, bool(baseline), check_config(config, ComparisonEngineConfig))


def _compare(
    primary_targets: Sequence[Target],
    reference_targets: Sequence[Target],
    baseline: bool,
    config: ComparisonEngineConfig,
) -> RunComparisonResult:
    storage_dir = find_storage_dir(primary_targets, reference_targets)
    with ExitStack() as opened:
        primary = load_side(primary_targets, storage_dir, opened)
        reference = load_side(reference_targets, storage_dir, opened)
        return _compare_sides(primary, reference, baseline, config)


def _compare_sides(
    primary: Sequence[ComparedRun],
    reference: Sequence[ComparedRun],
    baseline: bool,
    config: ComparisonEngineConfig,
) -> RunComparisonResult:
    same = {run.run_id for run in primary} == {run.run_id for run in reference}
    stored = [run.stored for run in primary], [run.stored for run in reference]
    pairing = Pairing(None, same) if config.pairing == "never" else pair_runs(*stored)
    data = [run.data for run in primary], [run.data for run in reference]
    code = compare_code(reference, primary)
    changes = compare_settings(*stored, code)
    agreeing = list_agreeing(stored, {change.section for change in changes}, code.agrees)
    sides = tuple(
        describe_side(tuple(run.refer() for run in side)) for side in (primary, reference)
    )
    ends = tell_ends(("The primary", sides[0]), ("The reference", sides[1]))
    metric_diffs = limit_verdicts(compare_metrics(*data, pairing, config), *sides)
    last_steps = [run.data.last_step for run in (*primary, *reference)]
    length = max((step for step in last_steps if step is not None), default=0)
    alert_diff = compare_alerts(
        [run.alerts for run in primary],
        [run.alerts for run in reference],
        max(1.0, config.alert_window * length),
    )
    result = RunComparisonResult(
        schema_version=CURRENT_SCHEMA_VERSION,
        generated_at=format_time(now_us()),
        mode="baseline" if baseline else "pairwise",
        primary=sides[0],
        reference=sides[1],
        summary=" ".join((*ends, summarize(changes, agreeing, metric_diffs, alert_diff))),
        notes=(*ends, *list_notes(primary, reference, metric_diffs), *code.list_notes()),
        changes=changes,
        agreeing=agreeing,
        metric_diffs=metric_diffs,
        alert_diff=alert_diff,
        health_score_diffs=compare_health_scores(
            [run.health_scores for run in primary], [run.health_scores for run in reference]
        ),
        phase_diffs=compare_phases(
            [run.phases for run in primary], [run.phases for run in reference]
        ),
        layer_summary_diffs=compare_layers(*data, config.layer_factor),
        parameter_diffs=compare_parameters(*data, config.layer_factor),
    )
    note_runs(result, [run.context for run in (*primary, *reference)])
    return result


def pair_runs(primary: Sequence[StoredRun], reference: Sequence[StoredRun]) -> Pairing:
    """Pair the runs by seed where each side has each of the same seeds once."""
    same = {run.run.id for run in primary} == {run.run.id for run in reference}
    if len(primary) < 2 or len(primary) != len(reference):
        return Pairing(None, same)
    one, two = ([find_seed(run) for run in side] for side in (primary, reference))
    if None in one or len(set(one)) < len(one) or sorted(map(str, one)) != sorted(map(str, two)):
        return Pairing(None, same)
    return Pairing(tuple(two.index(seed) for seed in one), same)
