"""Health scores, and the limit that an interrupted run puts to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import xxhash

from quark.analysis.observations import observe
from quark.analysis.rule import SEVERITIES, Verdict
from quark_core.backends.run_summary import StoredRun
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.findings import (
    LITTLE_SEEN,
    AlertRecord,
    AlertSeverity,
    EvidenceRecord,
    HealthScoreRecord,
    HealthStatus,
)
from quark_core.records.runs import RunEnding

if TYPE_CHECKING:
    from quark.analysis.learning import Learning

CATEGORIES = ("optimization", "representation", "generalization", "runtime")

_PENALTY: Mapping[str, float] = {"info": 2.0, "warning": 15.0, "error": 35.0, "critical": 60.0}
_CAP: Mapping[str, float] = {"info": 100.0, "warning": 80.0, "error": 60.0, "critical": 30.0}
_UNKNOWN = 50.0
_NOTHING = "No problem found."
_NO_NAME = "No check names a fault."
_NO_DATA = "no rule had the data it needs"
_NOT_VALIDATED = "nothing that was held out was measured often enough"
_NOT_LEARNED_CAP = 60.0
_DOUBTED_CAP = _LITTLE_SEEN_CAP = 80.0
_HEALTHY, _WATCH, _DEGRADED = 85.0, 65.0, 35.0


class Standing(msgspec.Struct, frozen=True):
    """What is known of a run beside what rules have found.

    Attributes:
        learning: Whether it has learned.
        asked: How many rules were asked, of how many; None where all were.
    """

    learning: Learning
    asked: tuple[int, int] | None = None


class Coverage(msgspec.Struct, frozen=True):
    """Of one category: which of its rules could look at the run.

    Attributes:
        looked: How many could.
        rules: How many there are.
        without_data: Those that lacked what they need, with what they say of it.
    """

    looked: int
    rules: int
    without_data: Mapping[str, Verdict] = {}


def score_health(
    alerts: Sequence[AlertRecord],
    coverage: Mapping[str, Coverage],
    span: tuple[int, int] | None,
    blank: HealthScoreRecord,
    standing: Standing,
) -> tuple[HealthScoreRecord, ...]:
    """The overall score and one for each category.

    An alert takes points by its severity (2, 15, 35, 60), weighed by its
    confidence and by the share of the run that it lasts; consequences of
    another alert take half. No score is above the cap of its worst alert (100,
    80, 60, 30). The overall score is the mean of the lowest known category and
    the mean of all known ones, and capped likewise.

    That no rule has found anything is not enough: the run must have learned.
    Where its loss, or what the user named, did not get better, neither the
    overall score nor that of the optimization is above 60; where only what was
    held out did not, that of generalization in place of the optimization's.
    Where what is held out ends as NaN or no better than guesses, that of generalization is not
    above 60. Where it is doubtful how well the run has learned, the overall one is not above 80,
    and neither is any where the checks that matter for a run of its kind had no data: where
    nothing was validated, or a model of PyTorch was not watched. Nothing is called healthy then;
    `word` of the records is "no problem found", and the summary names the call that lets more run.

    What nobody could judge is not known: a category of which no rule had its
    data; the optimization and the overall score where nothing says whether the
    run has learned; generalization where nothing held out was measured. Its
    score is 50, its status `watch`, `known` is false, and `unknown_reason`
    says why. What has an alert of a warning or worse is known all the same.

    A note that a documented threshold is crossed takes no points.

    Args:
        alerts: What was found.
        coverage: By category.
        span: First and last step of the run, or None.
        blank: A record that gives identity and time.
        standing: What is known of the run beside the alerts.
    """
    alerts = [alert for alert in alerts if not is_note(alert)]
    out = [_score(name, alerts, coverage[name], span, blank, standing) for name in CATEGORIES]
    known = [item for item in out if item.known]
    serious = [alert for alert in alerts if alert.severity != "info"]
    reason = _find_overall_gap(coverage, standing)
    metadata = {
        "known_categories": [item.score_key for item in known],
        "rules": sum(item.rules for item in coverage.values()),
        "rules_with_data": sum(item.looked for item in coverage.values()),
        "learning": _describe_learning(standing.learning),
    }
    if standing.learning.doubt is None:
        metadata |= _describe_missing(standing.learning)
    ids = tuple(alert.id for alert in serious)
    if reason is not None and not serious:
        return (_make_unknown(blank, "overall", reason, metadata), *out)
    caps = [_CAP[alert.severity] for alert in alerts] + _list_caps("overall", standing)
    scores = [item.score for item in known] or [100.0]
    overall = min([0.5 * (min(scores) + sum(scores) / len(scores)), *caps])
    whole = msgspec.structs.replace(
        blank,
        score_key="overall",
        category="overall",
        score=round(overall, 1),
        status=_rate(overall),
        summary=_summarize(alerts, known, coverage, standing),
        evidence=(*_observe_learning(standing.learning), *(
            observe("score", item.score_key, item.summary, item.score, _HEALTHY) for item in known
        )),
        contributing_alert_ids=ids,
        metadata=JsonObject(metadata),
    )  # fmt: skip
    return (whole, *out)


def cap_score(score: HealthScoreRecord, alert: AlertRecord) -> HealthScoreRecord:
    """The score with one alert more, which says why it is no higher.

    A score that is not known stays so where the alert is no worse than a warning.
    """
    if not score.known and alert.severity in ("info", "warning"):
        return score
    cap = _CAP[alert.severity]
    points = min(score.score, cap) if score.known else cap
    return msgspec.structs.replace(
        score,
        score=points,
        status=_rate(points),
        summary=f"{alert.fact} {score.summary.removeprefix(_NOTHING).lstrip()}".rstrip(),
        contributing_alert_ids=(alert.id, *score.contributing_alert_ids),
        known=True,
        unknown_reason=None,
    )


def is_note(alert: AlertRecord) -> bool:
    """Whether an alert only says that a documented threshold is crossed."""
    metadata: Mapping[str, Any] = alert.metadata or {}
    return metadata.get("documented_level") is not None


def _find_overall_gap(coverage: Mapping[str, Coverage], standing: Standing) -> str | None:
    """Why nothing can be said of the whole run, or None."""
    looked = sum(item.looked for item in coverage.values())
    if standing.learning.state == "unknown":
        return standing.learning.reason
    if standing.asked is not None:
        return f"only {standing.asked[0]} of {standing.asked[1]} rules were asked"
    if not looked:
        return _NO_DATA
    return None


def _list_caps(category: str, standing: Standing) -> list[float]:
    caps = []
    learning = standing.learning
    failing = _find_failing(learning)
    if failing is not None and category in ("overall", failing):
        caps.append(_NOT_LEARNED_CAP)
    if category == "generalization" and learning.held_out_fault is not None:
        caps.append(_NOT_LEARNED_CAP)
    if learning.missing is not None:
        caps.append(_LITTLE_SEEN_CAP)
    if category in ("overall", "generalization") and learning.doubt is not None:
        caps.append(_DOUBTED_CAP)
    return caps


def _find_failing(learning: Learning) -> str | None:
    """The category in which a run that did not learn has failed, or None."""
    if learning.state != "not_learned":
        return None
    return "generalization" if learning.fails_held_out else "optimization"


def _summarize(
    alerts: Sequence[AlertRecord],
    known: Sequence[HealthScoreRecord],
    coverage: Mapping[str, Coverage],
    standing: Standing,
) -> str:
    learning = standing.learning
    looked = sum(item.looked for item in coverage.values())
    rules = sum(item.rules for item in coverage.values())
    words = [f"{looked} of {rules} checks ran"]
    if learning.missing is not None:
        words.append(f"{learning.missing} lets more run")
    words += [f"{item.score_key} {item.score:.0f}" for item in known]
    missing = [name for name in CATEGORIES if name not in [item.score_key for item in known]]
    if missing:
        words.append(f"not known: {', '.join(missing)}")
    if not learning.is_validated:
        words.append("it was never validated")
    reasons = [learning.reason] if learning.doubt is None else [learning.reason, learning.doubt]
    is_doubtful = learning.state == "not_learned" or learning.doubt is not None
    head = _say_worst(alerts, _NO_NAME) if is_doubtful else _say_worst(alerts)
    return f"{head} {'; '.join((*reasons, *words))}."


def _describe_missing(learning: Learning) -> dict[str, Any]:
    return {} if learning.missing is None else {LITTLE_SEEN: learning.missing}


def _observe_learning(learning: Learning) -> tuple[EvidenceRecord, ...]:
    if learning.metric is None or learning.start is None or learning.end is None:
        return ()
    return (observe("metric", learning.metric, learning.reason, learning.end, learning.start),)


def _describe_learning(learning: Learning) -> dict[str, Any]:
    """Which metric was judged and what came out, as JSON."""
    return {
        "state": learning.state,
        "metric": learning.metric,
        "mode": learning.mode,
        "named": learning.named,
        "start": learning.start,
        "end": learning.end,
        "reason": learning.reason,
        "validated": learning.is_validated,
        "doubt": learning.doubt,
        "never_logged": learning.never_logged,
    }


def _make_unknown(
    blank: HealthScoreRecord, key: str, reason: str, metadata: Mapping[str, Any]
) -> HealthScoreRecord:
    return msgspec.structs.replace(
        blank,
        score_key=key,
        category=key,
        score=_UNKNOWN,
        status="watch",
        summary=f"Not known: {reason}.",
        metadata=JsonObject(metadata),
        known=False,
        unknown_reason=reason,
    )


def _find_gap(category: str, coverage: Coverage, standing: Standing) -> str | None:
    """Why nothing can be said of a category, or None."""
    if not coverage.looked:
        return _NO_DATA
    learning = standing.learning
    if category == "optimization" and learning.state == "unknown":
        return learning.reason
    if category == "generalization" and not learning.is_validated:
        return _NOT_VALIDATED
    return None


def _score(
    category: str,
    alerts: Sequence[AlertRecord],
    coverage: Coverage,
    span: tuple[int, int] | None,
    blank: HealthScoreRecord,
    standing: Standing,
) -> HealthScoreRecord:
    own = [alert for alert in alerts if alert.category == category]
    unseen = {
        rule_id: {"reason": verdict.reason, "data": list(verdict.missing)}
        for rule_id, verdict in coverage.without_data.items()
    }
    metadata = JsonObject(
        {
            "rules": coverage.rules,
            "rules_with_data": coverage.looked,
            "rules_without_data": unseen,
            **_describe_missing(standing.learning),
        }
    )
    gap = _find_gap(category, coverage, standing)
    if gap is not None and all(alert.severity == "info" for alert in own):
        return _make_unknown(blank, category, gap, metadata)
    score = 100.0
    for alert in own:
        score -= _PENALTY[alert.severity] * _weigh(alert, span)
    caps = [_CAP[alert.severity] for alert in own] + _list_caps(category, standing)
    score = max(0.0, min([score, *caps]))
    evidence: list[EvidenceRecord] = [
        observe("alert", alert.rule_id, alert.fact, start=alert.step) for alert in own[:5]
    ]
    if not own:
        evidence.append(
            observe("rules", category, f"{coverage.looked} of {coverage.rules} checks ran and "
                    "found no problem", float(coverage.looked), float(coverage.rules))
        )  # fmt: skip
    summary = _say_worst(own)
    if not own and category == _find_failing(standing.learning):
        summary = f"{_NO_NAME[:-1]}, but {standing.learning.reason}."
    elif not own and category == "generalization":
        reason = standing.learning.held_out_fault or standing.learning.doubt
        summary = summary if reason is None else f"{_NO_NAME[:-1]}, but {reason}."
    return msgspec.structs.replace(
        blank,
        score_key=category,
        category=category,
        score=round(score, 1),
        status=_rate(score),
        summary=summary,
        evidence=tuple(evidence),
        contributing_alert_ids=tuple(alert.id for alert in own if alert.severity != "info"),
        metadata=metadata,
    )


def _weigh(alert: AlertRecord, span: tuple[int, int] | None) -> float:
    metadata: Mapping[str, Any] = alert.metadata or {}
    weight = float(metadata.get("confidence", 1.0))
    if metadata.get("caused_by"):
        weight *= 0.5
    if span is not None and alert.step is not None and span[1] > span[0]:
        last = metadata.get("step_end") or span[1]
        share = min(1.0, max(0.0, (last - alert.step) / (span[1] - span[0])))
        weight *= 0.5 + 0.5 * share
    return weight


def _rate(score: float) -> HealthStatus:
    if score >= _HEALTHY:
        return "healthy"
    if score >= _WATCH:
        return "watch"
    return "degraded" if score >= _DEGRADED else "critical"


def _say_worst(alerts: Sequence[AlertRecord], otherwise: str = _NOTHING) -> str:
    if not alerts:
        return otherwise
    worst = max(alerts, key=lambda alert: SEVERITIES.index(alert.severity))
    count = len(alerts)
    more = "" if count == 1 else f" and {count - 1} more"
    return f"{worst.title} ({worst.severity}){more}."


# That a run broke off, as every analysis of it says: before all else, and health is capped.
#
# It is no rule: nobody can leave it out. An analysis that was stored while the run went on is told
# the end when it is read.

BROKEN_OFF = "broken_off"
"""What stands for a rule's id in the alert."""

_VERBS = {
    "completed": "completed",
    "failed": "failed",
    "interrupted": "was interrupted",
    "lost": "was lost",
}
_CATEGORY = "runtime"
_END = "end"  # of the alert's metadata: the end that it tells
_LAST_LINES = "`quark logs {run_id} --events` prints its last events."
_CHECKS = {
    "exception": "`quark logs {run_id} --events` prints the traceback.",
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


def count_severities(alerts: Sequence[AlertRecord]) -> list[str]:
    """How many alerts there are of each severity, the worst first: `1 critical`, `3 warning`."""
    found = [alert.severity for alert in alerts]
    return [f"{found.count(name)} {name}" for name in reversed(SEVERITIES) if name in found]


def place_alert(alert: AlertRecord) -> tuple[bool, int]:
    """Orders alerts: that the run broke off, then the worst."""
    rank = SEVERITIES.index(alert.severity) if alert.severity in SEVERITIES else 0
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
        "Its records end early, so its result is not that of a complete run.",
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


def order_alerts(alerts: Sequence[AlertRecord]) -> Iterator[tuple[AlertRecord, int]]:
    """The worst first, but each consequence after its cause, with its depth below it."""
    by_id = {alert.id: alert for alert in alerts}
    below: dict[str | None, list[AlertRecord]] = {}
    for alert in alerts:
        cause = dict(alert.metadata or {}).get("caused_by")
        below.setdefault(cause if cause in by_id else None, []).append(alert)
    place = {alert.id: index for index, alert in enumerate(alerts)}
    done: set[str] = set()

    def rank(alert: AlertRecord, seen: frozenset[str] = frozenset()) -> int:
        """Place of the worst of an alert and what follows from it."""
        seen |= {alert.id}
        following = (item for item in below.get(alert.id, ()) if item.id not in seen)
        return min([place[alert.id], *(rank(item, seen) for item in following)])

    def walk(items: Sequence[AlertRecord], depth: int) -> Iterator[tuple[AlertRecord, int]]:
        for alert in sorted(items, key=rank):
            if alert.id not in done:
                done.add(alert.id)
                yield alert, depth
                yield from walk(below.get(alert.id, ()), depth + 1)

    yield from walk(below.get(None, ()), 0)
    # Causes that lead back to each other have no beginning; a third party's rule may make such.
    yield from walk(alerts, 0)
