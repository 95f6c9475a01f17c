"""ComparisonEngine: two runs, or groups of runs, compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from quark.analysis.comparison.alerts import compare_alerts, compare_health_scores
from quark.analysis.comparison.changes import compare_settings, find_seed, list_agreeing
from quark.analysis.comparison.code import compare_code
from quark.analysis.comparison.config import ComparisonEngineConfig
from quark.analysis.comparison.layers import compare_layers, compare_parameters
from quark.analysis.comparison.metrics import Pairing, compare_metrics
from quark.analysis.comparison.phases import compare_phases
from quark.analysis.comparison.results import RunComparisonResult
from quark.analysis.comparison.sides import (
    ComparedRun,
    Target,
    describe_side,
    find_storage_dir,
    list_targets,
    load_side,
)
from quark.analysis.comparison.summary import list_notes, summarize
from quark.analysis.comparison.unfinished import limit_verdicts, tell_ends
from quark_core.backends.contract import StoredRun
from quark_core.errors import SchemaValidationError
from quark_core.presentation import note_runs
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.schema import CURRENT_SCHEMA_VERSION


class ComparisonEngine:
    """Compares runs: what changed, what differs, and whether that means anything.

    Reads only: nothing is stored, no run is altered, and a run without a
    stored analysis is analyzed in memory. Runs that this process holds open
    are flushed first. Every method may be called from any thread.

    Args:
        session: The primary side: a TrainingSession, a RunContext, a run id,
            or a list or tuple of them, such as the runs of several seeds.
        config: Targets and options; see `ComparisonEngineConfig`.

    Raises:
        SchemaValidationError: An argument of another type; the message names it.
    """

    def __init__(self, session: object, *, config: ComparisonEngineConfig | None = None) -> None:
        self._targets = list_targets(session, "session")
        self._config = _check_config(config)

    def compare(self, other: object, *, baseline: bool = False) -> RunComparisonResult:
        """Compare with another run or group of runs, which is the reference.

        Args:
            other: As `session`. An id is looked up in the primary's storage_dir.
            baseline: Whether the result's mode is `baseline`, else `pairwise`.

        Raises:
            SchemaValidationError: `other` is of another type.
            RunNotFoundError: There is no such run.
            SessionStoreError: The store cannot be read.
        """
        return _compare(self._targets, list_targets(other, "other"), bool(baseline), self._config)

    def compare_to_baseline(self, baseline_run: object) -> RunComparisonResult:
        """`compare` with the mode `baseline`.

        Raises:
            SchemaValidationError: `baseline_run` is of another type.
            RunNotFoundError: There is no such run.
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
        """Compare two runs or groups of runs in one call; see `compare`.

        Raises:
            SchemaValidationError: An argument of another type.
            RunNotFoundError: There is no such run.
            SessionStoreError: The store cannot be read.
        """
        sides = list_targets(primary, "primary"), list_targets(reference, "reference")
        return _compare(*sides, bool(baseline), _check_config(config))


def _check_config(config: Any) -> ComparisonEngineConfig:
    if config is not None and not isinstance(config, ComparisonEngineConfig):
        raise SchemaValidationError(
            f"config must be a ComparisonEngineConfig, not {type(config).__name__}"
        )
    return config or ComparisonEngineConfig()


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
