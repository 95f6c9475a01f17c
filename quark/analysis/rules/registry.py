"""The registry of rules: the built-in ones, and those of other distributions.

A distribution adds rules by an entry point of the group `quark.rules`, which
names a rule, a class of one, or a function that returns several.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from pkgutil import iter_modules
from typing import Any, get_args

from quark.analysis import rules
from quark.analysis.rule import BaseRule, Rule
from quark_core.errors import SchemaValidationError
from quark_core.records.kinds.findings import AlertCategory

_GROUP = "quark.rules"

_log = logging.getLogger("quark")

_ORDER = (
    "constant_inputs",
    "mislabelled_data",
    "unshuffled_data",
    "squashed_outputs",
    "non_finite_values",
    "exploding_gradients",
    "vanishing_gradients",
    "stagnant_layers",
    "activation_collapse",
    "overfitting_onset",
    "runtime_bottleneck_risk",
    "loss_spike",
    "divergence",
    "plateau",
    "update_ratio",
    "poor_initialisation",
    "oscillation",
    "hard_data",
    "class_imbalance",
    "memory_growth",
    "data_bound",
    "straggler_rank",
    "idle_device",
    "optimizer_not_stepping",
    "parameters_not_optimized",
    "gradients_not_cleared",
    "mostly_frozen",
    "training_mode_in_evaluation",
    "replicas_differ",
)


def find_builtin_rules() -> tuple[BaseRule, ...]:
    """One of each rule that a module of this package defines.

    They are asked in the order of `_ORDER`, which is also that of alerts that
    are alike in all else; a rule that is not in it comes after them, by its id.
    """
    found: list[BaseRule] = []
    for item in iter_modules(rules.__path__, f"{rules.__name__}."):
        if item.name == __name__:
            continue
        module = import_module(item.name)
        found += [
            value()
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, BaseRule)
            and value.__module__ == item.name
            and not isabstract(value)
        ]
    ranks = {rule_id: rank for rank, rule_id in enumerate(_ORDER)}
    return tuple(sorted(found, key=lambda r: (ranks.get(r.rule_id, len(ranks)), r.rule_id)))


BUILTIN_RULES = find_builtin_rules()
"""In the order in which they are asked."""

DOCUMENTED_RULES = tuple(
    rule.rule_id for rule in BUILTIN_RULES if type(rule).find_limits is not BaseRule.find_limits
)
"""Those with thresholds of their own, which the absolute mode reads."""


@lru_cache(maxsize=1)
def list_rules() -> tuple[Rule, ...]:
    """Every rule: the built-in ones first, then others by the names of their entry points.

    A rule of another distribution that cannot be loaded, or has the id of one
    that is there already, is left out with a warning.
    """
    rules: list[Rule] = list(BUILTIN_RULES)
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
                    f"{argument}: {name!r} is not a rule. The rules are {', '.join(known)}"
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
            "the rules of entry point %s = %s are ignored: %s: %s",
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
        raise ValueError(f"category must be one of {', '.join(map(repr, get_args(AlertCategory)))}")
    return item.rule_id
