"""Runs the rules over one run and makes records of what they find; stores nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import xxhash

from quark_core.analysis.analyzer_config import AnalyzerEngineConfig
from quark_core.analysis.case import Case
from quark_core.analysis.causes import link_causes
from quark_core.analysis.health import CATEGORIES, Coverage, score_health
from quark_core.analysis.rule import SEVERITIES, Finding, Rule, Verdict
from quark_core.analysis.rules.registry import DOCUMENTED_RULES, choose_rules
from quark_core.analysis.run_data import RunData
from quark_core.analysis.verdict_checks import check_verdict
from quark_core.analysis_records import AlertRecord, HealthScoreRecord
from quark_core.json_object import JsonObject

__all__ = ["AnalyzerResult", "analyze_run", "make_alert_id"]

_log = logging.getLogger("quark")

_LEAST_POINTS = 10
_LEAST_PROBES = 3


@dataclass(frozen=True, kw_only=True)
class AnalyzerResult:
    """What an analysis found.

    Attributes:
        run_id: The run.
        alerts: The worst first, then by first step.
        health_scores: `overall`, then one for each category.
        verdicts: What each rule said, by its id; also of the quiet ones.
        generation: Number under which it is stored, or None.
        stored: Whether it is.
        refusal: Why it is not, or None.
    """

    run_id: str
    alerts: tuple[AlertRecord, ...]
    health_scores: tuple[HealthScoreRecord, ...]
    verdicts: Mapping[str, Verdict]
    generation: int | None = None
    stored: bool = False
    refusal: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "run_id": self.run_id,
            "generation": self.generation,
            "stored": self.stored,
            "refusal": self.refusal,
            "alerts": [alert.to_dict() for alert in self.alerts],
            "health_scores": [score.to_dict() for score in self.health_scores],
            "rules": {
                rule_id: {
                    "state": verdict.state,
                    "reason": verdict.reason or None,
                    "missing": list(verdict.missing),
                    "observed": verdict.observed,
                    "threshold": verdict.threshold,
                }
                for rule_id, verdict in self.verdicts.items()
            },
        }


def analyze_run(
    run: RunData, config: AnalyzerEngineConfig | None = None, *, place: int = 0
) -> AnalyzerResult:
    """Analyze a run in memory; the same records always give the same result.

    Args:
        run: Its data.
        config: Settings.
        place: Which generation it is among those that readers will see together.

    Raises:
        SchemaValidationError: The settings name a rule that there is not.
    """
    config = config or AnalyzerEngineConfig()
    rules = choose_rules(config.rules, config.excluded_rules)
    if config.mode == "absolute":
        rules = tuple(rule for rule in rules if rule.rule_id in DOCUMENTED_RULES)
    case = Case(run, config)
    # Figures may be anything that a run logs: what overflows or is 0/0 is part of the judgement.
    with np.errstate(all="ignore"):
        verdicts = {rule.rule_id: _ask(rule, case) for rule in rules}
    found = [
        (rule.rule_id, finding) for rule in rules for finding in verdicts[rule.rule_id].findings
    ]
    categories = {rule.rule_id: rule.category for rule in rules}
    alerts = _make_alerts(found, categories, run, place)
    # That nothing is wrong with the first few points says nothing of the training.
    telling = ("fired", "quiet") if _has_history(run) else ("fired",)
    coverage = {
        category: Coverage(
            sum(
                verdicts[rule.rule_id].state in telling
                for rule in rules
                if rule.category == category
            ),
            sum(rule.category == category for rule in rules),
        )
        for category in CATEGORIES
    }
    last = run.last_step
    blank = HealthScoreRecord(
        run.run_id, "", 0, 0, 0, run.newest_us, "overall", "overall", 0.0, "watch"
    )
    span = None if last is None else (0, last)
    return AnalyzerResult(
        run_id=run.run_id,
        alerts=alerts,
        health_scores=score_health(alerts, coverage, span, blank),
        verdicts=verdicts,
    )


def _has_history(run: RunData) -> bool:
    counts = (
        *(len(curve) for curve in run.metrics.values()),
        run.batches.count,
        run.telemetry.count,
    )
    return max(counts) >= _LEAST_POINTS or len(run.probe_steps) >= _LEAST_PROBES


def make_alert_id(run_id: str, place: int, rule_id: str, finding: Finding, again: int = 0) -> str:
    """Hash of the run, the generation's place, rule, culprit and first step.

    Args:
        again: How many findings of the rule at this culprit and step come before it.
    """
    parts: tuple[Any, ...] = (
        run_id, place, rule_id, finding.culprit, finding.step, finding.epoch,
    )  # fmt: skip
    if finding.is_hard_limit:
        parts = (*parts, "limit")
    text = repr((*parts, again) if again else parts)
    return f"alert-{xxhash.xxh3_128_hexdigest(text.encode())[:24]}"


def _ask(rule: Rule, case: Case) -> Verdict:
    try:
        verdict = check_verdict(rule.check(case))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one rule must not silence the others
        _log.warning("rule %s failed on run %s", rule.rule_id, case.run.run_id, exc_info=True)
        reason = f"the rule failed: {type(error).__name__}: {error}"
        return Verdict(reason=reason, missing=("a rule that works on this run",))
    if case.config.mode == "absolute":
        limits = tuple(finding for finding in verdict.findings if finding.is_hard_limit)
        reason = verdict.reason or "no documented threshold is reached"
        return replace(verdict, findings=limits, reason=reason)
    return verdict


def _make_alerts(
    found: Sequence[tuple[str, Finding]],
    categories: Mapping[str, str],
    run: RunData,
    place: int,
) -> tuple[AlertRecord, ...]:
    tolerance = max(1, round(0.05 * (run.last_step or 0)))
    links = link_causes(found, tolerance)
    ids: list[str] = []
    seen: Counter[str] = Counter()
    for rule_id, finding in found:
        alert_id = make_alert_id(run.run_id, place, rule_id, finding)
        ids.append(make_alert_id(run.run_id, place, rule_id, finding, seen[alert_id]))
        seen[alert_id] += 1
    made = []
    for index, (rule_id, finding) in enumerate(found):
        metadata: dict[str, Any] = {"confidence": finding.confidence}
        if finding.step_end is not None:
            metadata["step_end"] = finding.step_end
        if finding.affected:
            metadata["affected"] = list(finding.affected)
        if index in links:
            metadata["caused_by"] = ids[links[index]]
        follows = [ids[effect] for effect, cause in links.items() if cause == index]
        if follows:
            metadata["consequences"] = follows
        if finding.is_hard_limit:
            metadata["hard_limit"] = True
        at = f" at {finding.culprit}" if finding.culprit else ""
        since = "" if finding.step is None else f" from step {finding.step} on"
        made.append(
            AlertRecord(
                run.run_id, "", 0, 0, 0, run.newest_us,
                rule_id, categories[rule_id], finding.severity, finding.title,
                f"{finding.title}{at}{since}.", finding.fact, finding.inference,
                finding.step, finding.epoch, finding.culprit, finding.suggested_check,
                finding.evidence, JsonObject(metadata), ids[index],
            )
        )  # fmt: skip
    made.sort(key=lambda alert: (
        -SEVERITIES.index(alert.severity),
        "caused_by" in (alert.metadata or {}),
        -1 if alert.step is None else alert.step,
    ))  # fmt: skip
    return tuple(
        msgspec.structs.replace(alert, sequence=number) for number, alert in enumerate(made)
    )
