"""explain_change: why the result of one run, or group of runs, is not that of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from quark_core.analysis.comparison.config import ComparisonEngineConfig
from quark_core.analysis.comparison.engine import pair_runs
from quark_core.analysis.comparison.metrics import compare_metrics
from quark_core.analysis.comparison.results import MetricDiff
from quark_core.analysis.comparison.sides import find_storage_dir, list_targets
from quark_core.analysis.explanation.attribution import (
    attribute,
    measure_checks,
    measure_pairs,
)
from quark_core.analysis.explanation.checks import plan_checks
from quark_core.analysis.explanation.code_differences import compare_code
from quark_core.analysis.explanation.data_differences import (
    compare_data,
    fold_streams,
    include_outputs,
)
from quark_core.analysis.explanation.differences import (
    Findings,
    compare_traits,
    join_findings,
    rule_out_unread,
)
from quark_core.analysis.explanation.divergence import find_parting
from quark_core.analysis.explanation.ends import compare_own_ends, find_end, find_lengths
from quark_core.analysis.explanation.good_runs import find_good_run
from quark_core.analysis.explanation.history import PastRun, load_history
from quark_core.analysis.explanation.ranking import Case, list_never_recorded, rank_causes
from quark_core.analysis.explanation.results import (
    ChangeExplanation,
    NoiseFloor,
    Parting,
)
from quark_core.analysis.explanation.setting_origins import name_origins
from quark_core.analysis.explanation.sides import ExplainedRun, describe_runs, load_runs
from quark_core.analysis.explanation.timing import find_hidden_difference
from quark_core.analysis.explanation.verdict import Judgement, find_noise_floor, judge_change
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import SchemaValidationError
from quark_core.presentation import note_runs
from quark_core.records import format_time
from quark_core.records.names import decode_name
from quark_core.records.schema import CURRENT_SCHEMA_VERSION
from quark_core.records.times import now_us
from quark_core.runs.reading import encode_key, read_series

__all__ = ["explain_change"]

_MOST_NAMED = 10


def explain_change(
    a: object,
    b: object = None,
    metric: str | None = None,
    *,
    storage_dir: str | Path | None = None,
) -> ChangeExplanation:
    """Say why the result of `b` is not that of `a`, with what speaks for it, or that nobody can.

    Reads only: nothing is stored and no run is altered. May be called from any thread.

    Args:
        a: The first side: a run id or the beginning of one, a TrainingSession, a RunContext,
            or a list or tuple of them, such as the seeds of one configuration.
        b: The second side, likewise: the one whose result is in question. None holds `a`,
            one run, against the last good run of its configuration, which is the first side.
        metric: The metric that it is about; by default the objective that a run was started
            with, else the validation loss or accuracy, else that of training.
        storage_dir: Where ids are looked up; by default where the sides' sessions are, else
            the working directory or the service.

    Raises:
        SchemaValidationError: A side is of another type, or no run has the metric.
        RunNotFoundError: There is no such run, or none to hold `a` against.
        SessionStoreError: The store cannot be read.
    """
    if metric is not None and not isinstance(metric, str):
        raise SchemaValidationError(f"metric must be a str, not {type(metric).__name__}")
    key = None if metric is None else encode_key(metric, "metric")
    targets = [list_targets(a, "a")]
    if b is not None:
        targets.append(list_targets(b, "b"))
    root = find_storage_dir(*targets) if storage_dir is None else resolve_storage_dir(storage_dir)
    sides = [load_runs(side, root) for side in targets]
    if b is None:
        sides.insert(0, [_find_reference(sides[0], key)])
    return _Explanation(sides[0], sides[1], key).make()


def _find_reference(side: Sequence[ExplainedRun], key: str | None) -> ExplainedRun:
    if len(side) > 1:
        raise SchemaValidationError(
            "a must be one run where b is not given: it is held against the last good run of its "
            f"configuration; got {len(side)} runs"
        )
    (run,) = side
    metric = _choose_metric(side, side, key)
    history = load_history(
        run.reader, run.stored.run.project_name, None if metric is None else metric.metric_key
    )
    own = next((past for past in history if past.run_id == run.run_id), None)
    digest = run.stored.digests.config if own is None else own.config_digest
    good = find_good_run(history, run.run_id, digest, None if metric is None else metric.metric_key)
    (found,) = load_runs([good.run_id], run.context.storage_dir)
    return found


def _choose_metric(
    before: Sequence[ExplainedRun], after: Sequence[ExplainedRun], key: str | None
) -> MetricDiff | None:
    """The metric that it is about, compared; None where the sides have none in common."""
    data = [run.data for run in after], [run.data for run in before]
    stored = [run.stored for run in after], [run.stored for run in before]
    config = ComparisonEngineConfig(headline_metric=key)
    diffs = compare_metrics(*data, pair_runs(*stored), config)
    if key is not None:
        found = next((diff for diff in diffs if diff.metric_key == key), None)
        if found is None:
            known = [decode_name(diff.metric_key) for diff in diffs]
            named = ", ".join(known[:_MOST_NAMED]) or "no metrics"
            raise SchemaValidationError(
                f"metric {decode_name(key)!r}: no run has it; the runs have {named}"
            )
        return found
    shared = [diff for diff in diffs if diff.presence == "both"]
    headline = [diff for diff in shared if diff.headline]
    directed = [diff for diff in shared if diff.direction != "none"]
    return next(iter([*headline, *directed, *shared]), None)


@dataclass(frozen=True)
class _History:
    """The project's runs.

    Attributes:
        everyone: All of them, newest first.
        others: Without those that are compared.
        own: Those that are compared, side by side.
    """

    everyone: Sequence[PastRun]
    others: Sequence[PastRun]
    own: Sequence[Sequence[PastRun]]


class _Explanation:
    """One explanation on its way."""

    def __init__(
        self,
        before: Sequence[ExplainedRun],
        after: Sequence[ExplainedRun],
        key: str | None,
    ) -> None:
        self._before = before
        self._after = after
        self._metric = _choose_metric(before, after, key)
        self._lengths: tuple[int, int] | None = None
        if self._metric is not None:
            self._lengths = find_lengths(before, after, self._metric)
            if self._lengths is not None:
                self._metric = compare_own_ends(self._metric, before, after)
        self._key = key if self._metric is None else self._metric.metric_key

    def make(self) -> ChangeExplanation:
        """All steps."""
        history = self._load_history()
        differences = self._find_differences()
        apart = any(each.kind != "seed" and not each.is_aside for each in differences.found)
        floor = find_noise_floor(history.everyone, history.own, self._measure, apart=apart)
        judgement = judge_change(self._metric, floor)
        parting = self._find_parting()
        hidden = None
        if parting.metric_key == self._key:
            hidden = find_hidden_difference(history.others, differences.found, parting)
        case = self._weigh(judgement, floor, differences, parting, history, hidden is not None)
        causes = rank_causes(case)
        accuses = judgement.verdict != "no_difference"
        result = ChangeExplanation(
            schema_version=CURRENT_SCHEMA_VERSION,
            generated_at=format_time(now_us()),
            before=describe_runs(self._before),
            after=describe_runs(self._after),
            metric_key=self._key,
            metric=self._metric,
            verdict=judgement.verdict,
            reason=judgement.reason,
            noise_floor=floor,
            first_difference=parting,
            causes=causes if accuses else (),
            differences=()
            if accuses
            else tuple(replace(cause, standing="unlikely") for cause in causes),
            ruled_out=differences.ruled_out,
            unknown=(*differences.unknown, *list_never_recorded(case, causes)),
            checks=plan_checks(causes, self._name_sides()) if accuses else (),
            history_count=len(history.others),
            notes=tuple(self._list_notes(() if hidden is None else (hidden,))),
        )
        note_runs(result, [run.context for run in (*self._before, *self._after)])
        return result

    def _load_history(self) -> _History:
        project = self._before[0].stored.run.project_name
        keys = {
            record.key
            for run in (*self._before, *self._after)
            for record in run.fingerprints
            if record.subject == "data" and not record.level.startswith("stream")
        }
        everyone = load_history(self._before[0].reader, project, self._key, sorted(keys))
        sides = [{run.run_id for run in side} for side in (self._before, self._after)]
        members = set.union(*sides)
        return _History(
            everyone,
            [run for run in everyone if run.run_id not in members],
            [[run for run in everyone if run.run_id in side] for side in sides],
        )

    def _measure(self, run_id: str) -> float | None:
        """The end of a run's curve, taken as those of the sides are."""
        metric = self._metric
        if metric is None or metric.tail_start is None or metric.common_end is None:
            return None
        series = read_series(self._before[0].reader, run_id, metric.metric_key)
        places = series.step if metric.unit == "step" else series.epoch
        if self._lengths is not None:
            return find_end(places, series.last)
        inside = (places >= metric.tail_start) & (places <= metric.common_end)
        values = series.last[inside & np.isfinite(series.last)]
        reached = len(places) and int(places.max()) >= metric.common_end
        return float(np.median(values)) if len(values) and reached else None

    def _weigh(
        self,
        judgement: Judgement,
        floor: NoiseFloor | None,
        differences: Findings,
        parting: Parting,
        history: _History,
        has_hidden: bool,
    ) -> Case:
        change = None if self._metric is None else self._metric.tail_median.difference
        pairs, attribution = {}, None
        if change:
            for each in differences.found:
                effect = measure_pairs(history.others, each.in_history, floor)
                if history.own[0]:
                    checked = measure_checks(history.everyone, history.own[0][0], each, floor)
                    effect = checked or effect
                if effect is not None:
                    pairs[each.key] = effect
            candidates = [each for each in differences.found if each.kind != "seed"]
            attribution = attribute(history.others, candidates, change)
        return Case(
            judgement.verdict,
            change,
            floor,
            differences.found,
            differences.unknown,
            pairs,
            attribution,
            parting,
            has_hidden,
        )

    def _find_differences(self) -> Findings:
        sides = [run.traits for run in self._before], [run.traits for run in self._after]
        found = join_findings(
            (
                compare_data(self._before, self._after),
                compare_traits(*sides),
                compare_code(self._before, self._after),
            )
        )
        found = rule_out_unread(found, [run.read_keys for run in (*self._before, *self._after)])
        configs = [[run.stored.config for run in each] for each in (self._before, self._after)]
        found = name_origins(found, *configs)
        return dataclasses.replace(found, found=fold_streams(found.found))

    def _find_parting(self) -> Parting:
        if len(self._before) > 1 or len(self._after) > 1:
            return Parting(
                "unknown", None, "step", None, 0, None, None,
                "several runs a side: their seeds part them, so no first step is looked for",
            )  # fmt: skip
        one, two = self._before[0], self._after[0]
        parting = find_parting((one.reader, one.run_id), (two.reader, two.run_id))
        return include_outputs(parting, self._before, self._after)

    @property
    def _metric_unit(self) -> str:
        return "step" if self._metric is None else self._metric.unit

    def _name_sides(self) -> str:
        """One run of each side: a check is the first run again, with one thing exchanged."""
        return f"{self._before[0].run_id} {self._after[0].run_id}"

    def _list_notes(self, notes: Sequence[str]) -> list[str]:
        out = list(notes)
        ids = [{run.run_id for run in side} for side in (self._before, self._after)]
        if ids[0] == ids[1]:
            out.append("Both sides are the same runs.")
        elif shared := ids[0] & ids[1]:
            out.append(f"On both sides: {', '.join(sorted(shared))}.")
        if self._lengths is not None:
            first, second = self._lengths
            out.append(
                f"The first ends at {self._metric_unit} {first}, the second at {second}: each is "
                "taken by its own end."
            )
        everyone = (*self._before, *self._after)
        going = [run.run_id for run in everyone if run.stored.state == "running"]
        if going:
            out.append(f"Still running, so the figures are of now: {', '.join(going)}.")
        projects = sorted({run.stored.run.project_name for run in everyone})
        if len(projects) > 1:
            own = self._before[0].stored.run.project_name
            out.append(f"The runs are of {', '.join(projects)}; history is that of {own}.")
        return out
