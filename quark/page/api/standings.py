"""How a run stands: its health, the worst that was found, how far it has come."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from quark_core.errors import SessionStoreError
from quark_core.records import SystemTelemetryRecord
from quark_core.records.base import now_us
from quark_core.records.query import Query

if TYPE_CHECKING:
    from quark.page.api.analyses import AnalysisDesk
    from quark.page.api.run_analysis import Analysis
    from quark.page.api.source import PageSource
    from quark_core.backends.run_summary import RunSummary

_SEVERITIES = ("critical", "error", "warning", "info")
# The last segment of a setting that says how many steps are planned.
_PLANNED = (
    "max_steps",
    "total_steps",
    "num_train_steps",
    "train_steps",
    "num_steps",
    "n_steps",
    "max_iters",
    "num_iterations",
    "total_iterations",
    "steps",
)
_RECENT_STEPS = 50
_LARGEST = 2**53


def describe_standing(
    source: PageSource, desk: AnalysisDesk, summary: RunSummary
) -> dict[str, Any]:
    """Health, worst finding, counts of alerts, phase and progress of one run."""
    analysis = desk.find(summary)
    return {**_describe_analysis(analysis), "progress": describe_progress(source, summary)}


def _describe_analysis(analysis: Analysis | None) -> dict[str, Any]:
    if analysis is None:
        return {"health": None, "worst": None, "alerts": None, "phase": None}
    overall = next((score for score in analysis.scores if score.score_key == "overall"), None)
    counted = Counter(alert.severity for alert in analysis.alerts)
    worst = min(
        analysis.alerts,
        key=lambda alert: _SEVERITIES.index(alert.severity),
        default=None,
    )
    phase = analysis.phases[-1] if analysis.phases else None
    return {
        "health": None
        if overall is None
        else {
            "known": overall.is_known,
            "score": overall.score,
            "status": overall.status,
            "word": overall.word,
            "reason": overall.unknown_reason,
        },
        "worst": None
        if worst is None
        else {
            "id": worst.id,
            "severity": worst.severity,
            "title": worst.title,
            "culprit": worst.culprit,
            "step": worst.step,
        },
        "alerts": {severity: counted[severity] for severity in _SEVERITIES},
        "phase": None if phase is None else {"name": phase.phase_name, "title": phase.display_name},
    }


def describe_progress(source: PageSource, summary: RunSummary) -> dict[str, Any]:
    """How far a run is, how fast, and when it is done, where that is known."""
    planned = _find_planned(summary)
    step = summary.newest_step
    is_live = summary.state == "running"
    step_ms, data_share = _measure_pace(source, summary) if is_live else (None, None)
    if step_ms is None and is_live:
        step_ms = _estimate_step_ms(summary)
    of = planned if planned is not None and step is not None and step <= planned else None
    eta_s = None
    if is_live and of is not None and step is not None and step_ms is not None:
        eta_s = max(0.0, (of - step) * step_ms / 1e3)
    said = summary.stored.progress if is_live else None
    if said is not None and said.remaining_s is not None:
        eta_s = said.remaining_s  # the loop knows better than the metrics do
    return {
        "step": step,
        "of": of,
        "share": None if not of or step is None else step / of,
        "told": None if said is None else said.describe(now_us()),
        "eta_s": eta_s,
        "ms_per_step": step_ms,
        "data_share": data_share,
    }


def _find_planned(summary: RunSummary) -> int | None:
    """How many steps the configuration plans, where a setting says so by its name."""
    from quark_core.search.evaluation import flatten_values

    found: dict[str, int] = {}
    for key, value in flatten_values(summary.config):
        name = key.rpartition(".")[2].lower()
        if name not in _PLANNED or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if 0 < value < _LARGEST and float(value).is_integer():
            found.setdefault(name, int(value))
    return next((found[name] for name in _PLANNED if name in found), None)


def _measure_pace(source: PageSource, summary: RunSummary) -> tuple[float | None, float | None]:
    """Median time of the newest steps, and the share of it that went into data."""
    import numpy as np

    query = Query(limit=_RECENT_STEPS)
    try:
        rows = source.reader.read(summary.run_id, SystemTelemetryRecord.KIND, query)
    except SessionStoreError:
        return None, None
    times = rows["step_time_ms"]
    known = np.isfinite(times) & (times > 0)
    if not known.any():
        return None, None
    data = rows["data_time_ms"][known]
    share = None
    if np.isfinite(data).any():
        share = float(np.nansum(data) / times[known].sum())
    return float(np.median(times[known])), share


def _estimate_step_ms(summary: RunSummary) -> float | None:
    """Time of a step over the whole run so far, resumed runs aside."""
    if summary.last_metric_at is None or not summary.newest_step or summary.stored.run.attempt:
        return None
    began = datetime.fromisoformat(summary.stored.run.created_at)
    newest = min(datetime.fromisoformat(summary.last_metric_at), datetime.now(UTC))
    elapsed_s = (newest - began).total_seconds()
    return elapsed_s * 1e3 / summary.newest_step if elapsed_s > 0 else None
