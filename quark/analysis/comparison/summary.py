"""The summary of a comparison in sentences, and its caveats, such as runs that did not complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from quark.analysis.comparison.changes import compare_settings, list_environment, take_environment
from quark.analysis.comparison.comparison_groups import ComparedRun
from quark.analysis.comparison.results import AlertDiff, ChangeDiff, MetricDiff, RunReference
from quark.analysis.health import say_end
from quark.analysis.run_data import RunData
from quark_core.records.names import decode_name
from quark_core.runs.run_ids import shorten_run_id

_BROKEN_OFF = ("failed", "interrupted", "lost")


def tell_ends(*sides: tuple[str, RunReference], running: bool = False) -> tuple[str, ...]:
    """A sentence on each run that broke off: which one, at which step, and why.

    Args:
        sides: What each side is called, and its runs.
        running: Whether runs that go on are told as well.
    """
    states = (*_BROKEN_OFF, "running") if running else _BROKEN_OFF
    return tuple(
        f"{say_end(run, f'{name} ({run.name or shorten_run_id(run.run_id)})', run.last_step)}."
        for name, side in sides
        for run in side.members or (side,)
        if run.state in states
    )


def _is_broken_off(side: RunReference) -> bool:
    """Whether any run of a side has ended without completing."""
    return any(run.state in _BROKEN_OFF for run in side.members or (side,))


def may_say(verdict: str, primary: RunReference, reference: RunReference) -> bool:
    """Whether a verdict may be said: a side that broke off is worse, or nobody knows."""
    barred = {"equivalent"} if _is_broken_off(primary) or _is_broken_off(reference) else set()
    barred |= {"better"} if _is_broken_off(primary) else set()
    barred |= {"worse"} if _is_broken_off(reference) else set()
    return verdict not in barred


def limit_verdicts(
    metrics: Sequence[MetricDiff], primary: RunReference, reference: RunReference
) -> tuple[MetricDiff, ...]:
    """The metrics with `inconclusive` in place of what may not be said of runs that broke off."""
    ends = tell_ends(("the primary", primary), ("the reference", reference))
    told = " ".join(ends).rstrip(".")
    return tuple(
        replace(diff, verdict="inconclusive", reason=f"{told}; up to there: {diff.reason}")
        if diff.verdict is not None and not may_say(diff.verdict, primary, reference)
        else diff
        for diff in metrics
    )


_SECTIONS = {"config": "configuration", "code": "code", "environment": "environment"}
_LISTED = 4
_VERDICTS = ("better", "worse", "equivalent", "inconclusive")
_TELLING = ("worse", "better", "equivalent", "inconclusive", None)


def summarize(
    changes: Sequence[ChangeDiff],
    agreeing: Sequence[str],
    metrics: Sequence[MetricDiff],
    alerts: AlertDiff,
) -> str:
    """What changed, the headline's verdict, the other verdicts, the alerts."""
    parts = [_describe_changes(changes) if changes else describe_agreement(agreeing)]
    headline = next((diff for diff in metrics if diff.headline), None)
    if headline is not None:
        parts.append(_describe_metric(headline))
    counts = Counter(diff.verdict for diff in metrics if diff.verdict and not diff.headline)
    if counts:
        told = ", ".join(f"{counts[name]} {name}" for name in _VERDICTS if counts[name])
        parts.append(f"{'Other metrics' if headline else 'Metrics'}: {told}.")
    if not metrics:
        parts.append("Neither side has metrics.")
    lone = len(alerts.primary_only), len(alerts.reference_only)
    if any(lone):
        parts.append(f"Alerts: {lone[0]} only on the primary, {lone[1]} only on the reference.")
    return " ".join(parts)


def list_notes(
    primary: Sequence[ComparedRun],
    reference: Sequence[ComparedRun],
    metrics: Sequence[MetricDiff],
) -> tuple[str, ...]:
    """What to know before trusting the result, in a fixed order."""
    runs = tuple({run.run_id: run for run in (*primary, *reference)}.values())
    headline = next((diff.metric_key for diff in metrics if diff.headline), None)
    named = [[(run.stored.run.name, run.data) for run in side] for side in (primary, reference)]
    lengths = tell_lengths(named[0], named[1], headline)
    paired = any(diff.method == "paired" for diff in metrics)
    return (
        *(() if lengths is None else (lengths,)),
        *_note_shared_runs(primary, reference, runs),
        *_note_varied_settings("primary", primary),
        *_note_varied_settings("reference", reference),
        *(("The runs are paired by their seeds.",) if paired else ()),
        *_note_environments(runs),
        *_note_remarks(runs),
        *_note_disjoint_steps(metrics),
    )


def tell_lengths(
    first: Sequence[tuple[str | None, RunData]],
    second: Sequence[tuple[str | None, RunData]],
    metric_key: str | None,
) -> str | None:
    """Where the runs end, in one line; None where all end at one step.

    Args:
        first, second: Name and records of each run.
        metric_key: The metric whose ends count; None for those of any metric.
    """
    unit = "step"
    ends: list[int | None] = []
    for _, data in (*first, *second):
        curve = None if metric_key is None else data.metrics.get(metric_key)
        if curve is not None and len(curve):
            unit = curve.unit
            ends.append(int(curve.step[-1]))
        elif metric_key is None and data.last_step is not None:
            ends.append(data.last_step)
        else:
            ends.append(None)
    if len({end for end in ends if end is not None}) < 2:
        return None
    lead, rest = (_name_side(side) for side in (first, second))
    if lead == rest:
        lead, rest = first[0][1].run_id, second[0][1].run_id
    one, two = (_tell_ends(side, unit) for side in (ends[: len(first)], ends[len(first) :]))
    many = "" if len(first) > 1 else "s"
    return f"{lead} end{many} at {one}, {rest} at {two}: each run is compared at its own end."


def tell_common_step(diff: MetricDiff) -> str | None:
    """What the sides had at the last common step, where runs of either go on beyond it."""
    early = diff.at_last_common_step
    if early is None or early.primary is None or early.reference is None:
        return None
    return (
        f"at the last common {diff.unit}, {diff.common_end}: {early.primary:.5g} against "
        f"{early.reference:.5g} (not the verdict's: a schedule ends with its run)"
    )


def _name_side(side: Sequence[tuple[str | None, RunData]]) -> str:
    name = side[0][0] or side[0][1].run_id
    return name if len(side) == 1 else f"{name} and {len(side) - 1} more"


def _tell_ends(ends: Sequence[int | None], unit: str) -> str:
    known = sorted(end for end in ends if end is not None)
    if not known:
        return f"no {unit}"
    if known[0] == known[-1]:
        return f"{unit} {known[0]}"
    return f"{unit}s {known[0]} to {known[-1]}"


def _note_shared_runs(
    primary: Sequence[ComparedRun],
    reference: Sequence[ComparedRun],
    runs: Sequence[ComparedRun],
) -> Iterator[str]:
    shared = sorted({run.run_id for run in primary} & {run.run_id for run in reference})
    if shared and len(shared) == len(runs):
        yield "Both sides are the same runs."
    elif shared:
        yield f"On both sides: {_list(shared)}; the sides are not independent."
    elif len(primary) == len(reference) == 1:
        yield (
            "One run a side: the difference may be seed noise. Compare runs of several seeds, "
            "for example five a side, by passing lists."
        )


def _note_varied_settings(name: str, side: Sequence[ComparedRun]) -> Iterator[str]:
    stored = [run.stored for run in side]
    varied = sorted(
        {
            change.path
            for other in stored[1:]
            for change in compare_settings([stored[0]] * 2, [other])
            if change.section == "config"
        }
    )
    if varied:
        yield (f"The {name}'s runs differ in more than seeds: {_list(varied)}.")


def _note_environments(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """That some of the runs have recorded no environment, and others have."""
    bare = [run.run_id for run in runs if not list_environment(run.stored)]
    if bare and len(bare) < len(runs):
        verb = "has" if len(bare) == 1 else "have"
        who = _name_runs(bare)
        yield f"The environment was not compared: {who[0].lower()}{who[1:]} {verb} recorded none."


def _note_remarks(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """What is to be said of single runs, each remark once."""
    remarks: dict[str, list[str]] = {}
    for run in runs:
        for remark in _remark(run):
            remarks.setdefault(remark, []).append(run.run_id)
    for remark, ids in remarks.items():
        yield f"{_name_runs(ids)}: {remark}."


def _note_disjoint_steps(metrics: Sequence[MetricDiff]) -> Iterator[str]:
    if metrics and all(diff.common_start is None for diff in metrics if diff.presence == "both"):
        yield "The sides have no common steps of any metric."


def _name_runs(ids: Sequence[str]) -> str:
    return f"{'Run' if len(ids) == 1 else 'Runs'} {_list(ids)}"


def _remark(run: ComparedRun) -> list[str]:
    remarks = []
    if run.stored.state == "running":
        remarks.append("still running, so the values are those logged so far")
    if not run.data.metrics:
        remarks.append("no metrics")
    if run.remark is not None:
        remarks.append(run.remark)
    elif run.origin == "in_memory":
        remarks.append("no stored analysis, so it was analyzed in memory")
    if (take_environment(run.stored).get("git") or {}).get("dirty"):
        remarks.append("code that was not committed, so equal commits may be different code")
    return remarks


def order_metrics(diffs: Iterable[MetricDiff]) -> list[MetricDiff]:
    """Order metrics by weight: the headline, then worse and better ones, then the others."""
    return sorted(diffs, key=lambda diff: (not diff.headline, _TELLING.index(diff.verdict or None)))


def describe_agreement(agreeing: Sequence[str]) -> str:
    """That nothing differs, and in what that was looked at.

    Args:
        agreeing: As a comparison has it.
    """
    same = [name for section, name in _SECTIONS.items() if section in agreeing]
    other = [name for section, name in _SECTIONS.items() if section not in agreeing]
    if not same:
        return "Only metrics were compared: no config, code or environment is known."
    verb = "agrees" if len(same) == 1 else "agree"
    told = f"No recorded setting changed: {_join(same)} {verb}."
    return f"{told} Not compared: {_join(other)}." if other else told


def _join(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _describe_changes(changes: Sequence[ChangeDiff]) -> str:
    parts = []
    for section, word in (("config", "settings"), ("code", "code"), ("environment", "environment")):
        paths = [change.path for change in changes if change.section == section]
        if paths:
            parts.append(f"{word} ({_list(paths)})")
    return f"What changed: {', '.join(parts)}."


def _describe_metric(diff: MetricDiff) -> str:
    ends = diff.last
    figures = ""
    if ends.primary is not None and ends.reference is not None:
        figures = f", {ends.primary:.4g} and {ends.reference:.4g} at the end"
    return (
        f"{decode_name(diff.metric_key)}: {diff.verdict or 'no verdict'}{figures} ({diff.reason})."
    )


def _list(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more
