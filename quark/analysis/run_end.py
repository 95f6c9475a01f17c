"""That a run broke off, as every analysis of it says: before all else, and health is capped.

It is no rule: nobody can leave it out. An analysis that was stored while the run went on is told
the end when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, get_args

import msgspec
import xxhash

from quark.analysis.health import cap_score
from quark_core.backends.contract import StoredRun
from quark_core.records import AlertRecord, EvidenceRecord, HealthScoreRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.findings import AlertSeverity
from quark_core.records.runs import RunEnding

BROKEN_OFF = "broken_off"
"""What stands for a rule's id in the alert."""

_VERBS = {
    "completed": "completed",
    "failed": "failed",
    "interrupted": "was interrupted",
    "lost": "was lost",
}
_SEVERITIES: tuple[str, ...] = get_args(AlertSeverity)
_CATEGORY = "runtime"
_END = "end"  # of the alert's metadata: the end that it tells
_LAST_LINES = "quark logs {run_id} --events prints what it said last."
_CHECKS = {
    "exception": "quark logs {run_id} --events prints the traceback.",
    "out_of_memory": f"Use smaller batches, or give the job more memory. {_LAST_LINES}",
    "preempted": "Resume it, where it has kept a checkpoint.",
    "stop_request": "Resume it, or judge it by what it has up to here.",
}
_ASKED_FOR = _CHECKS["stop_request"]


def has_result(stored: StoredRun) -> bool:
    """Whether the last values of a run are a result: it completed, goes on, or was stopped."""
    asked = stored.ending is not None and stored.ending.was_asked_for
    return asked or not stored.is_broken_off


class _Ended(Protocol):
    """A run of which it is known how it ended."""

    @property
    def state(self) -> str:
        """Its status, or lost."""

    @property
    def ending(self) -> RunEnding | None:
        """Why it ended, where that is known."""


def say_end(run: _Ended, subject: str, last_step: int | None = None) -> str:
    """How a run ended as a sentence without its dot: `the run failed: OSError: disk full`.

    Args:
        run: The run.
        subject: What the sentence calls it.
        last_step: Its last step, to be told too, or None.
    """
    said = f"{subject} {_VERBS.get(run.state, 'is still running')}"
    if last_step is not None:
        said += f" {'at' if run.state == 'running' else 'after'} step {last_step}"
    if run.state in ("running", "completed"):
        return said
    return f"{said}: {run.ending.describe()}" if run.ending else f"{said}; why is not recorded"


def tell_end(
    stored: StoredRun,
    alerts: Sequence[AlertRecord],
    scores: Sequence[HealthScoreRecord],
    last_step: int | None,
) -> tuple[tuple[AlertRecord, ...], tuple[HealthScoreRecord, ...]]:
    """What an analysis has found, with the end of the run where it broke off.

    Args:
        stored: The run.
        alerts, scores: What was found.
        last_step: The last step of the run, or None.
    """
    is_told = any(alert.rule_id == BROKEN_OFF for alert in alerts)
    if not stored.is_broken_off or is_told:
        return tuple(alerts), tuple(scores)
    time_us = max((record.time_us for record in (*alerts, *scores)), default=0)
    end = _describe(stored, last_step, time_us)
    told = tuple(
        msgspec.structs.replace(alert, sequence=number)
        for number, alert in enumerate((end, *alerts))
    )
    return told, tuple(
        cap_score(score, end) if score.score_key in ("overall", _CATEGORY) else score
        for score in scores
    )


def is_of_another_end(stored: StoredRun, alerts: Sequence[AlertRecord]) -> bool:
    """Whether alerts tell an end that the run has not: it was resumed since."""
    end = stored.describe_end() if stored.is_broken_off else None
    told: list[Any] = [alert.metadata or {} for alert in alerts if alert.rule_id == BROKEN_OFF]
    return any(metadata.get(_END) != end for metadata in told)


def place_alert(alert: AlertRecord) -> tuple[bool, int]:
    """Orders alerts: that the run broke off, then the worst."""
    rank = _SEVERITIES.index(alert.severity) if alert.severity in _SEVERITIES else 0
    return alert.rule_id != BROKEN_OFF, -rank


def _describe(stored: StoredRun, last_step: int | None, time_us: int) -> AlertRecord:
    run_id, ending = str(stored.run.id), stored.ending
    title, said = f"The run {_VERBS[stored.state]}", f"{say_end(stored, 'The run', last_step)}."
    check = _LAST_LINES if ending is None else _CHECKS.get(ending.cause, _LAST_LINES)
    if ending is not None and ending.was_asked_for:
        check = _ASKED_FOR
    return AlertRecord(
        run_id, "", 0, 0, 0, time_us,
        BROKEN_OFF, _CATEGORY, _grade(stored), title, said, said,
        "What it has recorded is of the part before: its result is not that of a whole training.",
        last_step, None, None, check.format(run_id=run_id),
        (EvidenceRecord("run", "status", stored.state, step_start=last_step),),
        JsonObject({"confidence": 1.0, _END: stored.describe_end()}),
        f"alert-{xxhash.xxh3_128_hexdigest(repr((run_id, BROKEN_OFF, last_step)).encode())[:24]}",
    )  # fmt: skip


def _grade(stored: StoredRun) -> AlertSeverity:
    ending = stored.ending
    if ending is not None and ending.was_asked_for:
        return "warning"
    if stored.state in ("failed", "lost"):
        return "critical"
    return "error" if ending is None or ending.cause == "preempted" else "critical"
