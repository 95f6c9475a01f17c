"""AnalyzerEngine: runs the rules over a run, and stores and reads alerts and health scores."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite, isnan
from typing import Any, Literal, NoReturn, get_args

import msgspec
import numpy as np
import xxhash

from quark.analysis.analysis_context import Case
from quark.analysis.baseline import HealthyBaseline, is_alike
from quark.analysis.causes import explain_finding
from quark.analysis.config import AnalyzerEngineConfig, check_config
from quark.analysis.evidence import place_evidence, place_findings
from quark.analysis.health import CATEGORIES, Coverage, Standing, score_health, tell_end
from quark.analysis.learning import is_sound, judge_learning
from quark.analysis.outputs import AnalysisTarget, identify, open_analysis
from quark.analysis.rule import SEVERITIES, Finding, Rule, Verdict
from quark.analysis.rules.registry import DOCUMENTED_RULES, choose_rules, list_rules
from quark.analysis.run_data import RunData
from quark_core.errors import SchemaValidationError
from quark_core.presentation import bundle, note_runs, paint
from quark_core.records.checks import check_choice
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.findings import (
    AlertCategory,
    AlertRecord,
    AlertSeverity,
    EvidenceRecord,
    HealthScoreKey,
    HealthScoreRecord,
)
from quark_core.records.query import Query, check_index

# Runs the rules over one run and makes records of what they find; stores nothing.
#
# What a rule answers is checked and made plain, as a rule may be of anyone: an
# alert is stored, sent and shown as JSON, so a figure that is NaN, or a number of
# numpy's, must not come so far. Then findings are linked: one cause has many
# symptoms.

_log = logging.getLogger("quark")

_LEAST_POINTS = 10
_LEAST_PROBES = 3


@dataclass(frozen=True, kw_only=True)
class AnalyzerResult:
    """Result of an analysis.

    Attributes:
        run_id: ID of the run.
        alerts: Alerts: an interruption of the run first, then by severity, then by first step.
        health_scores: `overall`, then one score per category.
        verdicts: Rule ID -> verdict, including rules that did not fire.
        findings: Alert ID -> structured data behind an alert.
        generation: Number under which the result is stored, or None.
        stored: Whether the result is stored.
        refusal: Reason why it is not stored, or None.
    """

    run_id: str
    alerts: tuple[AlertRecord, ...]
    health_scores: tuple[HealthScoreRecord, ...]
    verdicts: Mapping[str, Verdict]
    findings: Mapping[str, Finding] = field(default_factory=dict)
    generation: int | None = None
    stored: bool = False
    refusal: str | None = None

    def __repr__(self) -> str:
        severities = [alert.severity for alert in self.alerts]
        worst = f", the worst {max(severities, key=SEVERITIES.index)}" if severities else ""
        overall = self.health_scores[0] if self.health_scores else None
        health = f"{overall.score:.0f}" if overall is not None and overall.is_known else "not known"
        return f"AnalyzerResult({self.run_id}: {len(self.alerts)} alerts{worst}, health {health})"

    def _repr_html_(self) -> str | None:
        return paint(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a new dict of JSON values."""
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
    run: RunData,
    config: AnalyzerEngineConfig | None = None,
    *,
    place: int = 0,
    baseline: Rule | None = None,
) -> AnalyzerResult:
    """Analyze a run in memory; the same records always give the same result.

    Args:
        run: Its data.
        config: Settings.
        place: Which generation it is among those that readers will see together.
        baseline: What holds it against healthy runs, besides the rules.

    Raises:
        SchemaValidationError: The settings name a rule that there is not.
    """
    config = config or AnalyzerEngineConfig()
    rules = choose_rules(config.rules, config.excluded_rules)
    everyone = list_rules()
    if config.mode == "absolute":
        rules, everyone = (
            tuple(rule for rule in each if rule.rule_id in DOCUMENTED_RULES)
            for each in (rules, everyone)
        )
    asked = None
    if config.rules is not None and len(rules) < len(everyone):
        asked = (len(rules), len(everyone))
    if baseline is not None and config.mode != "absolute":
        rules = (*rules, baseline)
    case = Case(run, config)
    # Figures may be anything that a run logs: what overflows or is 0/0 is part of the judgement.
    with np.errstate(all="ignore"):
        verdicts = {rule.rule_id: _ask(rule, case) for rule in rules}
        learning = judge_learning(case)
    found = [
        (rule.rule_id, finding) for rule in rules for finding in verdicts[rule.rule_id].findings
    ]
    categories = {rule.rule_id: rule.category for rule in rules}
    tolerance = max(1, round(0.05 * (run.last_step or 0)))
    links = _link_causes(found, tolerance)
    found = _explain(_grade_by_cause(found, links), links, case)
    ids = _make_ids(found, run.run_id, place)
    alerts = _make_alerts(found, links, categories, run, ids)
    # That nothing is wrong with the first few points says nothing of the training.
    telling = ("fired", "quiet") if _has_history(run) else ("fired",)
    coverage = {}
    for category in CATEGORIES:
        own = {id_: verdicts[id_] for id_, its in categories.items() if its == category}
        coverage[category] = Coverage(
            looked=sum(verdict.state in telling for verdict in own.values()),
            rules=len(own),
            without_data={
                id_: verdict for id_, verdict in own.items() if verdict.state == "no_data"
            },
        )
    last = run.last_step
    blank = HealthScoreRecord(
        run.run_id, "", 0, 0, 0, run.newest_us, "overall", "overall", 0.0, "watch"
    )
    span = None if last is None else (0, last)
    standing = Standing(learning, asked)
    scores = place_findings(score_health(alerts, coverage, span, blank, standing), run)
    if run.stored is not None:
        alerts, scores = tell_end(run.stored, alerts, scores, run.last_step)
    return AnalyzerResult(
        run_id=run.run_id,
        alerts=alerts,
        health_scores=scores,
        verdicts=verdicts,
        findings={name: finding for name, (_, finding) in zip(ids, found, strict=True)},
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
        verdict = _check_verdict(rule.check(case))
    except MemoryError:
        # The run's records are read by whichever rule needs them first: nor would the others work.
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one rule must not silence the others
        _log.warning("rule %s failed on run %s", rule.rule_id, case.run.run_id, exc_info=True)
        reason = f"the rule failed: {type(error).__name__}: {error}"
        return Verdict(reason=reason, missing=("a rule that works on this run",))
    if case.config.mode == "absolute":
        limits = tuple(finding for finding in verdict.findings if finding.is_hard_limit)
        reason = verdict.reason or "no documented threshold is reached"
        return replace(verdict, findings=limits, reason=reason)
    return verdict


def _make_ids(found: Sequence[tuple[str, Finding]], run_id: str, place: int) -> list[str]:
    ids: list[str] = []
    seen: Counter[str] = Counter()
    for rule_id, finding in found:
        alert_id = make_alert_id(run_id, place, rule_id, finding)
        ids.append(make_alert_id(run_id, place, rule_id, finding, seen[alert_id]))
        seen[alert_id] += 1
    return ids


def _make_alerts(
    found: Sequence[tuple[str, Finding]],
    links: Mapping[int, int],
    categories: Mapping[str, str],
    run: RunData,
    ids: Sequence[str],
) -> tuple[AlertRecord, ...]:
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
        if finding.causes:
            metadata["causes"] = list(finding.causes)
        if finding.documented_level is not None:
            metadata["documented_level"] = finding.documented_level
        elif finding.is_hard_limit:
            metadata["hard_limit"] = True
        at = f" at {finding.culprit}" if finding.culprit else ""
        since = "" if finding.step is None else f" from step {finding.step} on"
        made.append(
            AlertRecord(
                run.run_id, "", 0, 0, 0, run.newest_us,
                rule_id, categories[rule_id], finding.severity, str(finding.title),
                f"{finding.title}{at}{since}.", str(finding.fact), str(finding.inference),
                finding.step, finding.epoch, finding.culprit, str(finding.suggested_check),
                _place(finding, run), JsonObject(metadata), ids[index],
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


def _place(finding: Finding, run: RunData) -> tuple[EvidenceRecord, ...]:
    """The evidence as it is stored: each piece says which records show it."""
    texts = (finding.fact, finding.inference, finding.title)
    return tuple(place_evidence(piece, run, texts) for piece in finding.evidence)


def _check_verdict(answer: object) -> Verdict:
    """The verdict with plain numbers and tuples; a figure that is not finite becomes None.

    Raises:
        TypeError: It is no verdict, or a part of it is of another type; the message names it.
        ValueError: An unknown severity, a confidence that is NaN, or a text
            that UTF-8 cannot hold.
        SchemaValidationError: A step or an epoch that is no non-negative 64-bit integer.
    """
    if not isinstance(answer, Verdict):
        raise TypeError(f"check() must return a Verdict, not {type(answer).__name__}")
    return Verdict(
        findings=tuple(_check_finding(item) for item in _list(answer.findings, "findings")),
        reason=_check_text(answer.reason, "reason"),
        missing=_check_texts(answer.missing, "missing"),
        observed=_check_figure(answer.observed, "observed"),
        threshold=_check_figure(answer.threshold, "threshold"),
    )


def _check_finding(item: object) -> Finding:
    if not isinstance(item, Finding):
        raise TypeError(f"findings must contain Finding objects, not {type(item).__name__}")
    if item.severity not in SEVERITIES:
        raise ValueError(
            f"severity must be one of {', '.join(map(repr, SEVERITIES))}, got {item.severity!r}"
        )
    if isnan(item.confidence):
        raise ValueError("confidence must be between 0 and 1, got NaN")
    for name in ("title", "fact", "inference", "suggested_check"):
        _check_text(getattr(item, name), name)
    return replace(
        item,
        culprit=None if item.culprit is None else _check_text(item.culprit, "culprit"),
        evidence=tuple(_check_evidence(piece) for piece in _list(item.evidence, "evidence")),
        step=check_index(item.step, "step"),
        step_end=check_index(item.step_end, "step_end"),
        epoch=check_index(item.epoch, "epoch"),
        confidence=min(1.0, max(0.0, float(item.confidence))),
        affected=_check_texts(item.affected, "affected"),
        is_hard_limit=bool(item.is_hard_limit),
        causes=_check_texts(item.causes, "causes"),
        aspect=_check_text(item.aspect, "aspect"),
    )


def _check_evidence(piece: object) -> EvidenceRecord:
    if not isinstance(piece, EvidenceRecord):
        raise TypeError(f"evidence must contain EvidenceRecord objects, not {type(piece).__name__}")
    for name in ("kind", "source", "summary"):
        _check_text(getattr(piece, name), f"evidence: {name}")
    return msgspec.structs.replace(
        piece,
        observed_value=_check_figure(piece.observed_value, "evidence: observed_value"),
        threshold_value=_check_figure(piece.threshold_value, "evidence: threshold_value"),
        step_start=check_index(piece.step_start, "evidence: step_start"),
        step_end=check_index(piece.step_end, "evidence: step_end"),
    )


def _check_figure(value: object, name: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__}") from None
    return number if isfinite(number) else None


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    value.encode()
    return str(value)


def _check_texts(values: object, name: str) -> tuple[str, ...]:
    return tuple(_check_text(value, name) for value in _list(values, name))


def _list(values: object, name: str) -> Iterable[object]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a tuple, not {type(values).__name__}")
    return values


CONSEQUENCES: Mapping[str, tuple[str, ...]] = {
    "constant_inputs": (
        "activation_collapse", "vanishing_gradients", "stagnant_layers", "plateau",
        "overfitting_onset", "divergence",
    ),
    "mislabelled_data": ("hard_data", "overfitting_onset", "plateau"),
    "unshuffled_data": ("oscillation", "loss_spike", "overfitting_onset", "divergence"),
    "squashed_outputs": ("plateau", "update_ratio", "activation_collapse"),
    "straggler_rank": ("runtime_bottleneck_risk", "idle_device"),
    "idle_device": ("data_bound",),
    "memory_growth": ("runtime_bottleneck_risk",),
    "parameters_not_optimized": (
        "optimizer_not_stepping", "stagnant_layers", "plateau", "exploding_gradients",
        "update_ratio",
    ),
    "optimizer_not_stepping": ("plateau", "stagnant_layers", "update_ratio"),
    "mostly_frozen": ("plateau", "stagnant_layers", "vanishing_gradients"),
    "mostly_frozen/drawn": ("plateau",),
    "gradients_not_cleared": (
        "exploding_gradients", "non_finite_values", "divergence", "loss_spike", "update_ratio",
        "activation_collapse", "plateau", "oscillation", "overfitting_onset",
    ),
    "training_mode_in_evaluation": ("overfitting_onset",),
    "poor_initialisation": (
        "exploding_gradients", "vanishing_gradients", "plateau", "activation_collapse",
    ),
    "update_ratio": (
        "exploding_gradients", "non_finite_values", "activation_collapse", "divergence",
        "loss_spike", "plateau", "vanishing_gradients",
    ),
    "exploding_gradients": (
        "non_finite_values", "activation_collapse", "divergence", "loss_spike", "plateau",
        "vanishing_gradients", "stagnant_layers",
    ),
    "non_finite_values": ("exploding_gradients", "divergence", "plateau", "loss_spike"),
    "activation_collapse": (
        "vanishing_gradients", "stagnant_layers", "plateau", "divergence", "update_ratio/small",
    ),
    "vanishing_gradients": (
        "plateau", "stagnant_layers", "activation_collapse", "update_ratio/small",
        "update_ratio",
    ),
    "update_ratio/small": ("plateau",),
    "stagnant_layers": ("plateau",),
    "loss_spike": ("divergence",),
    "divergence": ("non_finite_values",),
    "runtime_bottleneck_risk": ("idle_device", "data_bound"),
}  # fmt: skip
"""Rule, or rule/aspect -> those whose findings it may bring about."""


def _link_causes(found: Sequence[tuple[str, Finding]], tolerance: int) -> dict[int, int]:
    """Index of a finding -> index of the finding it follows from.

    A cause begins before its consequence, or at most `tolerance` steps after
    it, as probes see it late; of two that may bring each other about the one
    that begins first is the cause. Of several causes the earliest counts, and of
    equals the first in the order of the table; nothing is its own cause by way
    of another. A note (info) is the cause of notes only.

    Args:
        found: Rule ids with their findings.
        tolerance: In steps.
    """
    order = list(CONSEQUENCES)
    links: dict[int, int] = {}
    ranked = sorted(
        range(len(found)),
        key=lambda index: (
            _start(found[index][1]),
            order.index(name) if (name := _name(*found[index])) in order else len(order),
        ),
    )
    for index in ranked:
        finding, effect_id = found[index][1], _name(*found[index])
        for cause in ranked:
            other, cause_id = found[cause][1], _name(*found[cause])
            if cause == index or effect_id not in CONSEQUENCES.get(cause_id, ()):
                continue
            if other.severity == "info" != finding.severity:
                continue
            # Where each may bring about the other, the one that begins first does.
            is_mutual = cause_id in CONSEQUENCES.get(effect_id, ())
            latest = _start(finding) + (0 if is_mutual else tolerance)
            if _start(other) <= latest and not _leads(links, cause, index):
                links[index] = cause
                break
    return links


def _name(rule_id: str, finding: Finding) -> str:
    return f"{rule_id}/{finding.aspect}" if finding.aspect else rule_id


def _grade_by_cause(
    found: Sequence[tuple[str, Finding]], links: Mapping[int, int]
) -> list[tuple[str, Finding]]:
    """The findings, each cause as grave as the gravest of what follows from it."""
    graded = list(found)
    for index in range(len(found)):
        at, rank = index, SEVERITIES.index(found[index][1].severity)
        while at in links:
            at = links[at]
            rule_id, cause = graded[at]
            if SEVERITIES.index(cause.severity) < rank:
                graded[at] = rule_id, replace(cause, severity=SEVERITIES[rank])
    return graded


def _explain(
    found: Sequence[tuple[str, Finding]], links: Mapping[int, int], case: Case
) -> list[tuple[str, Finding]]:
    """The findings with what changed where they set in; what follows from one has its cause."""
    explained = []
    for index, (rule_id, finding) in enumerate(found):
        follow = [found[effect][1] for effect, cause in links.items() if cause == index]
        steps = [item.step for item in (finding, *follow) if item.step is not None]
        if index in links or not steps:
            explained.append((rule_id, finding))
            continue
        try:
            told = explain_finding(case, rule_id, finding, min(steps))
        except Exception:  # noqa: BLE001 - what was found is told in any case
            _log.warning("no cause is determined for run %s", case.run.run_id, exc_info=True)
            told = finding
        explained.append((rule_id, told))
    return explained


def _start(finding: Finding) -> int:
    return -1 if finding.step is None else finding.step


def _leads(links: Mapping[int, int], start: int, to: int) -> bool:
    """Whether the causes of one finding lead to another."""
    at: int | None = start
    while at is not None:
        if at == to:
            return True
        at = links.get(at)
    return False


ANALYZER_NAME = "analyzer"
"""Under this name its generations are stored."""

_MOST_BASELINES = 3


@dataclass(frozen=True, kw_only=True)
class RuleExplanation:
    """Explanation why a rule fired or did not fire.

    Attributes:
        rule_id: ID of the rule.
        state: `fired`, `quiet`, or `no_data` if the rule lacked data.
        reason: The reason in one sentence.
        missing: Data that the rule lacked.
        observed: Value that came nearest to the threshold, or None.
        threshold: Value at which the rule fires, or None.
    """

    rule_id: str
    state: Literal["fired", "quiet", "no_data"]
    reason: str
    missing: tuple[str, ...]
    observed: float | None
    threshold: float | None

    def __str__(self) -> str:
        text = f"{self.rule_id}: {self.state}: {self.reason}"
        if self.missing:
            text += f"; missing: {', '.join(self.missing)}"
        if self.observed is not None and self.threshold is not None:
            text += f" (observed {self.observed:.3g}, threshold {self.threshold:.3g})"
        return text


class AnalyzerEngine:
    """Analysis of a run: alerts and health scores.

    Works on running and ended runs, including those from `quark.open_run`, and on each backend that
    can be read. Thread-safe.

    Args:
        session: A TrainingSession or a RunContext.
        config: Options. Defaults to `AnalyzerEngineConfig()`.

    Raises:
        SchemaValidationError: An argument has the wrong type, or the config names an unknown rule.
        RunNotFoundError: The run does not exist.
        SessionStoreError: The store cannot be opened.
    """

    def __init__(self, session: object, *, config: AnalyzerEngineConfig | None = None) -> None:
        self.config = check_config(config, AnalyzerEngineConfig)
        self._target = open_analysis(session)
        self._lock = threading.Lock()
        self._latest: AnalyzerResult | None = None

    @property
    def run_id(self) -> str:
        """ID of the run."""
        return self._target.run_id

    def analyze(
        self,
        *,
        replace_existing: bool | None = None,
        store: bool | None = None,
        against: object = None,
    ) -> AnalyzerResult:
        """Analyze everything that the run has logged so far, and store the result.

        Readers see the new result all at once. A backend that cannot store results, such as another
        tool's, only returns them.

        Mirrors receive the result too. For an open run, this happens in the background. For an
        ended run, the call waits up to QUARK_EXIT_TIMEOUT_SECONDS (10) for them. `quark sync`
        delivers the rest.

        Args:
            replace_existing: Whether to hide the results of earlier analyses. Defaults to
                `replace_existing_outputs` of the config.
            store: Whether to store the result. Defaults to True, or to False for a run that was
                opened for reading. `refusal` of the result gives the reason.
            against: Healthy reference runs: a TrainingSession, a RunContext, or several.
                Differences are reported by the rule `healthy_baseline`. Defaults to recent healthy
                runs of the project with the same parameters, optimizer and first learning rate;
                their differences have the severity info.

        Raises:
            SchemaValidationError: An argument has the wrong type, or `against` is not a run that
                learned.
            RunNotFoundError: The run does not exist.
            SessionStoreError: The store cannot be read or written.
        """
        replaces = self.config.replace_existing_outputs
        if replace_existing is not None:
            if not isinstance(replace_existing, bool):
                raise SchemaValidationError("replace_existing must be True, False or None")
            replaces = replace_existing
        target = self._target
        refusal = target.refuse(store)
        with self._lock:
            place = 0 if replaces or refusal else self._count_generations()
            run = target.load()
            baseline = _choose_baseline(run, target, against, self.config)
            result = analyze_run(run, self.config, place=place, baseline=baseline)
            outputs = {
                AlertRecord.KIND: result.alerts,
                HealthScoreRecord.KIND: result.health_scores,
            }
            number = None if refusal else target.write(ANALYZER_NAME, replaces, outputs)
            result = replace(
                result,
                alerts=identify(result.alerts, target.run_id, ANALYZER_NAME, number),
                health_scores=identify(result.health_scores, target.run_id, ANALYZER_NAME, number),
                generation=number,
                stored=number is not None,
                refusal=refusal or target.refusal,
            )
            self._latest = result
            note_runs(result, [target.context])
            return result

    def explain(self, rule_id: str) -> RuleExplanation:
        """Explain why a rule fired or did not fire in the last analysis.

        Without a previous `analyze()`, the run is analyzed in memory.

        Args:
            rule_id: ID of the rule, such as `vanishing_gradients`.

        Raises:
            SchemaValidationError: The rule does not exist, or the config excludes it.
            SessionStoreError: The store cannot be read.
        """
        result = self._latest
        if result is None:
            result = analyze_run(self._target.load(), self.config)
        check_choice(rule_id, "rule_id", result.verdicts)
        verdict = result.verdicts[rule_id]
        reason = verdict.reason
        if verdict.findings:
            facts = " ".join(finding.fact for finding in verdict.findings)
            reason = facts if verdict.state == "fired" else f"{reason}. Note: {facts}"
        return RuleExplanation(
            rule_id=rule_id,
            state=verdict.state,
            reason=reason,
            missing=verdict.missing,
            observed=verdict.observed,
            threshold=verdict.threshold,
        )

    def read_alerts(
        self,
        *,
        rule_id: str | None = None,
        category: str | None = None,
        severity: str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        limit: int | None = None,
    ) -> tuple[AlertRecord, ...]:
        """Read stored alerts, in the order in which they were found.

        Args:
            rule_id, category, severity: Exact values to match.
            step, step_min, step_max: Bounds on the first step, inclusive.
            limit: Maximum number of results; the newest are kept. Defaults to all.

        Raises:
            SchemaValidationError: A category or severity is unknown, or a bound is not a
                non-negative integer.
            SessionStoreError: The store cannot be read, or does not store results.
        """
        if category is not None:
            check_choice(category, "category", get_args(AlertCategory))
        if severity is not None:
            check_choice(severity, "severity", get_args(AlertSeverity))
        query = Query.build(
            equals={"rule_id": rule_id, "category": category, "severity": severity},
            step=step,
            step_min=step_min,
            step_max=step_max,
            limit=limit,
        )
        columns = self._target.read_outputs(AlertRecord.KIND, ANALYZER_NAME)
        return columns.select(query).to_records()  # type: ignore[return-value]

    def read_health_scores(
        self,
        *,
        score_key: str | None = None,
        category: str | None = None,
        limit: int | None = None,
    ) -> tuple[HealthScoreRecord, ...]:
        """Read stored health scores.

        Args:
            score_key, category: Exact values to match.
            limit: Maximum number of results; the newest are kept. Defaults to all.

        Raises:
            SchemaValidationError: A key or category is unknown, or `limit` is not a non-negative
                integer.
            SessionStoreError: The store cannot be read, or does not store results.
        """
        if score_key is not None:
            check_choice(score_key, "score_key", get_args(HealthScoreKey))
        if category is not None:
            check_choice(category, "category", get_args(HealthScoreKey))
        query = Query.build(equals={"score_key": score_key, "category": category}, limit=limit)
        columns = self._target.read_outputs(HealthScoreRecord.KIND, ANALYZER_NAME)
        return columns.select(query).to_records()  # type: ignore[return-value]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AnalyzerEngine belongs to its process and cannot be pickled or copied. Pass "
            "session.context to the other process, and create an AnalyzerEngine from it there"
        )

    def _count_generations(self) -> int:
        """How many generations readers see now."""
        scores = self._target.read_outputs(HealthScoreRecord.KIND, ANALYZER_NAME)
        return len(set(scores["writer_id"].tolist()))


def _choose_baseline(
    run: RunData, target: AnalysisTarget, against: object, config: AnalyzerEngineConfig
) -> HealthyBaseline | None:
    """What holds a run against healthy ones: those that were named, or its project's."""
    if against is not None:
        return load_baseline(against)
    if config.rules is not None or not run.parameters:
        return None
    alike = (
        other
        for other in target.iterate_healthy(ANALYZER_NAME)
        if is_alike(run, other) and is_sound(judge_learning(Case(other, config)))
    )
    found = list(islice(alike, _MOST_BASELINES))
    return HealthyBaseline(found, severity="info") if found else None


def load_baseline(against: object) -> HealthyBaseline:
    """The rule that holds a run against those that are given; see `AnalyzerEngine.analyze`.

    Raises:
        SchemaValidationError: It is no run, or one that did not learn: none to be like.
    """
    given = against if isinstance(against, (list, tuple)) else (against,)
    if not given:
        raise SchemaValidationError("against must contain at least one run")
    runs = [open_analysis(one).load() for one in given]
    for run in runs:
        learning = judge_learning(Case(run, AnalyzerEngineConfig()))
        if learning.state == "not_learned":
            raise SchemaValidationError(
                f"against: run {run.run_id} is not healthy, so it cannot be a reference: "
                f"{learning.reason}. Pass another run"
            )
    return HealthyBaseline(runs)
