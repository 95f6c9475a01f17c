"""Why a fault set in: what the records of settings and data say about its onset.

Rules say what goes wrong; here the learning rate, weight decay, clipping, the
loss's scale, batches and data are read for why. A cause is told only where it
changed at the onset, or holds throughout, and could bring the fault about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quark.analysis import data_causes, setting_causes
from quark.analysis.case import Case
from quark.analysis.figures import keep_figures, say
from quark.analysis.onset import Cause, Onset
from quark.analysis.rule import Finding

_BREAKS = (
    "exploding_gradients", "divergence", "loss_spike", "non_finite_values", "activation_collapse",
    "update_ratio",
)  # fmt: skip
_STALLS = (
    "plateau", "vanishing_gradients", "stagnant_layers", "activation_collapse", "update_ratio",
    "optimizer_not_stepping", "mostly_frozen",
)  # fmt: skip

_LOOKS: Sequence[tuple[Callable[[Onset], Iterator[Cause]], tuple[str, ...]]] = (
    (data_causes.find_broken_batch, _BREAKS),
    (setting_causes.find_raised_rate, _BREAKS),
    (setting_causes.find_lowered_rate, _STALLS),
    (setting_causes.find_decay, (*_STALLS, *_BREAKS)),
    (setting_causes.find_clipping, _STALLS),
    (setting_causes.find_loss_scale, (*_STALLS, *_BREAKS)),
    (data_causes.find_odd_batch, _BREAKS),
    (data_causes.find_changed_data, (*_BREAKS, "constant_inputs", "overfitting_onset")),
)
"""What is looked for, the surest first, and the rules whose findings it may bring about."""

_MOST_TOLD = 2


def find_causes(
    case: Case, rule_id: str, finding: Finding, step: int | None = None
) -> tuple[Cause, ...]:
    """What brought a finding about, the surest first; empty where nothing says.

    Args:
        case: The run.
        rule_id: The rule that found it.
        finding: What it found.
        step: Where it, or what follows from it, set in; by default its own first step.
    """
    begin = finding.step if step is None else step
    if begin is None:
        return ()
    onset = Onset(case, rule_id, finding, begin)
    found = [cause for look, rules in _LOOKS if rule_id in rules for cause in look(onset)]
    return tuple({cause.kind: cause for cause in reversed(found)}.values())[::-1]


def explain_finding(case: Case, rule_id: str, finding: Finding, step: int | None = None) -> Finding:
    """The finding with what brought it about in its texts and its evidence; see `find_causes`."""
    causes = find_causes(case, rule_id, finding, step)[:_MOST_TOLD]
    if not causes:
        return finding
    fact, check = keep_figures(finding.fact), keep_figures(finding.suggested_check)
    for cause in causes:
        fact = say("{fact} {cause}", fact=fact, cause=cause.text)
    for cause in reversed(causes):
        check = say("{first} {check}", first=keep_figures(cause.check), check=check)
    return replace(
        finding,
        fact=fact,
        suggested_check=check,
        evidence=(*finding.evidence, *(cause.evidence for cause in causes)),
        causes=tuple(cause.kind for cause in causes),
    )
