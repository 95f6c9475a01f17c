"""explain_change: why the result of one run, or group of runs, is not that of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quark_core.analysis.comparison.changes import find_seed
from quark_core.analysis.comparison.config import ComparisonEngineConfig
from quark_core.analysis.comparison.engine import pair_runs
from quark_core.analysis.comparison.metrics import compare_metrics
from quark_core.analysis.comparison.results import MetricDiff, RunReference
from quark_core.analysis.comparison.sides import find_storage_dir, list_targets
from quark_core.analysis.explanation.attribution import measure_pairs, regress
from quark_core.analysis.explanation.differences import Differences, find_differences
from quark_core.analysis.explanation.divergence import find_parting
from quark_core.analysis.explanation.history import PastRun, load_history
from quark_core.analysis.explanation.ranking import Case, rank_causes
from quark_core.analysis.explanation.results import (
    Cause,
    ChangeExplanation,
    NoiseFloor,
    Parting,
)
from quark_core.analysis.explanation.traits import describe_traits
from quark_core.analysis.explanation.verdict import find_noise_floor, judge_change
from quark_core.analysis.outputs import open_analysis
from quark_core.analysis.run_data import RunData
from quark_core.backends.contract import StoredRun, SupportsRead
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.presentation import note_runs
from quark_core.records import format_time
from quark_core.records.runs import RunContext
from quark_core.records.schema import CURRENT_SCHEMA_VERSION
from quark_core.records.times import now_us
from quark_core.runs.open_run import open_runs
from quark_core.runs.opening import open_for_reading
from quark_core.runs.reading import encode_key, read_series
from quark_core.sessions.session import TrainingSession

__all__ = ["explain_change"]


def explain_change(
    a: object,
    b: object,
    metric: str | None = None,
    *,
    storage_dir: str | Path | None = None,
) -> ChangeExplanation:
    """Say why the result of `b` is not that of `a`, with what speaks for it, or that nobody can.

    Reads only: nothing is stored and no run is altered. May be called from any thread.

    Args:
        a: The first side: a run id or the beginning of one, a TrainingSession, a RunContext,
            or a list or tuple of them, such as the seeds of one configuration.
        b: The second side, likewise: the one whose result is in question.
        metric: The metric that it is about; by default the objective that a run was started
            with, else the validation loss or accuracy, else that of training.
        storage_dir: Where ids are looked up; by default where the other side's session is,
            else the working directory or the service.

    Raises:
        SchemaValidationError: A side is of another type, or no run has the metric.
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    targets = list_targets(a, "a"), list_targets(b, "b")
    if metric is not None and not isinstance(metric, str):
        raise SchemaValidationError(f"metric must be a str, not {type(metric).__name__}")
    root = find_storage_dir(*targets) if storage_dir is None else resolve_storage_dir(storage_dir)
    sides = _load(targets[0], root), _load(targets[1], root)
    return _Explanation(sides[0], sides[1], metric).make()


@dataclass(frozen=True, slots=True)
class _Side:
    """One run of a side."""

    stored: StoredRun
    data: RunData
    reader: SupportsRead
    context: RunContext

    @property
    def run_id(self) -> str:
        return self.data.run_id


def _load(targets: Sequence[object], root: Path | None) -> list[_Side]:
    found: dict[str, _Side] = {}
    for target in targets:
        if isinstance(target, str):
            known = open_runs.find(target)
            if known is None:
                read = open_for_reading(target, root)
                # The beginning of an id may mean a run of this process.
                known = open_runs.find(read.context.run_id) or read
            target = TrainingSession(known)
        assert isinstance(target, (TrainingSession, RunContext))
        analysis = open_analysis(target)
        data = analysis.load()
        run = open_runs.find(data.run_id) or open_for_reading(
            data.run_id, analysis.context.storage_dir
        )
        if isinstance(target, TrainingSession):
            run = target.open_run
        if run.reader is None:
            raise SessionStoreError(f"run {data.run_id}: nothing of it can be read back")
        stored = run.reader.load_run(data.run_id)
        found.setdefault(data.run_id, _Side(stored, data, run.reader, analysis.context))
    return list(found.values())


class _Explanation:
    """One explanation on its way."""

    def __init__(self, before: Sequence[_Side], after: Sequence[_Side], metric: str | None) -> None:
        self._before = before
        self._after = after
        self._key = None if metric is None else encode_key(metric, "metric")

    def make(self) -> ChangeExplanation:
        """All steps."""
        metric = self._compare()
        key = None if metric is None else metric.metric_key
        project = self._before[0].stored.run.project_name
        history = load_history(self._before[0].reader, project, key)
        members = {run.run_id for run in (*self._before, *self._after)}
        own = [
            [run for run in history if run.run_id in {each.run_id for each in side}]
            for side in (self._before, self._after)
        ]
        floor = find_noise_floor(history, own, self._measure(metric))
        judgement = judge_change(metric, floor)
        differences = find_differences(
            [describe_traits(run.stored) for run in self._before],
            [describe_traits(run.stored) for run in self._after],
        )
        past = [run for run in history if run.run_id not in members]
        change = None if metric is None else metric.tail_median.difference
        case = self._weigh(judgement.verdict, change, floor, differences, past)
        causes = rank_causes(case)
        accuses = judgement.verdict != "no_difference"
        result = ChangeExplanation(
            schema_version=CURRENT_SCHEMA_VERSION,
            generated_at=format_time(now_us()),
            before=_describe_side(self._before),
            after=_describe_side(self._after),
            metric_key=key,
            metric=metric,
            verdict=judgement.verdict,
            reason=judgement.reason,
            noise_floor=floor,
            first_difference=self._find_parting(),
            causes=causes if accuses else (),
            differences=() if accuses else tuple(map(_acquit, causes)),
            ruled_out=differences.ruled_out,
            unknown=differences.unknown,
            checks=(),
            history_count=len(past),
            notes=tuple(self._list_notes()),
        )
        note_runs(result, [run.context for run in (*self._before, *self._after)])
        return result

    def _compare(self) -> MetricDiff | None:
        sides = [run.data for run in self._after], [run.data for run in self._before]
        stored = [run.stored for run in self._after], [run.stored for run in self._before]
        config = ComparisonEngineConfig(headline_metric=self._key)
        diffs = compare_metrics(*sides, pair_runs(*stored), config)
        if self._key is not None:
            found = next((diff for diff in diffs if diff.metric_key == self._key), None)
            if found is None:
                known = ", ".join(sorted(diff.metric_key for diff in diffs)[:10])
                raise SchemaValidationError(
                    f"metric {self._key!r}: none of the runs has it; they have: {known or 'none'}"
                )
            return found
        shared = [diff for diff in diffs if diff.presence == "both"]
        headline = [diff for diff in shared if diff.headline]
        directed = [diff for diff in shared if diff.direction != "none"]
        return next(iter([*headline, *directed, *shared]), None)

    def _measure(self, metric: MetricDiff | None) -> Callable[[str], float | None]:
        """The end of a run's curve, over the same stretch as that of the comparison."""
        reader = self._before[0].reader

        def measure(run_id: str) -> float | None:
            if metric is None or metric.tail_start is None or metric.common_end is None:
                return None
            series = read_series(reader, run_id, metric.metric_key)
            places = series.step if metric.unit == "step" else series.epoch
            inside = (places >= metric.tail_start) & (places <= metric.common_end)
            values = series.last[inside & np.isfinite(series.last)]
            reached = len(places) and int(places.max()) >= metric.common_end
            return float(np.median(values)) if len(values) and reached else None

        return measure

    def _weigh(
        self,
        verdict: str,
        change: float | None,
        floor: NoiseFloor | None,
        differences: Differences,
        past: Sequence[PastRun],
    ) -> Case:
        pairs = {}
        attribution = None
        if change:
            for each in differences.found:
                effect = measure_pairs(past, each, floor)
                if effect is not None:
                    pairs[each.key] = effect
            candidates = [each for each in differences.found if each.kind != "seed"]
            attribution = regress(past, candidates, change)
        return Case(
            verdict,  # type: ignore[arg-type]
            change,
            floor,
            differences.found,
            differences.unknown,
            pairs,
            attribution,
        )

    def _find_parting(self) -> Parting:
        if len(self._before) > 1 or len(self._after) > 1:
            return Parting(
                "unknown", None, "step", None, 0, None, None,
                "several runs a side: seeds part them from the start",
            )  # fmt: skip
        one, two = self._before[0], self._after[0]
        return find_parting((one.reader, one.run_id), (two.reader, two.run_id))

    def _list_notes(self) -> list[str]:
        notes = []
        ids = [{run.run_id for run in side} for side in (self._before, self._after)]
        if ids[0] == ids[1]:
            notes.append("Both sides are the same runs.")
        elif shared := ids[0] & ids[1]:
            notes.append(f"On both sides: {', '.join(sorted(shared))}.")
        going = [run.run_id for run in (*self._before, *self._after) if _goes_on(run)]
        if going:
            notes.append(f"Still running, so the figures are of now: {', '.join(going)}.")
        projects = {run.stored.run.project_name for run in (*self._before, *self._after)}
        if len(projects) > 1:
            notes.append(
                f"The runs are of several projects ({', '.join(sorted(projects))}); history is "
                f"that of {self._before[0].stored.run.project_name}."
            )
        return notes


def _goes_on(run: _Side) -> bool:
    return run.stored.state == "running"


def _acquit(cause: Cause) -> Cause:
    """The same where there is no change: nobody is accused of anything."""
    from msgspec.structs import replace

    return replace(cause, standing="unlikely")


def _describe_side(runs: Sequence[_Side]) -> RunReference:
    members = tuple(_refer(run) for run in runs)
    if len(members) == 1:
        return members[0]
    from msgspec.structs import replace

    return replace(members[0], run_count=len(members), members=members)


def _refer(run: _Side) -> RunReference:
    record = run.stored.run
    return RunReference(
        run_id=run.run_id,
        run_count=1,
        project_name=record.project_name,
        name=record.name,
        status=record.status,
        state=run.stored.state,
        tags=record.tags,
        git_commit=record.git_commit,
        created_at=record.created_at,
        ended_at=record.ended_at,
        seed=find_seed(run.stored),
        last_step=run.data.last_step,
        analysis="none",
    )
