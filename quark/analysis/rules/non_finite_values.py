"""NaN and infinity, in metrics, activations, gradients or weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import LayerHistory
from quark.analysis.observations import (
    at_step,
    between_steps,
    count_names,
    count_steps,
    observe,
    say,
)
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity

Kind = Literal["layer", "parameter", "metric", "gradient"]

# At one step the place nearest to the cause comes first: forward, the weights, the loss, backward.
_ORDER: tuple[Kind, ...] = ("layer", "parameter", "metric", "gradient")
_TOLD: dict[Kind, str] = {
    "layer": "the output of",
    "parameter": "the parameter",
    "metric": "the metric",
    "gradient": "the gradient of",
}
_LEAST_POINTS = 2  # of a metric that is no loss: one may be a division of zero by zero
_LEAST_PROBES = 2  # of a gradient, at the end: one overflow is how a scale of the loss is found
_LEAST_TO_STAY = 3  # points of a gradient's norm, at its end
_COUNTED = "non_finite_losses"  # what integrations count that a framework filters out
_MOST_EVIDENCE = 6
_MOST_NAMED = 20


@dataclass(frozen=True)
class _Sighting:
    """Where values are not finite: since when, and at how many probes or points."""

    kind: Kind
    name: str
    step: int
    count: int
    stays: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Orders sightings, the nearest to the cause first."""
        return self.step, _ORDER.index("gradient" if self.stays else self.kind)


class NonFiniteValues(BaseRule):
    """Fires where a loss, a weight or an activation is NaN or infinite.

    Gradients alone are not enough: with a scaled loss an overflow now and then
    is how the scale is found. Infinities that a layer has from its first probe
    on, as a mask makes them, do not count while the loss is finite.
    """

    rule_id = "non_finite_values"
    category: AlertCategory = "optimization"
    needs = "the run has no figures"
    data = ("metrics", "layers")
    threshold = 1.0

    def judge(self, case: Case) -> Verdict | None:
        """Look for NaN and infinity in metrics, outputs of layers and weights, then in gradients.

        Silent of single values of a metric that is no loss, of gradients and
        norms of them that are finite again at the end, and of a mask's infinities.
        """
        run = case.run
        gradients = list(_find_in_gradients(case))
        seen = [*_find_in_metrics(case), *_find_in_layers(case), *_find_in_parameters(case)]
        if not seen and not gradients:
            if (
                not run.metrics
                and case.train_loss is None
                and not (run.activations or run.parameters)
            ):
                return None
            return self.stay_quiet("every value is finite", 0.0)
        is_stuck = case.outcome.non_finite_step is not None
        finding = _describe([*seen, *gradients], is_stuck=is_stuck)
        if not seen and _leaves_out_steps(case):
            finding = _name_scale(finding, gradients[0], case)
        return Verdict(findings=(finding,))


def _find_in_metrics(case: Case) -> Iterator[_Sighting]:
    losses = {curve.key for curve in (case.train_loss, case.validation_loss) if curve}
    curves = dict(case.run.metrics)
    if case.train_loss is not None:
        curves.setdefault(case.train_loss.key, case.train_loss)
    for key, curve in curves.items():
        is_bad = ~np.isfinite(curve.value)
        if key.rpartition("/")[2] == _COUNTED:
            is_bad |= curve.value > 0
        bad = np.flatnonzero(is_bad)
        if not len(bad):
            continue
        if "grad" in key.lower():
            # An overflow now and then is how a scale is found; one that stays is the end.
            if len(is_bad) >= _LEAST_TO_STAY and bool(is_bad[-_LEAST_TO_STAY:].all()):
                since = len(is_bad) - int(np.argmin(np.append(is_bad[::-1], False)))
                first = int(curve.step[since])
                yield _Sighting("metric", key, first, len(bad), stays=True)
        elif key in losses or len(bad) >= _LEAST_POINTS:
            yield _Sighting("metric", key, int(curve.step[bad[0]]), len(bad))


def _find_in_layers(case: Case) -> Iterator[_Sighting]:
    is_stuck = case.outcome.non_finite_step is not None
    for history in case.run.activations.values():
        rows = np.flatnonzero(_is_bad(history))
        if not len(rows):
            continue
        is_mask = rows[0] == 0 and not np.nan_to_num(history["nan_count"]).any()
        if is_stuck or not is_mask:
            yield _Sighting("layer", history.name, int(history.step[rows[0]]), len(rows))


def _find_in_parameters(case: Case) -> Iterator[_Sighting]:
    for parameter in case.run.parameters.values():
        rows = np.flatnonzero(np.nan_to_num(parameter["non_finite_value_count"]))
        if len(rows):
            yield _Sighting("parameter", parameter.name, int(parameter.step[rows[0]]), len(rows))


def _find_in_gradients(case: Case) -> Iterator[_Sighting]:
    """Gradients that end non-finite, in several probes in a row."""
    for history in case.run.gradients.values():
        bad = _is_bad(history)
        rows = np.flatnonzero(bad)
        if len(rows) >= _LEAST_PROBES and bool(bad[-_LEAST_PROBES:].all()):
            yield _Sighting("gradient", history.name, int(history.step[rows[0]]), len(rows))


def _leaves_out_steps(case: Case) -> bool:
    """Whether a GradScaler leaves out every step that probes see, to the end."""
    trained = [item for item in case.run.parameters.values() if item.requires_grad]
    return bool(trained) and all(
        len(item) >= _LEAST_PROBES and bool(item["skipped"][-_LEAST_PROBES:].all())
        for item in trained
    )


def _name_scale(finding: Finding, first: _Sighting, case: Case) -> Finding:
    """The same of gradients that overflow alone, while outputs, weights and loss are finite."""
    history = case.run.gradients[first.name]
    bad = history.step[_is_bad(history)]
    return replace(
        finding,
        title="Gradients overflow and steps are skipped",
        fact=say(
            "At {some} of {all} probes ({steps}) the gradient of {name} is NaN or infinite, with "
            "a loss, outputs and weights that are finite, and a GradScaler left the step out.",
            some=count_steps(bad.tolist()), all=count_steps(history.step.tolist()),
            steps=between_steps(int(bad[0]), int(bad[-1])), name=first.name,
        ),
        inference="The optimizer makes no step: the loss is scaled by too much and the scale does "
        "not come down, or an operation has no finite gradient at any scale.",
        suggested_check="Call scaler.update() without an argument after each step, so that the "
        "scale backs off, and lower init_scale. Where the scale is small already, look for "
        "the operation: torch.autograd.set_detect_anomaly names it.",
    )  # fmt: skip


def _is_bad(history: LayerHistory) -> NDArray[np.bool_]:
    """Which probes of a layer have values that are not finite."""
    nan, inf = np.nan_to_num(history["nan_count"]), np.nan_to_num(history["inf_count"])
    return np.asarray((nan + inf) > 0)


def _describe(seen: Sequence[_Sighting], *, is_stuck: bool) -> Finding:
    ranked = sorted(seen, key=lambda item: item.place)
    first = ranked[0]
    stays = any(item.stays for item in ranked)
    severity: AlertSeverity = "critical" if is_stuck or stays else "error"
    if severity == "error" and all(item.kind == "metric" and item.count == 1 for item in ranked):
        severity = "warning"
    others = tuple(dict.fromkeys(item.name for item in seen if item.name != first.name))
    return Finding(
        culprit=first.name,
        severity=severity,
        title="Values are not finite",
        fact=say(
            "From step {step} on, {what} {name} has NaN or infinite values{others}.",
            step=at_step(first.step), what=_TOLD[first.kind], name=first.name,
            others=say(", and so have {count} other figures", count=count_names(others))
            if others else say(""),
        ),
        inference="Everything that is computed from it is not finite either."
        if first.kind != "metric"
        else "The loss or a figure of it left the range of its number format, or divides by "
        "zero.",
        suggested_check="Look at the batch and the operation at that step: log or division of "
        "zero, an empty mask, overflow of half precision; torch.autograd.set_detect_anomaly "
        "names the operation.",
        evidence=tuple(
            observe(item.kind, item.name, "not finite at so many probes or points",
                    float(item.count), 0.0, item.step)
            for item in ranked[:_MOST_EVIDENCE]
        ),
        step=first.step,
        affected=others[:_MOST_NAMED],
    )  # fmt: skip
