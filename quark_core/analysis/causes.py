"""Which finding follows from which: one cause has many symptoms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark_core.analysis.rule import Finding

__all__ = ["CONSEQUENCES", "link_causes"]

CONSEQUENCES: Mapping[str, tuple[str, ...]] = {
    "poor_initialisation": ("exploding_gradients", "vanishing_gradients", "plateau"),
    "update_ratio": (
        "exploding_gradients", "non_finite_values", "activation_collapse", "divergence",
        "loss_spike", "plateau", "vanishing_gradients",
    ),
    "exploding_gradients": (
        "non_finite_values", "activation_collapse", "divergence", "loss_spike", "plateau",
        "vanishing_gradients", "stagnant_layers",
    ),
    "non_finite_values": ("exploding_gradients", "divergence", "plateau", "loss_spike"),
    "activation_collapse": ("vanishing_gradients", "stagnant_layers", "plateau", "divergence"),
    "vanishing_gradients": ("plateau", "stagnant_layers", "activation_collapse"),
    "stagnant_layers": ("plateau",),
    "loss_spike": ("divergence",),
}  # fmt: skip
"""Rule -> rules whose findings it may bring about."""


def link_causes(found: Sequence[tuple[str, Finding]], tolerance: int) -> dict[int, int]:
    """Index of a finding -> index of the finding it follows from.

    A cause begins before its consequence, or at most `tolerance` steps after
    it, as probes see it late. Of several causes the earliest counts, and of
    equals the first in the order of the table; nothing is its own cause by way
    of another.

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
            order.index(found[index][0]) if found[index][0] in order else len(order),
        ),
    )
    for index in ranked:
        rule_id, finding = found[index]
        for cause in ranked:
            cause_id, other = found[cause]
            if cause == index or rule_id not in CONSEQUENCES.get(cause_id, ()):
                continue
            if _start(other) <= _start(finding) + tolerance and not _leads(links, cause, index):
                links[index] = cause
                break
    return links


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
