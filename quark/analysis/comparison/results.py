"""Results of a comparison: records, each with `to_dict()`.

In every one of them a difference is the primary's figure less the
reference's, and None stands for what is not known or does not exist. Of a
group of runs a figure is the mean over its runs, unless it says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from quark_core.presentation import bundle, paint
from quark_core.records.base import Record
from quark_core.records.runs import RunEnding


class FigureDiff(Record, frozen=True, gc=False):
    """One figure of a metric's curve on both sides.

    Attributes:
        primary, reference: Means over the runs of each side.
        difference: The primary's less the reference's.
        relative_difference: Of the reference's magnitude.
        primary_deviation, reference_deviation: Standard deviations between the
            runs of a side; None for one run.
        p_value: That of this figure by itself, not corrected; None for single runs.
    """

    primary: float | None
    reference: float | None
    difference: float | None
    relative_difference: float | None
    primary_deviation: float | None = None
    reference_deviation: float | None = None
    p_value: float | None = None


class TargetOutcome(Record, frozen=True, gc=False):
    """When the runs of one side reached a target.

    Attributes:
        step: The first step of the points in a row that met it; of several
            runs the median. None where it was not reached, or not by half of the runs.
        censored_at: The last step of a run that did not reach it; of several the lowest.
        reached_count, run_count: Runs that reached it, and all that have the metric.
        confirmed: Whether it held for `persistence` points; otherwise it held
            from there to the end of the curve, which has fewer.
        summary: The same in words.
    """

    step: float | None
    censored_at: int | None
    reached_count: int
    run_count: int
    confirmed: bool
    summary: str


class TargetDiff(Record, frozen=True, gc=False):
    """The time to a target on both sides.

    Attributes:
        target_value, direction: The target.
        primary, reference: When each side reached it.
        difference: Steps, where both reached it.
        earlier: primary, reference or same; None where that cannot be said.
        p_value: That the sides are alike, from a permutation test that knows
            of runs that did not reach it; None below three runs a side.
        summary: One sentence.
    """

    target_value: float
    direction: str
    primary: TargetOutcome
    reference: TargetOutcome
    difference: float | None
    earlier: str | None
    p_value: float | None
    summary: str


class MetricDiff(Record, frozen=True, gc=False):
    """One metric on both sides, and what may be said about it.

    Attributes:
        metric_key: The stored key.
        presence: both, primary_only or reference_only.
        direction: higher or lower is better; none where that is not known.
        headline: Whether it is the metric that the runs are about.
        unit: step or epoch, over which the curves are laid.
        common_start, common_end: The steps that all runs cover; None where there are none.
        tail_start: Where the last part of the run that ends first begins.
        last: Each run's own last value, which the verdict is about.
        best: Each run's own best value; None without a direction.
        tail_median: The median of the last part of each run's own curve.
        area: The areas under the curves over the common steps, over their width: mean levels.
        time_to_target: The time to the target, where there is one.
        primary_noise, reference_noise: Standard error of `tail_median` within
            a run, from its residuals and their autocorrelation.
        primary_run_count, reference_run_count: Runs that have the metric.
        primary_non_finite_count, reference_non_finite_count: Points that are NaN or infinite.
        verdict: better or worse (of the primary), equivalent, inconclusive;
            None without a direction or on one side only.
        reason: Why, in a sentence.
        method: welch, paired (seeds that surely go together), prediction (one run held
            against a group), known_deviation, permutation (of ranks, where runs diverged),
            single_seed, divergence, identical or none.
        p_value: Of the verdict's test, which looks at `last` alone.
        adjusted_p_value: The same, of any metric but the headline corrected by Holm for
            the others.
        permutation_p_value: That of a test without assumptions about the
            distribution, not corrected.
        effect_size: Difference of `last` over the deviation between seeds (Hedges' g).
        interval_low, interval_high: Confidence interval of the difference of `last`, by the
            verdict's test.
        interval_level: Its level, such as 0.95.
        tolerance: Difference within which the sides count as equivalent.
        probability_of_improvement: Share of pairs of runs in which the primary's ends better.
        primary_iqm, reference_iqm: Interquartile means of `last`, of five runs or more.
        iqm_interval_low, iqm_interval_high: Bootstrap interval of their difference.
        at_last_common_step: The values at `common_end`, where runs go on beyond it, else None.
    """

    metric_key: str
    presence: str
    direction: str
    headline: bool
    unit: str
    common_start: int | None
    common_end: int | None
    tail_start: int | None
    last: FigureDiff
    best: FigureDiff | None
    tail_median: FigureDiff
    area: FigureDiff | None
    time_to_target: TargetDiff | None
    primary_noise: float | None
    reference_noise: float | None
    primary_run_count: int
    reference_run_count: int
    primary_non_finite_count: int
    reference_non_finite_count: int
    verdict: str | None
    reason: str
    method: str
    p_value: float | None = None
    adjusted_p_value: float | None = None
    permutation_p_value: float | None = None
    effect_size: float | None = None
    interval_low: float | None = None
    interval_high: float | None = None
    interval_level: float | None = None
    tolerance: float | None = None
    probability_of_improvement: float | None = None
    primary_iqm: float | None = None
    reference_iqm: float | None = None
    iqm_interval_low: float | None = None
    iqm_interval_high: float | None = None
    at_last_common_step: FigureDiff | None = None

    @property
    def time_to_target_step(self) -> float | None:
        """How many steps later the primary reached the target, where both did."""
        return None if self.time_to_target is None else self.time_to_target.difference

    def to_dict(self) -> dict[str, Any]:
        """The fields and `time_to_target_step`, as JSON-like values."""
        # Written out: zero-argument super() does not work in every Struct subclass.
        return {**Record.to_dict(self), "time_to_target_step": self.time_to_target_step}


class AlertSighting(Record, frozen=True, gc=False):
    """An alert on one side; in a group, in how many runs.

    Attributes:
        rule_id, culprit: What makes two alerts the same, with the step.
        category, title: As in the alert.
        severity: The worst one, where there are several.
        step: Where it began; of several runs the median.
        run_count: Runs that have it.
    """

    rule_id: str
    culprit: str | None
    category: str
    severity: str
    title: str
    step: float | None
    run_count: int


class AlertMatch(Record, frozen=True, gc=False):
    """An alert that both sides have.

    Attributes:
        primary, reference: As it is on either side.
        step_difference: How many steps later the primary has it.
        severity_change: worse, milder or same.
    """

    primary: AlertSighting
    reference: AlertSighting
    step_difference: float | None
    severity_change: str


class AlertDiff(Record, frozen=True, gc=False):
    """Alerts by rule, culprit and window of steps.

    Attributes:
        primary_only: Alerts that the reference does not have.
        reference_only: Alerts that the primary does not have.
        shared: Alerts of both.
        primary_count, reference_count: All alerts of each side.
        window_steps: Distance up to which two alerts are the same.
    """

    primary_only: tuple[AlertSighting, ...] = ()
    reference_only: tuple[AlertSighting, ...] = ()
    shared: tuple[AlertMatch, ...] = ()
    primary_count: int = 0
    reference_count: int = 0
    window_steps: float = 0.0


class HealthScoreDiff(Record, frozen=True, gc=False):
    """A health score on both sides; of groups the median. None where it is not known."""

    score_key: str
    primary: float | None
    reference: float | None
    difference: float | None


class PhaseDiff(Record, frozen=True, gc=False):
    """A phase on both sides, matched by name and by how much the two overlap.

    Attributes:
        phase_name, display_name: Which.
        presence: both, primary_only or reference_only.
        unit: step or epoch.
        primary_start, primary_end, reference_start, reference_end: Bounds, both
            included; of groups the medians.
        overlap: Length of what both cover over that of what either covers, 0 to 1.
        duration_difference: How much longer the primary's is.
        start_difference: How much later the primary's begins.
        primary_run_count, reference_run_count: Runs that have it.
    """

    phase_name: str
    display_name: str
    presence: str
    unit: str
    primary_start: float | None
    primary_end: float | None
    reference_start: float | None
    reference_end: float | None
    overlap: float | None
    duration_difference: float | None
    start_difference: float | None
    primary_run_count: int
    reference_run_count: int


class LayerFigureDiff(Record, frozen=True, gc=False):
    """One figure of a layer or parameter: medians over the common probes.

    Attributes:
        name: The figure, such as `rms` or `dead_unit_ratio`.
        primary, reference: The medians; of groups the medians of the runs'.
        log_ratio: Natural logarithm of primary over reference, for figures that are
            sizes; None for ratios and where one is 0.
        difference: The primary's less the reference's.
        notable: Whether that is more than the layer moves by itself.
    """

    name: str
    primary: float | None
    reference: float | None
    log_ratio: float | None
    difference: float | None
    notable: bool


class LayerSummaryDiff(Record, frozen=True, gc=False):
    """One layer on both sides, matched by its name without prefixes of wrappers.

    Attributes:
        module_name, module_type, summary_type: Which.
        presence: both, primary_only or reference_only.
        common_start, common_end: Steps that both sides' probes cover.
        primary_probes, reference_probes: Probes in that range.
        log_ratio: That of the size of the typical element (`rms`).
        notable: Whether any figure is.
        figures: The figures.
        summary: One sentence.
    """

    module_name: str
    module_type: str
    summary_type: str
    presence: str
    common_start: int | None
    common_end: int | None
    primary_probes: int
    reference_probes: int
    log_ratio: float | None
    notable: bool
    figures: tuple[LayerFigureDiff, ...]
    summary: str


class ParameterDiff(Record, frozen=True, gc=False):
    """One parameter on both sides; fields as in `LayerSummaryDiff`.

    `log_ratio` is that of the size of an update relative to the parameter, or
    of its gradient where updates are not known.
    """

    parameter_name: str
    parameter_role: str
    presence: str
    common_start: int | None
    common_end: int | None
    primary_probes: int
    reference_probes: int
    log_ratio: float | None
    notable: bool
    figures: tuple[LayerFigureDiff, ...]
    summary: str


AnalysisOrigin = Literal["stored", "in_memory", "none"]


class RunReference(Record, frozen=True, gc=False):
    """A run, or a group of runs, that is compared.

    Attributes:
        run_id: The run; of a group the first one's.
        run_count: How many runs there are.
        project_name, name, status, tags, git_commit, created_at, ended_at: Of this run.
        state: The status, or lost where its process is gone.
        seed: What its configuration says under keys that end in `seed`, as text.
        last_step: Its highest step.
        ending: Why it broke off, where it did and that is known.
        analysis: Whether its alerts and phases were `stored`, are found out
            here, `in_memory`, as where records came after they were stored, or
            could not be (`none`).
        members: All runs of a group, this one included; empty for one run.
    """

    run_id: str
    run_count: int
    project_name: str
    name: str | None
    status: str
    state: str
    tags: tuple[str, ...]
    git_commit: str | None
    created_at: str
    ended_at: str | None
    seed: str | None
    last_step: int | None
    analysis: str
    members: tuple[RunReference, ...] = ()
    ending: RunEnding | None = None


class ChangeDiff(Record, frozen=True, gc=False):
    """Something that was set differently.

    Attributes:
        section: config, code or environment.
        path: Where, with dots between; of code `train.py: step`, `git.commit`, or `argv lr`, an
            argument that no setting says.
        kind: changed; added (the primary alone has it); removed (the
            reference alone has it); varies (it is not the same within a side).
        primary, reference: The values; of `varies` lists of them.
    """

    section: str
    path: str
    kind: str
    primary: Any
    reference: Any


class RunComparisonResult(Record, frozen=True, gc=True, weakref=True):
    """Result of a comparison of two runs or groups of runs.

    Attributes:
        schema_version: Schema version of this result.
        generated_at: Time of the comparison. All other fields depend on the runs alone.
        mode: `pairwise` or `baseline`.
        primary, reference: The compared sides.
        summary: The result in a few sentences.
        notes: Limits of this comparison.
        changes: Differences in config, code and environment.
        agreeing: Parts among config, code and environment that were compared and do not differ.
        metric_diffs: Metrics: the headline metric first, then by name.
        alert_diff: Alerts.
        health_score_diffs: Health scores.
        phase_diffs: Phases, by start.
        layer_summary_diffs: Layers, in model order.
        parameter_diffs: Parameters, in model order.
    """

    schema_version: int
    generated_at: str
    mode: str
    primary: RunReference
    reference: RunReference
    summary: str
    notes: tuple[str, ...]
    changes: tuple[ChangeDiff, ...]
    agreeing: tuple[str, ...]
    metric_diffs: tuple[MetricDiff, ...]
    alert_diff: AlertDiff
    health_score_diffs: tuple[HealthScoreDiff, ...]
    phase_diffs: tuple[PhaseDiff, ...]
    layer_summary_diffs: tuple[LayerSummaryDiff, ...]
    parameter_diffs: tuple[ParameterDiff, ...]

    def __repr__(self) -> str:
        said = dict.fromkeys(("better", "worse", "equivalent", "inconclusive"), 0)
        for diff in self.metric_diffs:
            if diff.verdict is not None:
                said[diff.verdict] += 1
        verdicts = ", ".join(f"{count} {word}" for word, count in said.items() if count)
        return (
            f"RunComparisonResult({self.primary.run_id} against {self.reference.run_id}: "
            f"{verdicts or 'no verdict'})"
        )

    def _repr_html_(self) -> str | None:
        return paint(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)

    def find_metric(self, metric_key: str) -> MetricDiff | None:
        """Return the comparison of one metric, or None."""
        return next((diff for diff in self.metric_diffs if diff.metric_key == metric_key), None)
