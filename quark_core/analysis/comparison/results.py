"""What a comparison returns: records, each with `to_dict()`.

In every one of them a difference is the primary's figure less the
reference's, and None stands for what is not known or does not exist. Of a
group of runs a figure is the mean over its runs, unless it says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from quark_core.analysis.comparison.finding_results import (
    AlertDiff,
    AlertMatch,
    AlertSighting,
    HealthScoreDiff,
    LayerFigureDiff,
    LayerSummaryDiff,
    ParameterDiff,
    PhaseDiff,
)
from quark_core.analysis.comparison.metric_results import (
    FigureDiff,
    MetricDiff,
    MetricVerdict,
    Presence,
    TargetDiff,
    TargetOutcome,
)
from quark_core.record_base import Record

__all__ = [
    "AlertDiff",
    "AlertMatch",
    "AlertSighting",
    "AnalysisOrigin",
    "ChangeDiff",
    "ComparisonMode",
    "FigureDiff",
    "HealthScoreDiff",
    "LayerFigureDiff",
    "LayerSummaryDiff",
    "MetricDiff",
    "MetricVerdict",
    "ParameterDiff",
    "PhaseDiff",
    "Presence",
    "RunComparisonResult",
    "RunReference",
    "TargetDiff",
    "TargetOutcome",
]

ComparisonMode = Literal["pairwise", "baseline"]
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


class ChangeDiff(Record, frozen=True, gc=False):
    """Something that was set differently.

    Attributes:
        section: config, code or environment.
        path: Where, with dots between.
        kind: changed; added (the primary alone has it); removed (the
            reference alone has it); varies (it is not the same within a side).
        primary, reference: The values; of `varies` lists of them.
    """

    section: str
    path: str
    kind: str
    primary: Any
    reference: Any


class RunComparisonResult(Record, frozen=True, gc=False):
    """Two runs, or groups of runs, compared.

    Attributes:
        schema_version: Version of the schema of this result.
        generated_at: When it was made; all else is the same for the same runs.
        mode: pairwise or baseline.
        primary, reference: What was compared.
        summary: The result in a few sentences.
        notes: What to know before trusting it.
        changes: What was set differently: configuration, code, environment.
        metric_diffs: The headline first, then by name.
        alert_diff: Alerts.
        health_score_diffs: Health scores.
        phase_diffs: Phases, in the order of their starts.
        layer_summary_diffs: Layers, in the order of the model.
        parameter_diffs: Parameters, likewise.
    """

    schema_version: int
    generated_at: str
    mode: str
    primary: RunReference
    reference: RunReference
    summary: str
    notes: tuple[str, ...]
    changes: tuple[ChangeDiff, ...]
    metric_diffs: tuple[MetricDiff, ...]
    alert_diff: AlertDiff
    health_score_diffs: tuple[HealthScoreDiff, ...]
    phase_diffs: tuple[PhaseDiff, ...]
    layer_summary_diffs: tuple[LayerSummaryDiff, ...]
    parameter_diffs: tuple[ParameterDiff, ...]

    def find_metric(self, metric_key: str) -> MetricDiff | None:
        """The diff of one metric, or None."""
        return next((diff for diff in self.metric_diffs if diff.metric_key == metric_key), None)
