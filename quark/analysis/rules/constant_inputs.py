"""Inputs that say nothing: blank, or the same for every sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import LayerHistory, ParameterHistory
from quark.analysis.observations import between_steps, count_run, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_LEAST_PROBES = 3
_LASTING = 0.1  # share of the probes that the end has to have
_ALIKE = 1e-5  # share of the energy that differs between samples: a three-hundredth of the size
_TOLD_APART = 1e-3  # of it, from which on inputs had differed before
_LEARNED = 0.3  # share by which a loss has fallen that inputs must have told something for
_LOOKED_UP = ("Embedding", "EmbeddingBag")
_RESHAPING = ("Flatten", "Unflatten", "Identity")
_WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "LazyLinear")


class ConstantInputs(BaseRule):
    """Fires where the first layer gets nothing, or the same of every sample.

    The gradient of a weight is that of its output times its input: where the
    bias of the first layer gets some and the weight none at all, the input is
    zero. Where every sample gives the same output of the first layer, the
    inputs are the same.
    """

    rule_id = "constant_inputs"
    category: AlertCategory = "generalization"
    needs = f"it needs activations or gradients of the first layer in {_LEAST_PROBES} probes"
    data = ("layer activations", "parameter gradients")
    tables = ("activations", "parameters")
    threshold = _ALIKE

    def judge(self, case: Case) -> Verdict | None:
        """Look for a first layer without any input, or with one that does not vary, to the end.

        Silent of a run that learns from a constant that is meant so, as some
        generators do, of embeddings, and of what passes before the end.
        """
        finding = _look_at_gradients(case)
        for item in _find_first(case):
            finding = finding or _look_at_samples(item, case)
        if finding is not None:
            return Verdict(findings=(finding,))
        shares = [item["sample_variation_ratio"] for item in _find_first(case)]
        known = [values for values in shares if np.isfinite(values).any()]
        if not known and _find_weight(case) is None:
            return None
        lowest = min((float(np.nanmin(values)) for values in known), default=None)
        return self.stay_quiet("the first layer gets inputs that differ between samples", lowest)


def _find_first(case: Case) -> list[LayerHistory]:
    """The first layer that was called and looks nothing up, and the first one with weights.

    What only reshapes shows blank inputs as they are; the bias of what comes next drowns them.
    """
    layers = sorted(
        (item for item in case.run.activations.values() if len(item) >= _LEAST_PROBES),
        key=lambda item: item.order,
    )
    if not layers or layers[0].kind in _LOOKED_UP:
        return []
    weighted = next((item for item in layers if item.kind in _WEIGHTED), layers[0])
    first = layers[0]
    between = layers[: layers.index(weighted)]
    plain = all(item.kind in _RESHAPING for item in between)
    return [first] if weighted is first or not plain else [first, weighted]


def _find_weight(case: Case) -> tuple[ParameterHistory, ParameterHistory] | None:
    """Weight and bias of the first layer with weights."""
    parameters = case.run.parameters
    for module, item in case.run.activations.items():
        if item.kind in _LOOKED_UP:
            return None
        if item.kind in _WEIGHTED:
            weight, bias = (parameters.get(f"{module}.{name}") for name in ("weight", "bias"))
            return None if weight is None or bias is None else (weight, bias)
    if case.run.activations or not parameters:
        return None
    weight = next(iter(parameters.values()))
    bias = parameters.get(f"{weight.module_name}.bias")
    return None if bias is None or weight.kind not in _WEIGHTED else (weight, bias)


def _count_lasting(mask: NDArray[np.bool_]) -> int:
    """Probes to the end at which a mask holds; 0 where it does not for long enough."""
    lasting = count_run(mask)
    return lasting if lasting >= max(_LEAST_PROBES, round(_LASTING * len(mask))) else 0


def _look_at_gradients(case: Case) -> Finding | None:
    """A first weight without any gradient whose bias gets some."""
    found = _find_weight(case)
    if found is None:
        return None
    weight, bias = found
    steps, ours, theirs = np.intersect1d(weight.step, bias.step, return_indices=True)
    is_blank = (weight["gradient_norm"][ours] == 0) & (bias["gradient_norm"][theirs] > 0)
    lasting = _count_lasting(is_blank)
    if not lasting:
        return None
    first, last = int(steps[-lasting]), int(steps[-1])
    gradient, other = (
        case.measure("parameter", item.name, "highest", "gradient_norm", first=first, last=last)
        for item in (weight, bias)
    )
    return Finding(
        culprit=weight.module_name,
        severity="error",
        title="Inputs are blank",
        fact=say(
            "The gradient of {weight} is {gradient} while that of {bias} reaches {other} "
            "({steps}): what {module}, the first layer, gets is zero.",
            weight=weight.name, gradient=gradient, bias=bias.name, other=other,
            steps=between_steps(first, last), module=weight.module_name,
        ),
        inference="Nothing of the samples reaches the model: it can learn the mean of the targets "
        "and no more.",
        suggested_check="Look at a batch as the model gets it: scaling, masks, augmentation, the "
        "key that it is read from.",
        evidence=(
            observe("parameter", weight.name, "gradient of the first weight", gradient.value, 0.0,
                    first, last),
            observe("parameter", bias.name, "gradient of its bias", other.value, None, first,
                    last),
        ),
    )  # fmt: skip


def _look_at_samples(item: LayerHistory, case: Case) -> Finding | None:
    """A first layer that gives the same for every sample."""
    field = "sample_variation_ratio"
    shares = item[field]
    lasting = _count_lasting(np.nan_to_num(shares, nan=1.0) <= _ALIKE)
    if not lasting or _is_dead(item, lasting):
        return None
    had_told = lasting < len(shares) and float(np.nanmax(shares[:-lasting])) > _TOLD_APART
    progress = case.outcome.loss
    if not had_told and progress is not None and progress.relative_fall > _LEARNED:
        return None
    if not had_told and case.outcome.rewarded:
        return None
    first, last = int(item.step[-lasting]), int(item.step[-1])
    level = case.measure("activation", item.name, "highest", field, first=first, last=last)
    before = say("")
    if had_told:
        before = say(", {share} before", share=case.measure(
            "activation", item.name, "median", field,
            last=int(item.step[-lasting - 1])).percent)  # fmt: skip
    return Finding(
        culprit=item.name,
        severity="error",
        title="All inputs are the same",
        fact=say(
            "{name}, the first layer, gives the same for every sample: {level} of its energy "
            "differs between them at most{before} ({steps}).",
            name=item.name, level=level.percent, before=before, steps=between_steps(first, last),
        ),
        inference="Samples cannot be told apart: the model can learn the mean of the targets and "
        "no more.",
        suggested_check="Look at a batch as the model gets it: a loader that repeats one sample, "
        "normalisation by a wrong scale, a mask over everything.",
        evidence=(
            observe("layer", item.name, "share of the energy that differs between samples",
                    level.value, _ALIKE, first, last),
        ),
    )  # fmt: skip


def _is_dead(item: LayerHistory, lasting: int) -> bool:
    """Whether the layer itself gives nothing: then its input is not what is wrong."""
    norms = item["norm"][-lasting:]
    return not bool((np.nan_to_num(norms) > 0).any()) and item.kind in _WEIGHTED
