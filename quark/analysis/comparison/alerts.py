"""Alerts and health scores of two sides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from quark.analysis.comparison.results import (
    AlertDiff,
    AlertMatch,
    AlertSighting,
    HealthScoreDiff,
)
from quark.analysis.histories import strip_prefixes
from quark_core.records import AlertRecord, HealthScoreRecord

_SEVERITIES = ("info", "warning", "error", "critical")
_SCORES = ("overall", "optimization", "representation", "generalization", "runtime")

_Key = tuple[str, str | None]


def compare_alerts(
    primary: Sequence[Sequence[AlertRecord]],
    reference: Sequence[Sequence[AlertRecord]],
    window_steps: float,
) -> AlertDiff:
    """Match alerts by rule, culprit and step; each side is a list of runs.

    Two alerts of one rule and culprit are the same where they begin at most
    `window_steps` apart; the closest are matched first. One without a step
    matches any.
    """
    sides = (_sight(primary, window_steps), _sight(reference, window_steps))
    pairs = sorted(
        (
            (distance, i, j)
            for i, one in enumerate(sides[0])
            for j, two in enumerate(sides[1])
            if _key(one) == _key(two)
            and (distance := _measure_distance(one.step, two.step)) <= window_steps
        ),
    )
    matched: dict[int, int] = {}
    for _, i, j in pairs:
        if i not in matched and j not in matched.values():
            matched[i] = j
    return AlertDiff(
        primary_only=tuple(a for i, a in enumerate(sides[0]) if i not in matched),
        reference_only=tuple(a for j, a in enumerate(sides[1]) if j not in set(matched.values())),
        shared=tuple(_match(sides[0][i], sides[1][j]) for i, j in sorted(matched.items())),
        primary_count=sum(map(len, primary)),
        reference_count=sum(map(len, reference)),
        window_steps=window_steps,
    )


def compare_health_scores(
    primary: Sequence[Sequence[HealthScoreRecord]],
    reference: Sequence[Sequence[HealthScoreRecord]],
) -> tuple[HealthScoreDiff, ...]:
    """The scores that either side has, overall first; None where a side's is not known."""
    sides = [
        [{record.score_key: record.score for record in run if record.is_known} for run in side]
        for side in (primary, reference)
    ]
    keys = {record.score_key for side in (primary, reference) for run in side for record in run}
    order = [key for key in _SCORES if key in keys] + sorted(keys - set(_SCORES))
    out = []
    for key in order:
        known = [[run[key] for run in side if key in run] for side in sides]
        one, two = (float(statistics.median(side)) if side else None for side in known)
        difference = None if one is None or two is None else one - two
        out.append(HealthScoreDiff(key, one, two, difference))
    return tuple(out)


def _sight(runs: Sequence[Sequence[AlertRecord]], window_steps: float) -> list[AlertSighting]:
    """The alerts of a side, those of several runs that are the same put together."""
    groups: list[list[tuple[int, AlertRecord]]] = []
    ordered = sorted(
        ((index, record) for index, run in enumerate(runs) for record in run),
        key=lambda item: (_record_key(item[1]), _step_of(item[1]), item[0]),
    )
    for index, record in ordered:
        last = groups[-1] if groups else None
        if (
            last is not None
            and _record_key(last[0][1]) == _record_key(record)
            and all(other != index for other, _ in last)
            and _measure_distance(last[0][1].step, record.step) <= window_steps
        ):
            last.append((index, record))
        else:
            groups.append([(index, record)])
    found = [_make_sighting(group) for group in groups]
    return sorted(found, key=lambda a: (-1.0 if a.step is None else a.step, *_sortable(_key(a))))


def _make_sighting(group: Sequence[tuple[int, AlertRecord]]) -> AlertSighting:
    worst = max((record for _, record in group), key=lambda record: _rank(record.severity))
    steps = [record.step for _, record in group if record.step is not None]
    rule_id, culprit = _record_key(worst)
    return AlertSighting(
        rule_id,
        culprit or None,
        worst.category,
        worst.severity,
        worst.title,
        float(statistics.median(steps)) if steps else None,
        len(group),
    )


def _match(primary: AlertSighting, reference: AlertSighting) -> AlertMatch:
    known = primary.step is not None and reference.step is not None
    change = _rank(primary.severity) - _rank(reference.severity)
    return AlertMatch(
        primary,
        reference,
        (primary.step or 0.0) - (reference.step or 0.0) if known else None,
        "worse" if change > 0 else "milder" if change < 0 else "same",
    )


def _key(sighting: AlertSighting) -> _Key:
    return sighting.rule_id, sighting.culprit


def _record_key(record: AlertRecord) -> tuple[str, str]:
    return record.rule_id, strip_prefixes(record.culprit or "")


def _sortable(key: _Key) -> tuple[str, str]:
    return key[0], key[1] or ""


def _step_of(record: AlertRecord) -> int:
    return -1 if record.step is None else record.step


def _measure_distance(one: float | None, two: float | None) -> float:
    return 0.0 if one is None or two is None else abs(one - two)


def _rank(severity: str) -> int:
    return _SEVERITIES.index(severity) if severity in _SEVERITIES else -1
