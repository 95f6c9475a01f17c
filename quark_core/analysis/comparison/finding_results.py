"""What a comparison says about alerts, health scores, phases, layers and parameters."""

from __future__ import annotations

from quark_core.record_base import Record

__all__ = [
    "AlertDiff",
    "AlertMatch",
    "AlertSighting",
    "HealthScoreDiff",
    "LayerFigureDiff",
    "LayerSummaryDiff",
    "ParameterDiff",
    "PhaseDiff",
]


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
    """A health score on both sides; of groups the median."""

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
