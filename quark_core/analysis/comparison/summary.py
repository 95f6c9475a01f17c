"""A comparison told in sentences: its summary, and what to know before trusting it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from quark_core.analysis.comparison.changes import compare_settings
from quark_core.analysis.comparison.results import AlertDiff, ChangeDiff, MetricDiff
from quark_core.analysis.comparison.sides import ComparedRun
from quark_core.records.names import decode_name

__all__ = [
    "list_notes",
    "summarize",
]


_LISTED = 4
_VERDICTS = ("better", "worse", "equivalent", "inconclusive")


def summarize(
    changes: Sequence[ChangeDiff], metrics: Sequence[MetricDiff], alerts: AlertDiff
) -> str:
    """What changed, the headline's verdict, the other verdicts, the alerts."""
    parts = [_describe_changes(changes)]
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
    *,
    paired: bool,
) -> tuple[str, ...]:
    """What to know before trusting the result, in a fixed order."""
    runs = tuple({run.run_id: run for run in (*primary, *reference)}.values())
    return (
        *_note_shared_runs(primary, reference, runs),
        *_note_varied_settings("primary", primary),
        *_note_varied_settings("reference", reference),
        *(("The runs are paired by their seeds.",) if paired else ()),
        *_note_remarks(runs),
        *_note_short_runs(runs),
        *_note_disjoint_steps(metrics),
    )


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
            "One run a side: what differs may be the seed. Compare runs of several seeds, five "
            "a side for instance, by giving lists."
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
        yield f"The {name}'s runs are not seeds of one configuration: {_list(varied)} differ."


def _note_remarks(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """What is to be said of single runs, each remark once."""
    remarks: dict[str, list[str]] = {}
    for run in runs:
        for remark in _remark(run):
            remarks.setdefault(remark, []).append(run.run_id)
    for remark, ids in remarks.items():
        yield f"{_name_runs(ids)}: {remark}."


def _note_short_runs(runs: Sequence[ComparedRun]) -> Iterator[str]:
    last_steps = [run.data.last_step or 0 for run in runs]
    longest = max(last_steps)
    short = [run.run_id for run, last in zip(runs, last_steps, strict=True) if 2 * last < longest]
    if short and min(last_steps) > 0:
        yield (
            f"{_name_runs(short)} went less than half as far as the longest, and metrics are "
            "compared only where all runs have them."
        )


def _note_disjoint_steps(metrics: Sequence[MetricDiff]) -> Iterator[str]:
    if metrics and all(diff.common_start is None for diff in metrics if diff.presence == "both"):
        yield "The sides have no steps of any metric in common."


def _name_runs(ids: Sequence[str]) -> str:
    return f"{'Run' if len(ids) == 1 else 'Runs'} {_list(ids)}"


def _remark(run: ComparedRun) -> list[str]:
    remarks = []
    if run.stored.state == "running":
        remarks.append("still running, so the figures are of what is there now")
    if not run.data.metrics:
        remarks.append("no metrics")
    if run.remark is not None:
        remarks.append(run.remark)
    elif run.origin == "in_memory":
        remarks.append("no stored analysis, so it was made in memory")
    environment = {} if run.stored.environment is None else run.stored.environment.values
    if (environment.get("git") or {}).get("dirty"):
        remarks.append("code that was not committed, so equal commits may be unequal code")
    return remarks


def _describe_changes(changes: Sequence[ChangeDiff]) -> str:
    if not changes:
        return "No setting differs."
    parts = []
    for section, word in (("config", "settings"), ("code", "code"), ("environment", "environment")):
        paths = [change.path for change in changes if change.section == section]
        if paths:
            parts.append(f"{word} ({_list(paths)})")
    return f"What changed: {', '.join(parts)}."


def _describe_metric(diff: MetricDiff) -> str:
    ends = diff.tail_median
    figures = ""
    if ends.primary is not None and ends.reference is not None:
        figures = f", {ends.primary:.4g} against {ends.reference:.4g} at the end"
    return (
        f"{decode_name(diff.metric_key)}: {diff.verdict or 'no verdict'}{figures} ({diff.reason})."
    )


def _list(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more
