"""Which rules there are: the built-in ones, and those of other distributions.

A distribution adds rules by an entry point of the group `quark.rules`, which
names a rule, a class of one, or a function that returns several.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args

from quark_core.analysis.rule import Rule
from quark_core.analysis.rules.activation_collapse import ActivationCollapse
from quark_core.analysis.rules.class_imbalance import ClassImbalance
from quark_core.analysis.rules.data_bound import DataBound
from quark_core.analysis.rules.divergence import Divergence
from quark_core.analysis.rules.exploding_gradients import ExplodingGradients
from quark_core.analysis.rules.hard_data import HardData
from quark_core.analysis.rules.loss_spike import LossSpike
from quark_core.analysis.rules.memory_growth import MemoryGrowth
from quark_core.analysis.rules.non_finite_values import NonFiniteValues
from quark_core.analysis.rules.oscillation import Oscillation
from quark_core.analysis.rules.overfitting_onset import OverfittingOnset
from quark_core.analysis.rules.plateau import Plateau
from quark_core.analysis.rules.poor_initialisation import PoorInitialisation
from quark_core.analysis.rules.runtime_bottleneck_risk import RuntimeBottleneckRisk
from quark_core.analysis.rules.stagnant_layers import StagnantLayers
from quark_core.analysis.rules.update_ratio import UpdateRatio
from quark_core.analysis.rules.vanishing_gradients import VanishingGradients
from quark_core.analysis_records import AlertCategory
from quark_core.errors import SchemaValidationError

__all__ = ["BUILTIN_RULES", "DOCUMENTED_RULES", "choose_rules", "list_rules"]

_GROUP = "quark.rules"

_log = logging.getLogger("quark")

BUILTIN_RULES: tuple[Rule, ...] = (
    NonFiniteValues(),
    ExplodingGradients(),
    VanishingGradients(),
    StagnantLayers(),
    ActivationCollapse(),
    OverfittingOnset(),
    RuntimeBottleneckRisk(),
    LossSpike(),
    Divergence(),
    Plateau(),
    UpdateRatio(),
    PoorInitialisation(),
    Oscillation(),
    HardData(),
    ClassImbalance(),
    MemoryGrowth(),
    DataBound(),
)
"""In the order in which they are asked."""

DOCUMENTED_RULES = (
    "exploding_gradients",
    "vanishing_gradients",
    "stagnant_layers",
    "activation_collapse",
    "overfitting_onset",
    "runtime_bottleneck_risk",
)
"""Those with thresholds of their own, which the absolute mode reads."""


@lru_cache(maxsize=1)
def list_rules() -> tuple[Rule, ...]:
    """Every rule: the built-in ones first, then others by the names of their entry points.

    A rule of another distribution that cannot be loaded, or has the id of one
    that is there already, is left out with a warning.
    """
    rules = list(BUILTIN_RULES)
    for point in sorted(entry_points(group=_GROUP), key=lambda item: (item.name, item.value)):
        rules += _load(point, {rule.rule_id for rule in rules})
    return tuple(rules)


def choose_rules(wanted: Iterable[str] | None, excluded: Iterable[str]) -> tuple[Rule, ...]:
    """The rules with these ids, all for None, without the excluded ones.

    Raises:
        SchemaValidationError: An id that no rule has.
    """
    known = {rule.rule_id: rule for rule in list_rules()}
    left_out = tuple(excluded)
    for argument, names in (("rules", wanted or ()), ("excluded_rules", left_out)):
        for name in names:
            if name not in known:
                raise SchemaValidationError(
                    f"{argument}: there is no rule {name!r}; there are {', '.join(known)}"
                )
    chosen = known if wanted is None else {name: known[name] for name in wanted}
    return tuple(rule for name, rule in chosen.items() if name not in left_out)


def _load(point: EntryPoint, taken: set[str]) -> list[Rule]:
    try:
        found: list[Rule] = []
        for item in _open(point.load()):
            rule_id = _check(item)
            if rule_id in taken:
                raise ValueError(f"there is a rule {rule_id!r} already")
            found.append(item)
            taken.add(rule_id)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        _log.warning(
            "the rules of entry point %s = %s are left out: %s: %s",
            point.name, point.value, type(error).__name__, error,
        )  # fmt: skip
        return []
    return found


def _open(loaded: Any) -> list[Any]:
    made = loaded() if isinstance(loaded, type) else loaded
    if isinstance(made, Rule):
        return [made]
    return list(made() if callable(made) else made)


def _check(item: Any) -> str:
    if not isinstance(item, Rule):
        raise TypeError(f"{item!r:.80} has no rule_id, category and check()")
    if item.category not in get_args(AlertCategory):
        raise ValueError(f"category must be one of {', '.join(get_args(AlertCategory))}")
    return item.rule_id
