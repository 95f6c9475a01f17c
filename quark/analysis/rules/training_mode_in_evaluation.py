"""Evaluations in training mode, and trainings in evaluation mode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quark.analysis.analysis_context import Case
from quark.analysis.observations import between_steps, count_run, count_steps, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

_MOSTLY = 0.8  # of the evaluations that were seen
_LEAST_SEEN, _FEW_VALIDATIONS = 2, 3  # of fewer validations one that was seen is enough
_LEAST_PROBES = 3
_NEAR = 1  # steps between a probe and the validation that is logged after it
_NAMED = 5


class TrainingModeInEvaluation(BaseRule):
    """Fires where dropout or batch statistics are active in validations, or off in the training.

    Seen are evaluations from an optimizer's step to the next training pass, the
    first few of a run and then those that follow a probed step. Passes without gradients in
    steps without a validation are part of the method: labels that a model makes
    for itself, or statistics that are brought up to date. A model in evaluation
    mode as a whole is one by choice where it was so from the start and learns.
    """

    rule_id = "training_mode_in_evaluation"
    category: AlertCategory = "generalization"
    needs = (
        "it needs evaluations of a model with dropout or batch normalisation before a probed step, "
        "or summaries of parameters where nothing is validated"
    )
    data = ("layer activations", "parameter summaries")
    tables = ("activations", "parameters")
    threshold = _MOSTLY

    def judge(self, case: Case) -> Verdict | None:
        """Look at the modes of modules in evaluations, then at the mode of the steps."""
        modes = {
            name: item.evaluations
            for name, item in case.run.activations.items()
            if item.evaluations
        }
        if not modes and not case.run.parameters:
            return None
        finding = _judge_evaluations(modes, case) or _judge_steps(case)
        if finding is not None:
            return Verdict(findings=(finding,))
        validations = _find_validations(case)
        few = max((sum(seen.values()) for seen in modes.values()), default=0)
        if validations and few < _count_needed(validations) and not _ran_well(modes):
            return None  # it could not look
        if not modes:
            return self.stay_quiet("no evaluation was seen, and no step was made in evaluation "
                                   "mode")  # fmt: skip
        return self.stay_quiet("evaluations were seen in evaluation mode, or in training mode "
                               "where no validation was logged")  # fmt: skip


def _judge_evaluations(modes: Mapping[str, Mapping[int, bool]], case: Case) -> Finding | None:
    validations = _find_validations(case)
    if not validations:
        return None
    active = {
        name: wrong
        for name, seen in modes.items()
        if (wrong := _find_wrong(seen, validations)) is not None
    }
    if not active:
        return None
    culprit = next(iter(active))
    wrong = active[culprit]
    first, last = wrong[0], wrong[-1]
    kind = case.run.activations[culprit].kind
    return Finding(
        culprit=culprit,
        severity="warning",
        title="Validation runs in training mode",
        fact=say(
            "{culprit} ({kind}) was in training mode in {some} of {all} evaluations that were seen "
            "({steps}){others}.",
            culprit=culprit, kind=kind, some=count_steps(wrong),
            all=count_steps(modes[culprit]), steps=between_steps(first, last),
            others=say(", and so were {names}", names=", ".join(list(active)[1:_NAMED]))
            if len(active) > 1 else say(""),
        ),
        inference="Validation figures are those of a network with dropout, or of the batch's own "
        "statistics, and running statistics learn from held-out data: they are not what the "
        "trained model would give.",
        suggested_check="Call model.eval() before the validation and model.train() after it.",
        evidence=(
            observe("layer", culprit, "share of the evaluations in training mode",
                    len(wrong) / len(modes[culprit]), _MOSTLY, first, last),
        ),
        affected=tuple(list(active)[1:]),
    )  # fmt: skip


def _find_wrong(seen: Mapping[int, bool], validations: set[int]) -> list[int] | None:
    """Steps whose validations were in training mode, where nearly all that were seen are."""
    wrong = sorted(step for step, is_training in seen.items() if is_training)
    if len(wrong) < _count_needed(validations):
        return None
    if len(wrong) < _MOSTLY * len(seen):
        return None
    at_validations = sum(
        any(step + offset in validations for offset in range(-_NEAR, _NEAR + 1)) for step in wrong
    )
    return wrong if at_validations >= _MOSTLY * len(wrong) else None


def _count_needed(validations: set[int]) -> int:
    """So many evaluations in training mode say that all are."""
    return min(_LEAST_SEEN, max(1, len(validations) - _FEW_VALIDATIONS + 1))


def _ran_well(modes: Mapping[str, Mapping[int, bool]]) -> bool:
    """Whether an evaluation was seen in evaluation mode."""
    return any(not is_training for seen in modes.values() for is_training in seen.values())


def _find_validations(case: Case) -> set[int]:
    """Steps of what is logged of held-out data."""
    found: set[int] = set()
    for curve in (case.validation_loss, case.validation_accuracy):
        if curve is not None and curve.unit == "step":
            found.update(curve.step.tolist())
    return found


def _judge_steps(case: Case) -> Finding | None:
    """Whether the optimizer steps on a model in evaluation mode, to the end."""
    items = list(case.run.parameters.values())
    steps = np.unique(np.concatenate([item.step for item in items])) if items else np.empty(0)
    if len(steps) < _LEAST_PROBES:
        return None
    in_evaluation = np.zeros(len(steps), dtype=np.bool_)
    for item in items:
        rows = np.searchsorted(steps, item.step)
        in_evaluation[rows] |= item["evaluation_mode"] > 0
    lasting = count_run(in_evaluation)
    if lasting < _LEAST_PROBES:
        return None
    first, last = int(steps[len(steps) - lasting]), int(steps[-1])
    is_chosen = lasting == len(steps) and case.outcome.has_learned and not case.outcome.is_poor
    return Finding(
        culprit=None,
        severity="info" if is_chosen else "warning",
        title="The model trains in evaluation mode",
        fact=say(
            "At {some} of {all} probes ({steps}) the optimizer stepped while the model was in "
            "evaluation mode.",
            some=count_steps(map(int, steps[-lasting:])), all=count_steps(map(int, steps)),
            steps=between_steps(first, last),
        ),
        inference="Dropout is off and batch statistics are those of before: the network that is "
        "trained is not regularised as it was meant to be.",
        suggested_check="Call model.train() at the start of each epoch, and after each "
        "validation; models that are loaded come in evaluation mode.",
        evidence=(
            observe("parameters", "model.training", "probes in a row in evaluation mode",
                    float(lasting), float(_LEAST_PROBES), first, last),
        ),
    )  # fmt: skip
