"""explain_change: whether the result of a run changed, and why."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from quark.analysis.comparison.comparison_groups import find_storage_dir, list_targets, load_side
from quark.analysis.comparison.engine import pair_runs
from quark.analysis.comparison.metrics import compare_metrics
from quark.analysis.comparison.results import MetricDiff, RunReference
from quark.analysis.comparison.significance import MeanTest
from quark.analysis.comparison.summary import may_say, tell_ends, tell_lengths
from quark.analysis.config import ComparisonEngineConfig
from quark.analysis.explanation.attribution import (
    Candidates,
    attribute,
    list_never_recorded,
    measure_checks,
    measure_pairs,
    rank_causes,
)
from quark.analysis.explanation.differences import (
    Findings,
    compare_data,
    compare_traits,
    find_code_differences,
    fold_streams,
    include_outputs,
    join_findings,
    name_origins,
    rule_out_unread,
    set_unexplained_apart,
)
from quark.analysis.explanation.divergence import find_first_divergence, find_hidden_difference
from quark.analysis.explanation.history import (
    PastRun,
    RunInQuestion,
    find_config_digest,
    find_good_run,
    load_history,
)
from quark.analysis.explanation.results import (
    Cause,
    ChangeExplanation,
    ChangeVerdict,
    Check,
    Effect,
    FirstDivergence,
    NoiseFloor,
)
from quark.analysis.explanation.run_attributes import (
    ExplainedRun,
    RunTraits,
    describe_runs,
    load_runs,
)
from quark.analysis.explanation.swap_experiments import (
    list_checkable,
    plan_checks,
    plan_exchange,
    refuse_sources,
    tell_checks,
)
from quark.provenance.sources import read_sources
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.presentation import note_runs
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.names import decode_name
from quark_core.records.schema import CURRENT_SCHEMA_VERSION
from quark_core.runs.reading import encode_key
from quark_core.runs.run_ids import name_store

_SURE = 0.01
"""Chance of a change where there is none, up to which one is told: it leads to accusations."""

_LIKELY = 0.05
_MOST_ALIKE = 40
_SAID: dict[str | None, ChangeVerdict] = {
    "better": "better",
    "worse": "worse",
    "equivalent": "no_difference",
    "inconclusive": "cannot_tell",
}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What is said, and why.

    Attributes:
        verdict: The verdict.
        reason: Why.
        accuses: Whether what differs may be to blame; not where chance alone does as much.
    """

    verdict: ChangeVerdict
    reason: str
    accuses: bool = True


def find_noise_floor(
    history: Sequence[PastRun],
    sides: Sequence[Sequence[PastRun]],
    *,
    apart: bool,
) -> NoiseFloor | None:
    """How far seeds of one configuration lie apart; None where too few runs tell.

    Runs that are like those that are compared, in all but seeds, tell first; where they are
    too few, those of all other configurations of the project tell together.

    Args:
        history: Runs of the project, newest first.
        sides: The runs that are compared.
        apart: Whether the sides differ in more than seeds: then their runs are not of one kind,
            also where history does not show in what.
    """
    # A run that is in question says nothing of what chance does: it would excuse itself.
    own = {sides[0][0].sign_rest()} if sides[0] else set()
    asked = {run.run_id for run in sides[-1] if run.sign_rest() in own}
    floor = _find_floor([run for run in history if run.run_id not in asked], sides)
    if floor is None and asked and not apart:
        return _find_floor(history, sides)
    return floor


def _find_floor(
    history: Sequence[PastRun], sides: Sequence[Sequence[PastRun]]
) -> NoiseFloor | None:
    groups: dict[Hashable, list[PastRun]] = defaultdict(list)
    for run in history:
        if run.is_whole and run.config_digest is not None:
            groups[run.sign_rest()].append(run)
    keys = dict.fromkeys(
        run.sign_rest() for side in sides for run in side if run.config_digest is not None
    )
    own = []
    first: list[float] | None = None
    for key in keys:
        members = groups.get(key, [])[:_MOST_ALIKE]
        values = _keep_seeds(members)
        if first is None:
            first = values
        own.append(values)
    mean = float(np.mean(first)) if first and len(first) > 1 else None
    floor = NoiseFloor.pool(own, "side", mean)
    if floor is not None:
        return floor
    others = [_keep_seeds(members[:_MOST_ALIKE]) for members in groups.values()]
    return NoiseFloor.pool(others, "project", mean)


def judge_change(metric: MetricDiff | None, floor: NoiseFloor | None) -> Conclusion:
    """The verdict; `metric` has the second side as its primary.

    It is that of the comparison. One run a side, of which a comparison knows nothing, is held
    against what the project's other runs say of chance.
    """
    if metric is None:
        return Conclusion("cannot_tell", "the two sides have no common metric")
    if metric.method == "single_seed" and floor is not None:
        return _judge_single(metric, metric.last.difference or 0.0, floor)
    if metric.method == "divergence" and floor is not None:
        return _judge_divergence(metric)
    if metric.direction == "none":
        return _judge_undirected(metric)
    said = _SAID.get(metric.verdict, "cannot_tell")
    is_chance = said == "no_difference" or (metric.p_value is not None and metric.p_value > _LIKELY)
    return Conclusion(said, _turn(metric.reason), not is_chance)


def _judge_divergence(metric: MetricDiff) -> Conclusion:
    """One run, or all of a side, ends in no number, which other seeds of the project do not."""
    sides = metric.last.primary is None, metric.last.reference is None
    if all(sides):
        return Conclusion("cannot_tell", _turn(metric.reason))
    told = f"the {'second' if sides[0] else 'first'} ends in values that are not finite"
    return Conclusion("worse" if sides[0] else "better", f"{told}, which no other seed does")


def limit_conclusion(
    conclusion: Conclusion, before: RunReference, after: RunReference
) -> Conclusion:
    """The conclusion, or `cannot_tell` in its place where a side broke off and would look good."""
    words: dict[str, str] = {"no_difference": "equivalent", "changed": "equivalent"}
    if may_say(words.get(conclusion.verdict, conclusion.verdict), after, before):
        return conclusion
    ends = tell_ends(("the first", before), ("the second", after))
    told = " ".join(ends).rstrip(".")
    return Conclusion(
        "cannot_tell", f"{told}; up to there: {conclusion.reason}", conclusion.accuses
    )


def _judge_undirected(metric: MetricDiff) -> Conclusion:
    """Without a direction there is a change or none, by the same interval."""
    low, high = metric.interval_low, metric.interval_high
    if low is None or high is None:
        return Conclusion("cannot_tell", "one run a side: the seed noise is unknown")
    told = f"the difference is between {low:.3g} and {high:.3g}"
    if low <= 0.0 <= high:
        return Conclusion("cannot_tell", f"{told}: seed noise alone may cause it", accuses=False)
    return Conclusion("changed", told)


def _judge_single(metric: MetricDiff, difference: float, floor: NoiseFloor) -> Conclusion:
    if difference == 0.0:
        return Conclusion("no_difference", "both end at the same value", accuses=False)
    deviation = floor.deviation
    if deviation <= 0.0:
        # Seeds that all end at one value, such as an accuracy of 1, leave the resolution alone.
        deviation = (metric.tolerance or 0.0) / 2.0
    variance = 2.0 * deviation * deviation
    test = MeanTest("known_deviation", difference, math.sqrt(variance), floor.degrees, variance)
    times = abs(difference) / deviation if deviation > 0.0 else math.inf
    p = test.p_value
    told = f"{times:.3g} times the standard deviation between seeds ({deviation:.3g}), p = {p:.2g}"
    if p > _LIKELY:
        return Conclusion("no_difference", f"{told}: within seed noise", accuses=False)
    if p > _SURE:
        return Conclusion("cannot_tell", f"{told}: seed noise does it once in {1.0 / p:.0f}")
    if metric.direction == "none":
        return Conclusion("changed", told)
    is_better = (difference > 0.0) == (metric.direction == "higher")
    return Conclusion("better" if is_better else "worse", told)


def _turn(reason: str) -> str:
    """A reason of the comparison, whose primary is the second side here."""
    return reason.replace("the primary", "the second").replace("the reference", "the first")


def _keep_seeds(runs: Sequence[PastRun]) -> list[float]:
    """One value for each seed: a seed that was run again says nothing of other seeds."""
    by_seed: dict[bytes | None, list[float]] = defaultdict(list)
    for run in runs:
        if run.value is not None and math.isfinite(run.value):
            by_seed[run.seed].append(run.value)
    out = []
    for seed, values in by_seed.items():
        # Without a seed each run has one of its own, but copies to the last bit are one run.
        out += sorted(set(values)) if seed is None else [float(np.mean(values))]
    return out


_MOST_NAMED = 10


def explain_change(
    a: object,
    b: object = None,
    metric: str | None = None,
    *,
    storage_dir: str | Path | None = None,
) -> ChangeExplanation:
    """Explain why the result of run `b` differs from the result of run `a`.

    Reads only. If the difference is within seed noise, no cause is named. Thread-safe.

    Args:
        a: Reference: a run ID or unique prefix, a TrainingSession, a RunContext, or a list of them
            (seeds of one config).
        b: Run to explain, in the same forms. If None, `a` is explained and compared with the last
            good run of its config.
        metric: Metric to explain. Defaults to the run's objective, then a validation loss or
            accuracy, then a training one.
        storage_dir: Folder in which IDs are looked up. Defaults to the store of the given sessions,
            then the working directory or the Quark server.

    Raises:
        SchemaValidationError: A side has the wrong type, or no run has the metric.
        RunNotFoundError: A run does not exist, or there is nothing to compare `a` with.
        SessionStoreError: The store cannot be read.
    """
    if metric is not None and not isinstance(metric, str):
        raise SchemaValidationError(f"metric must be a str, not {type(metric).__name__}")
    key = None if metric is None else encode_key(metric, "metric")
    targets = [list_targets(a, "a")]
    if b is not None:
        targets.append(list_targets(b, "b"))
    root = find_storage_dir(*targets) if storage_dir is None else resolve_storage_dir(storage_dir)
    with ExitStack() as opened:
        sides = [load_runs(side, root, opened) for side in targets]
        if b is None:
            sides.insert(0, [_find_reference(sides[0], key, opened)])
        return _Explanation(sides[0], sides[1], key).make()


def _find_reference(
    side: Sequence[ExplainedRun], key: str | None, opened: ExitStack
) -> ExplainedRun:
    if len(side) > 1:
        raise SchemaValidationError(
            "a must be a single run if b is omitted, because it is compared with the last good "
            f"run of its config; got {len(side)} runs"
        )
    (run,) = side
    metric = _choose_metric(side, side, key)
    metric_key = None if metric is None else metric.metric_key
    history = load_history(run.reader, run.stored.run.project_name, metric_key)
    asked = RunInQuestion(
        run.run_id,
        run.stored.run.created_at,
        find_config_digest(run.stored),
        metric_key,
        "none" if metric is None else metric.direction,
        name_store(run.reader),
    )
    root = run.context.storage_dir
    good = find_good_run(history, asked, lambda run_id: _is_critical(run_id, root))
    (found,) = load_runs([good.run_id], root, opened)
    return found


def _is_critical(run_id: str, root: Path | None) -> bool:
    """Whether a finding of a run, or its health, is critical; analyzed where nobody has."""
    with ExitStack() as opened:
        (run,) = load_side([run_id], root, opened)
    found = any(alert.severity == "critical" for alert in run.alerts)
    return found or any(
        score.score_key == "overall" and score.is_known and score.status == "critical"
        for score in run.health_scores
    )


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
                f"metric {decode_name(key)!r}: no run has this metric. The runs have {named}"
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
        self._key = key if self._metric is None else self._metric.metric_key

    def make(self) -> ChangeExplanation:
        """All steps."""
        history = self._load_history()
        traits = self._list_traits(history)
        differences = self._find_differences(traits)
        apart = any(each.kind != "seed" and not each.is_aside for each in differences.found)
        differences = set_unexplained_apart(differences)
        floor = find_noise_floor(history.everyone, history.own, apart=apart)
        sides = describe_runs(self._before), describe_runs(self._after)
        conclusion = limit_conclusion(judge_change(self._metric, floor), *sides)
        divergence = self._find_divergence()
        hidden = None
        if divergence.metric_key == self._key:
            hidden = find_hidden_difference(history.others, differences.found, divergence)
        checked = self._measure_checks(history, floor)
        case = self._weigh(
            conclusion, floor, differences, divergence, history, checked, hidden is not None
        )
        causes = rank_causes(case)
        accuses = conclusion.accuses
        result = ChangeExplanation(
            schema_version=CURRENT_SCHEMA_VERSION,
            generated_at=format_time(now_us()),
            before=sides[0],
            after=sides[1],
            metric_key=self._key,
            metric=self._metric,
            verdict=conclusion.verdict,
            reason=conclusion.reason,
            noise_floor=floor,
            first_difference=divergence,
            causes=causes if accuses else (),
            differences=()
            if accuses
            else tuple(replace(cause, standing="unlikely") for cause in causes),
            ruled_out=differences.ruled_out,
            unknown=(*differences.unknown, *list_never_recorded(case, causes)),
            checks=self._plan_checks(causes) if accuses else (),
            history_count=len(history.others),
            notes=tuple(
                self._list_notes(filter(None, (hidden, tell_checks(causes, checked))), traits)
            ),
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

    def _measure_checks(self, history: _History, floor: NoiseFloor | None) -> Mapping[str, Effect]:
        """What runs say that were made to check the causes."""
        if not history.own[0]:
            return {}
        return measure_checks(history.everyone, history.own[0][0], self._after[0].run_id, floor)

    def _weigh(
        self,
        conclusion: Conclusion,
        floor: NoiseFloor | None,
        differences: Findings,
        divergence: FirstDivergence,
        history: _History,
        checked: Mapping[str, Effect],
        has_hidden: bool,
    ) -> Candidates:
        change = None if self._metric is None else self._metric.last.difference
        pairs, attribution = {}, None
        if change:
            for each in differences.found:
                effect = checked.get(each.place)
                if effect is None:
                    effect = measure_pairs(history.others, each.in_history, floor)
                if effect is not None:
                    pairs[each.key] = effect
            candidates = [each for each in differences.found if each.kind != "seed"]
            attribution = attribute(history.others, candidates, change)
        return Candidates(
            conclusion.verdict,
            change,
            floor,
            differences.found,
            differences.unknown,
            pairs,
            attribution,
            divergence,
            has_hidden,
        )

    def _list_traits(self, history: _History) -> tuple[list[RunTraits], list[RunTraits]]:
        """What the runs of either side were made of, as history has it where it knows them."""
        known = {run.run_id: run.traits for side in history.own for run in side}
        before, after = (
            [known.get(run.run_id, run.traits) for run in side]
            for side in (self._before, self._after)
        )
        return before, after

    def _find_differences(self, sides: tuple[list[RunTraits], list[RunTraits]]) -> Findings:
        found = join_findings(
            (
                compare_data(self._before, self._after),
                compare_traits(*sides),
                find_code_differences(self._before, self._after),
            )
        )
        found = rule_out_unread(found, [run.read_keys for run in (*self._before, *self._after)])
        configs = [[run.stored.config for run in each] for each in (self._before, self._after)]
        found = name_origins(found, *configs)
        return dataclasses.replace(found, found=fold_streams(found.found))

    def _find_divergence(self) -> FirstDivergence:
        if len(self._before) > 1 or len(self._after) > 1:
            return FirstDivergence(
                "unknown", None, "step", None, 0, None, None,
                "several runs a side: they diverge by their seeds, so no first step is determined"
            )  # fmt: skip
        one, two = self._before[0], self._after[0]
        divergence = find_first_divergence((one.reader, one.run_id), (two.reader, two.run_id))
        return include_outputs(divergence, self._before, self._after)

    def _plan_checks(self, causes: Sequence[Cause]) -> tuple[Check, ...]:
        """Runs that would settle it and that can be made: nothing else is suggested."""
        if not list_checkable(causes):
            return ()
        first = self._before[0]
        try:
            kept = read_sources(first.reader, first.run_id, texts=False)
        except QuarkError:
            return ()
        if refuse_sources(kept) is not None:
            return ()
        return plan_checks(
            causes,
            self._name_sides(),
            can_run=lambda part: plan_exchange(first.stored, part).refusal is None,
        )

    def _name_sides(self) -> str:
        """One run of each side: a check is the first run again, with one thing exchanged."""
        return f"{self._before[0].run_id} {self._after[0].run_id}"

    def _list_notes(
        self, notes: Iterable[str], sides: tuple[list[RunTraits], list[RunTraits]]
    ) -> list[str]:
        out = list(notes)
        assumed = dict.fromkeys(text for side in sides for run in side for text in run.assumed)
        out += [text[:1].upper() + text[1:] for text in assumed]
        ids = [{run.run_id for run in side} for side in (self._before, self._after)]
        if ids[0] == ids[1]:
            out.append("Both sides are the same runs.")
        elif shared := ids[0] & ids[1]:
            out.append(f"On both sides: {', '.join(sorted(shared))}.")
        named = [
            [(run.stored.run.name, run.data) for run in side]
            for side in (self._before, self._after)
        ]
        key = None if self._metric is None else self._metric.metric_key
        lengths = tell_lengths(named[0], named[1], key)
        if lengths is not None:
            out.append(lengths)
        everyone = (*self._before, *self._after)
        going = [run.run_id for run in everyone if run.stored.state == "running"]
        if going:
            out.append(f"Still running, so the values are those logged so far: {', '.join(going)}.")
        projects = sorted({run.stored.run.project_name for run in everyone})
        if len(projects) > 1:
            own = self._before[0].stored.run.project_name
            out.append(f"The runs belong to {', '.join(projects)}; the history is that of {own}.")
        return out
