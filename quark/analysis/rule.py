"""The contract of a rule, the base class of the built-in rules, and the documented thresholds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.metric_roles import find_curve
from quark.analysis.observations import (
    Figure,
    Source,
    Text,
    add,
    count_names,
    count_run,
    keep_figures,
    limit,
    list_stretches,
    measure,
    measure_curve,
    observe,
    say,
)
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity, EvidenceRecord

SEVERITIES: tuple[AlertSeverity, ...] = ("info", "warning", "error", "critical")
"""From the mildest on."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a rule holds to be wrong.

    Attributes:
        culprit: The layer, parameter or metric at fault; None for the whole run.
        severity: From how long it lasted and how large it is.
        title: A few words.
        fact: What was seen, with numbers: made by `quark.analysis.observations.say`, it keeps
            the records that they are from.
        inference: What follows from it.
        suggested_check: What to look at next.
        evidence: Observations that it rests on.
        step: Where it began; None where only epochs are known.
        step_end: Where it was last seen.
        epoch: Where it began, in epochs.
        confidence: 0 to 1.
        affected: Other layers, parameters or metrics that show it.
        is_hard_limit: Whether it is a limit that the user has set.
        causes: What changed where it began; see `quark.analysis.causes`.
        aspect: Which of several faults it is, of a rule whose findings have causes of their own.
        documented_level: Of a note: which documented threshold it is at or
            beyond, though the run by itself gives no reason for an alert.
    """

    culprit: str | None
    severity: AlertSeverity
    title: str
    fact: str
    inference: str
    suggested_check: str
    evidence: tuple[EvidenceRecord, ...]
    step: int | None
    step_end: int | None = None
    epoch: int | None = None
    confidence: float = 1.0
    affected: tuple[str, ...] = ()
    is_hard_limit: bool = False
    causes: tuple[str, ...] = ()
    aspect: str = ""
    documented_level: AlertSeverity | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts, those of the evidence too; see `quark.analysis.observations`."""
        own = (self.title, self.fact, self.inference, self.suggested_check)
        return (*own, *(piece.summary for piece in self.evidence))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule says of one run.

    Attributes:
        findings: What is wrong; empty where the rule is quiet.
        state: `fired`, `quiet` where it looked and found nothing, or `no_data`.
        reason: Why it is quiet or could not look, in one sentence.
        missing: Which data it lacked.
        observed: The figure that came nearest to firing, or None.
        threshold: What it would have had to reach, or None.
    """

    findings: tuple[Finding, ...] = ()
    reason: str = ""
    missing: tuple[str, ...] = ()
    observed: float | None = None
    threshold: float | None = None

    @property
    def state(self) -> Literal["fired", "quiet", "no_data"]:
        """What came out; a note of a documented threshold is no firing."""
        if any(finding.documented_level is None for finding in self.findings):
            return "fired"
        return "no_data" if self.missing else "quiet"


@runtime_checkable
class Rule(Protocol):
    """A rule. One object serves any number of runs, from any thread; it keeps nothing.

    Attributes:
        rule_id: Its name, unique among all rules.
        category: What its alerts count for.
    """

    rule_id: str
    category: AlertCategory

    def check(self, case: Case) -> Verdict:
        """Look at a run; the same records always give the same verdict."""


def grade(observed: float, warning: float, error: float, critical: float) -> AlertSeverity:
    """Severity of a figure on an ascending scale; info below the first step."""
    if observed >= critical:
        return "critical"
    if observed >= error:
        return "error"
    return "warning" if observed >= warning else "info"


# The literal reading of the documented thresholds, for the absolute mode and for hard limits.
#
# In the adaptive mode only the levels that the caller has passed count; in the
# absolute mode all of them do. In the adaptive mode the others are noted where
# they are crossed, so that who reads the documentation finds its figures.

WARM_UP_STEPS = 3
"""First steps, whose time says nothing: they compile, and fill caches."""

_NOTED = ("error", "critical")

Levels = Mapping[AlertSeverity, float]
Floats = NDArray[np.float64]


def list_levels(case: Case, prefix: str, suffix: str) -> Levels:
    """The levels that count as limits, by severity."""
    passed = case.thresholds.passed
    out: dict[AlertSeverity, float] = {}
    for severity in SEVERITIES[1:]:
        name = f"{prefix}_{severity}_{suffix}"
        if case.config.mode == "absolute" or name in passed:
            out[severity] = getattr(case.thresholds, name)
    return out


def limit_gradient_norms(case: Case) -> tuple[Finding, ...]:
    """Layers whose gradient's norm is at or beyond a limit."""
    levels = list_levels(case, "exploding_gradient", "norm")
    return _collect(
        (
            _Reading(Source("gradient", name, "norm"), history["norm"], history.step)
            for name, history in case.run.gradients.items()
        ),
        case,
        levels,
        "Gradient norm beyond its limit",
        "gradient norm",
        "Look at the learning rate, clip the gradient's norm.",
    )


def limit_vanishing_gradients(case: Case) -> tuple[Finding, ...]:
    """The share of gradient samples whose norm is below the limit."""
    thresholds = case.thresholds
    levels = dict(list_levels(case, "vanishing_gradient", "ratio"))
    if not levels and "vanishing_gradient_norm" in thresholds.passed:
        levels = {
            severity: getattr(thresholds, f"vanishing_gradient_{severity}_ratio")
            for severity in SEVERITIES[1:]
        }
    histories = case.run.gradients
    if not levels or not histories:
        return ()
    norms = np.concatenate([history["norm"] for history in histories.values()])
    norms = norms[np.isfinite(norms)]
    if len(norms) < thresholds.vanishing_gradient_min_samples:
        return ()
    share = float((norms < thresholds.vanishing_gradient_norm).mean())
    severity = _reached(share, levels)
    if severity is None:
        return ()
    shares = {
        name: float((history["norm"] < thresholds.vanishing_gradient_norm).mean())
        for name, history in histories.items()
    }
    culprit = max(shares, key=lambda name: shares[name])
    return (
        _make(
            culprit, severity, "Gradients below their limit",
            say("At {count} layers together {share} of the gradient's norms are below {limit}; at "
                "{culprit} its median is {norm}.",
                count=count_names(histories), limit=limit(thresholds.vanishing_gradient_norm),
                share=_measure_share(case, thresholds.vanishing_gradient_norm).percent,
                culprit=culprit, norm=measure(case.run, "gradient", culprit, "median", "norm")),
            "Look at the depth, the initialisation and the loss's scale.",
            "layer", share, levels[severity], int(min(h.step[0] for h in histories.values())),
        ),
    )  # fmt: skip


def limit_stagnant_layers(case: Case) -> tuple[Finding, ...]:
    """Layers whose gradient stays below the limit for several probes in a row."""
    thresholds = case.thresholds
    levels = dict(list_levels(case, "stagnant_layer", "probes"))
    if not levels and "stagnant_layer_gradient_norm" in thresholds.passed:
        levels = {
            severity: getattr(thresholds, f"stagnant_layer_{severity}_probes")
            for severity in SEVERITIES[1:]
        }
    if not levels:
        return ()
    out = []
    for name, history in case.run.gradients.items():
        start, probes = _find_longest(history["norm"] < thresholds.stagnant_layer_gradient_norm)
        severity = _reached(probes, levels) if probes else None
        if severity is not None:
            first = int(history.step[start])
            out.append(
                _make(
                    name, severity, "Layer stands still",
                    say("The gradient's norm of {name} was below {limit} for {probes} probes in a "
                        "row.", name=name, limit=limit(thresholds.stagnant_layer_gradient_norm),
                        probes=measure(
                            case.run, "gradient", name, "count", "norm", first=first,
                            last=int(history.step[start + probes - 1]))),
                    "See whether the layer is meant to train.",
                    "layer", float(probes), levels[severity], first,
                )
            )  # fmt: skip
    return tuple(out)


def limit_activations(case: Case) -> tuple[Finding, ...]:
    """Layers with too many dead units, too much saturation, or too small a deviation."""
    parts = (
        ("dead_unit_ratio", "dead_unit_ratio", "share of dead units", False),
        ("saturation_ratio", "saturation_ratio", "share of saturated elements", False),
        ("std", "std", "standard deviation", True),
    )
    out: list[Finding] = []
    for figure, suffix, words, falls in parts:
        levels = list_levels(case, "activation_collapse", suffix)
        readings = (
            _Reading(Source("activation", name, figure), history[figure], history.step)
            for name, history in case.run.activations.items()
        )
        out += _collect(
            readings, case, levels, "Activations collapse", words,
            "Look at the layer's inputs, its initialisation and the learning rate.", falls=falls,
        )  # fmt: skip
    return tuple(out)


def limit_overfitting_gap(case: Case) -> tuple[Finding, ...]:
    """The validation loss's distance from the training loss, at its end."""
    levels = list_levels(case, "overfitting", "gap")
    train, validation = case.train_loss, case.validation_loss
    if not levels or train is None or validation is None:
        return ()
    ours, theirs = train.merged, validation.merged
    points = min(len(ours), len(theirs))
    if points < case.thresholds.overfitting_min_points or ours.unit != theirs.unit:
        return ()
    at = np.interp(theirs.step, ours.step, ours.value)
    gap = theirs.value - at
    severity = _reached(float(gap[-1]), levels)
    if severity is None:
        return ()
    beyond = gap >= min(levels.values())
    first = int(theirs.step[len(gap) - count_run(beyond)])
    return (
        _make(
            validation.key, severity, "Validation loss far above training loss",
            say("The validation loss ends at {validation}, the training loss at {train}.",
                validation=measure_curve(case.run, validation.key, "value"),
                train=measure_curve(case.run, train.key, "value")),
            "Look at regularisation, early stopping and the size of the data.",
            "metric", float(gap[-1]), levels[severity], first, unit=theirs.unit,
        ),
    )  # fmt: skip


def limit_runtime(case: Case) -> tuple[Finding, ...]:
    """Mean step time, the share that waits for data, and jitter, once a training is warm."""
    metrics, config = case.run.metrics, case.config
    step_time = find_curve(metrics, config.step_time_metric_keys)
    if step_time is None or not len(step_time.finite):
        return ()
    known = step_time.finite
    # One slow first step would be most of the mean.
    first = int(known.step[min(WARM_UP_STEPS, len(known) // 2)])
    times = known.between(first, None).value
    mean = float(times.mean())
    key = step_time.key
    usual = measure_curve(case.run, key, "mean", first=first)
    parts = [("step_time_ms", "mean step time in ms", usual)]
    if len(times) > 1 and mean > 0:
        deviation = measure_curve(case.run, key, _take_deviation, first=first)
        parts.append(("jitter_ratio", "deviation of step times over their mean",
                      deviation / usual))  # fmt: skip
    data_time = find_curve(metrics, config.data_time_metric_keys)
    if data_time is not None and mean > 0 and len(data_time.finite):
        waiting = measure_curve(case.run, data_time.key, "mean", first=first)
        share = waiting / usual
        parts.append(("data_fraction", "share of a step that waits for data", share))
    out = []
    for suffix, words, figure in parts:
        value = figure.value
        levels = list_levels(case, "runtime", suffix)
        severity = _reached(value, levels)
        if severity is not None:
            out.append(
                _make(
                    step_time.key, severity, "Steps beyond a time limit",
                    say("The {words} is {value}.", words=words, value=figure),
                    "Profile a step: loading, computing, synchronising.",
                    "metric", value, levels[severity], first, unit=step_time.unit,
                )
            )  # fmt: skip
    return tuple(out)


def join_findings(own: Iterable[Finding], limits: Iterable[Finding]) -> tuple[Finding, ...]:
    """What a rule has found and the limits that are reached, each culprit told of once.

    A limit at a culprit that the rule has found by itself is part of that
    finding, and sets its severity where it is the worse of the two.
    """
    found, others = list(own), []
    for reached in limits:
        same = [place for place, item in enumerate(found) if item.culprit == reached.culprit]
        if same:
            found[same[0]] = _join(found[same[0]], reached)
        else:
            others.append(reached)
    return (*found, *others)


def _join(own: Finding, reached: Finding) -> Finding:
    is_worse = SEVERITIES.index(reached.severity) > SEVERITIES.index(own.severity)
    return replace(
        own,
        severity=reached.severity if is_worse else own.severity,
        fact=say("{one} {other}", one=keep_figures(own.fact), other=keep_figures(reached.fact)),
        inference=say(
            "{one} {other}",
            one=keep_figures(own.inference), other=keep_figures(reached.inference),
        ),
        evidence=(*own.evidence, *reached.evidence),
        is_hard_limit=True,
    )  # fmt: skip


def note_documented(crossed: Iterable[Finding], found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Documented thresholds of an error or worse that are crossed, as notes.

    Where a finding has the same culprit already there is no note. Several
    layers that cross the same one are one note, at the worst of them.

    Args:
        crossed: What the absolute mode would find.
        found: What is found without it; its culprits need no note.
    """
    told = {name for item in found for name in (item.culprit, *item.affected)}
    groups: dict[str, list[Finding]] = {}
    for finding in crossed:
        if finding.culprit not in told and finding.severity in _NOTED:
            groups.setdefault(finding.title, []).append(finding)
    return tuple(_note(group) for group in groups.values())


def _note(group: list[Finding]) -> Finding:
    worst = max(group, key=lambda item: SEVERITIES.index(item.severity))
    level, (evidence, *_) = worst.severity, worst.evidence
    return replace(
        worst,
        severity="info",
        title=f"{worst.title} (documented {level} level)",
        inference=say(
            "This is at or beyond the documented {level} level of {threshold}. Held against the "
            'run itself it is no fault; mode="absolute" makes an alert of it.',
            level=level,
            threshold=limit(evidence.threshold_value or 0.0),
        ),
        affected=tuple(item.culprit for item in group if item is not worst and item.culprit),
        documented_level=level,
    )


@dataclass(frozen=True)
class _Reading:
    source: Source
    values: Floats
    step: NDArray[np.int64]


def _collect(
    readings: Iterable[_Reading],
    case: Case,
    levels: Levels,
    title: str,
    words: str,
    check: str,
    *,
    falls: bool = False,
) -> tuple[Finding, ...]:
    """One finding for each reading whose worst value reaches a level."""
    if not levels:
        return ()
    sign = -1.0 if falls else 1.0
    signed: Levels = {severity: sign * level for severity, level in levels.items()}
    out = []
    for reading in readings:
        known = np.isfinite(reading.values)
        if not known.any():
            continue
        values, steps = sign * reading.values[known], reading.step[known]
        severity = _reached(float(values.max()), signed)
        if severity is None:
            continue
        first = int(steps[int(np.argmax(values >= min(signed.values())))])
        worst = sign * float(values.max())
        name = reading.source.name
        out.append(
            _make(
                name, severity, title,
                say("The {words} of {name} reached {worst}.", words=words, name=name,
                    worst=measure(case.run, reading.source.kind, name,
                                  "lowest" if falls else "highest", reading.source.field)),
                check,
                "layer", worst, levels[severity], first,
            )
        )  # fmt: skip
    return tuple(out)


def _make(
    culprit: str,
    severity: AlertSeverity,
    title: str,
    fact: Text,
    check: str,
    kind: str,
    observed: float,
    threshold: float,
    first: int,
    *,
    unit: str = "step",
) -> Finding:
    step, epoch = (first, None) if unit == "step" else (None, first)
    return Finding(
        culprit=culprit,
        severity=severity,
        title=title,
        fact=fact,
        inference=say(
            "This is at or beyond the configured limit of {limit}.", limit=limit(threshold)
        ),
        suggested_check=check,
        evidence=(observe(kind, culprit, fact, observed, threshold, step),),
        step=step,
        epoch=epoch,
        is_hard_limit=True,
    )


def _take_deviation(values: Floats) -> float:
    return float(values.std())


def _measure_share(case: Case, norm: float) -> Figure:
    """Share of all recorded norms of gradients that are below one."""

    def count_below(values: Floats) -> float:
        return float((values < norm).sum())

    names = list(case.run.gradients)
    below = [measure(case.run, "gradient", name, count_below, "norm") for name in names]
    every = [measure(case.run, "gradient", name, "count", "norm") for name in names]
    known = [pair for pair in zip(below, every, strict=True) if np.isfinite(pair[1].value)]
    return add(pair[0] for pair in known) / add(pair[1] for pair in known)


def _reached(value: float, levels: Levels) -> AlertSeverity | None:
    """The worst level that a value is at or beyond."""
    found = [
        severity for severity in SEVERITIES if severity in levels and value >= levels[severity]
    ]
    return found[-1] if found else None


def _find_longest(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Index and length of the longest stretch of true values, the first of equals."""
    low, high = max(list_stretches(mask), key=lambda part: part[1] - part[0], default=(0, 0))
    return low, high - low


class BaseRule(ABC):
    """A rule that says what it needs, and joins what it finds with the limits of the user.

    Attributes:
        rule_id, category: See `quark.analysis.rule.Rule`.
        needs: What is said where the data is not there, in one sentence.
        data: Names of that data.
        tables: Attributes of `RunData` without any of which the rule is not asked; () if it
            also judges by metrics.
        threshold: What the figure of its quiet verdicts is held against, or None.
    """

    rule_id: str
    category: AlertCategory
    needs: ClassVar[str]
    data: ClassVar[tuple[str, ...]]
    tables: ClassVar[tuple[str, ...]] = ()
    threshold: ClassVar[float | None] = None

    def check(self, case: Case) -> Verdict:
        """See `quark.analysis.rule.Rule`."""
        if self.tables and not case.run.has_any(self.tables):
            return Verdict(reason=self.needs, missing=self.data)
        limited = self.find_limits(case)
        if case.config.mode == "absolute" and limited:
            return Verdict(findings=limited)
        verdict = self.judge(case)
        own = () if verdict is None else verdict.findings
        found = join_findings(own, limited)
        if case.config.mode != "absolute":
            found += note_documented(self.find_limits(case.as_documented), found)
        if verdict is None:
            missing = () if limited else self.data
            return Verdict(findings=found, reason=self.needs, missing=missing)
        return replace(verdict, findings=found) if found else verdict

    def find_limits(self, case: Case) -> tuple[Finding, ...]:  # noqa: ARG002 - of those that have limits
        """What is at or beyond thresholds that count as they are; see `limits`."""
        return ()

    @abstractmethod
    def judge(self, case: Case) -> Verdict | None:
        """What the rule says of a run by itself; None where the data that it needs is not there."""

    def stay_quiet(self, reason: str, observed: float | None = None) -> Verdict:
        """A verdict without findings, with the figure that came nearest to the threshold."""
        return Verdict(reason=reason, observed=observed, threshold=self.threshold)
