"""What a sweep is, as it is kept and as all workers share it: space, metrics, search, bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from quark.sweeps.space import Space, read_space
from quark_core.config.arguments import check_label, describe_argument
from quark_core.config.objective import ObjectiveMode
from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.names import check_name, encode_name

_MOST_METRICS = 20
_MOST_CONSTRAINTS = 20
_MOST_CHARACTERS = 1_000
_MOST_FAILURES = 1_000
_LEAST_LEASE_S, _MOST_LEASE_S = 0.5, 86_400.0
_INT64_MAX = 2**63 - 1
_CONSTRAINT = re.compile(r"\s*(?P<metric>\S.*?)\s*(?P<sign><=|>=)\s*(?P<bound>\S+)\s*")
_SEARCH = re.compile(r"\s*(?P<name>[\w.:+-]+)\s*(?:\((?P<options>[^()]*)\))?\s*")
_OPTION = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>[^=]+?)\s*")

_LOCAL = ("lease_s",)
"""What each worker may say for itself."""


class Goal(NamedTuple):
    """A metric that is to get better.

    Attributes:
        metric: Its name, as it is logged.
        mode: "min" or "max".
    """

    metric: str
    mode: str

    @property
    def key(self) -> str:
        """The metric as it is stored."""
        return encode_name(self.metric)


class Constraint(NamedTuple):
    """What must hold of a metric besides, such as `latency_ms <= 20`."""

    metric: str
    sign: str
    bound: float

    @property
    def key(self) -> str:
        """The metric as it is stored."""
        return encode_name(self.metric)

    def measure(self, value: float) -> float:
        """How far a value breaks it; at most 0 where it keeps it."""
        return value - self.bound if self.sign == "<=" else self.bound - value

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"


class SearchChoice(NamedTuple):
    """Which search, and how it is set.

    Attributes:
        name: Such as `halving`.
        options: Its settings, by name.
    """

    name: str
    options: Mapping[str, float | str | bool]

    def __str__(self) -> str:
        if not self.options:
            return self.name
        said = ", ".join(f"{name}={_write(value)}" for name, value in self.options.items())
        return f"{self.name}({said})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDefinition:
    """A sweep's definition; its parts are named as the arguments of `quark.sweep`."""

    space: Space
    goals: tuple[Goal, ...]
    search: SearchChoice
    trials: int | None = None
    budget: int | None = None
    constraints: tuple[Constraint, ...] = ()
    max_failures: int = 3
    stop: bool = False
    stop_broken: bool = False
    seed: int = 0
    lease_s: float = 60.0

    def to_dict(self) -> dict[str, Any]:
        """As a store keeps it."""
        metrics = [goal.metric for goal in self.goals]
        modes = [goal.mode for goal in self.goals]
        is_one = len(metrics) == 1
        return {
            "space": self.space.to_dict(),
            "metric": metrics[0] if is_one else metrics,
            "mode": modes[0] if is_one else modes,
            "search": str(self.search),
            "trials": self.trials,
            "budget": self.budget,
            "constraints": [str(each) for each in self.constraints],
            "max_failures": self.max_failures,
            "stop": self.stop,
            "stop_broken": self.stop_broken,
            "seed": self.seed,
            "lease_s": self.lease_s,
        }

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> SweepDefinition:
        """A definition out of arguments, or out of what a store keeps; what is missing is default.

        Raises:
            SchemaValidationError: A bad one; the message names it.
        """
        space = read_space(given.get("space"))
        goals = read_goals(given.get("metric"), given.get("mode"))
        made = cls(
            space=space,
            goals=goals,
            search=parse_search(given.get("search", "random")),
            trials=_check_count(given.get("trials"), "trials"),
            budget=_check_count(given.get("budget"), "budget"),
            constraints=read_constraints(given.get("constraints")),
            max_failures=_check_count(given.get("max_failures", 3), "max_failures") or 3,
            stop=_check_flag(given.get("stop", False), "stop"),
            stop_broken=_check_flag(given.get("stop_broken", False), "stop_broken"),
            seed=_check_seed(given.get("seed", 0)),
            lease_s=check_lease(given.get("lease_s", 60.0)),
        )
        if made.max_failures > _MOST_FAILURES:
            raise SchemaValidationError(
                f"max_failures must be at most {_MOST_FAILURES}, got {made.max_failures}"
            )
        return made

    def with_local(self, other: SweepDefinition) -> SweepDefinition:
        """This definition with what `other` may say for itself."""
        changes = {name: getattr(other, name) for name in _LOCAL}
        if _may_have_more_trials(self):
            changes["trials"] = other.trials
        return replace(self, **changes)


def find_difference(kept: SweepDefinition, given: SweepDefinition) -> str | None:
    """In what a definition differs from the one that is kept, in words; None where in nothing.

    Workers may ask for another number of trials, where more can come at any time, and for
    another lease.
    """
    before, after = kept.to_dict(), given.to_dict()
    for name in _LOCAL:
        before.pop(name), after.pop(name)
    # A grid of which some are chosen is in another order than a whole one.
    is_bounded = kept.trials is not None and given.trials is not None
    if _may_have_more_trials(kept) and (is_bounded or kept.search.name != "grid"):
        before.pop("trials"), after.pop("trials")
    for name, value in after.items():
        if before[name] == value:
            continue
        if name != "space":
            return f"{name} is {before[name]!r} there, and {value!r} here"
        places = sorted(set(before[name]) | set(value))
        place = next((p for p in places if before[name].get(p) != value.get(p)), None)
        if place is None:
            continue
        there, here = before[name].get(place), value.get(place)
        return f"space[{place!r}] is {there!r:.80} there, and {here!r:.80} here"
    return None


def _may_have_more_trials(definition: SweepDefinition) -> bool:
    return definition.search.name != "halving"


def parse_search(given: object) -> SearchChoice:
    """A search out of a text such as `halving` or `halving(rate=0.3, least=3)`.

    Raises:
        SchemaValidationError: No such text.
    """
    found = (
        _SEARCH.fullmatch(given)
        if isinstance(given, str) and len(given) <= _MOST_CHARACTERS
        else None
    )
    if found is None:
        raise SchemaValidationError(
            'search must be a text such as "random" or "halving(rate=0.3, least=3)", '
            f"got {describe_argument(given)}"
        )
    options: dict[str, float | str | bool] = {}
    for part in (found["options"] or "").split(","):
        if not part.strip():
            continue
        option = _OPTION.fullmatch(part)
        if option is None:
            raise SchemaValidationError(
                f"search: {part.strip()[:60]!r} is no setting; write name=value"
            )
        options[option["name"]] = _read_option(option["value"])
    return SearchChoice(found["name"], options)


def _read_option(text: str) -> float | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text.strip("'\"")


def _write(value: float | str | bool) -> str:
    return repr(value) if not isinstance(value, str) else value


def read_goals(metric: object, mode: object) -> tuple[Goal, ...]:
    """The metrics that are to get better, and which way.

    Raises:
        SchemaValidationError: A bad one; the message names it.
    """
    if isinstance(metric, str) or metric is None:
        metrics: list[object] = [metric]
    elif isinstance(metric, Sequence) and metric and len(metric) <= _MOST_METRICS:
        metrics = list(metric)
    else:
        raise SchemaValidationError(
            f"metric must be a text or a list of 1 to {_MOST_METRICS} texts, "
            f"got {describe_argument(metric)}"
        )
    modes = [mode] * len(metrics) if isinstance(mode, str) or mode is None else mode
    if not isinstance(modes, Sequence) or len(modes) != len(metrics):
        raise SchemaValidationError(
            f"mode must be one text, or one for each of the {len(metrics)} metrics, "
            f"got {describe_argument(mode)}"
        )
    goals = []
    for name, way in zip(metrics, modes, strict=True):
        if name is None:
            raise SchemaValidationError(
                'metric must say what is to get better, as it is logged: metric="val/acc"'
            )
        key = check_name(name, "metric")
        goals.append(Goal(key, check_choice(way, f"mode of {key!r}", get_args(ObjectiveMode))))
    if len({goal.key for goal in goals}) < len(goals):
        raise SchemaValidationError("metric names the same metric twice")
    return tuple(goals)


def read_constraints(given: object) -> tuple[Constraint, ...]:
    """What must hold besides, such as `["latency_ms <= 20"]`.

    Raises:
        SchemaValidationError: No such texts.
    """
    if given is None:
        return ()
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or len(texts) > _MOST_CONSTRAINTS:
        raise SchemaValidationError(
            f"constraints must be a list of at most {_MOST_CONSTRAINTS} texts, "
            f"got {describe_argument(given)}"
        )
    return tuple(_read_constraint(text) for text in texts)


def _read_constraint(text: object) -> Constraint:
    is_short = isinstance(text, str) and len(text) <= _MOST_CHARACTERS
    found = _CONSTRAINT.fullmatch(text) if is_short else None  # type: ignore[call-overload]
    try:
        bound = float(found["bound"]) if found is not None else math.nan
    except ValueError:
        bound = math.nan
    if found is None or not math.isfinite(bound):
        raise SchemaValidationError(
            "constraints: each must be a text such as 'latency_ms <= 20', with <= or >= and a "
            f"number, got {describe_argument(text)}"
        )
    return Constraint(check_name(found["metric"], "constraints"), found["sign"], bound)


def check_lease(lease_s: object) -> float:
    """How long a trial is held without a word, in seconds.

    Raises:
        SchemaValidationError: No number, or out of bounds.
    """
    is_number = isinstance(lease_s, int | float) and not isinstance(lease_s, bool)
    if not is_number or not _LEAST_LEASE_S <= lease_s <= _MOST_LEASE_S:  # type: ignore[operator]
        raise SchemaValidationError(
            f"lease_s must be {_LEAST_LEASE_S:g} to {_MOST_LEASE_S:g} seconds, "
            f"got {describe_argument(lease_s)}"
        )
    return float(lease_s)  # type: ignore[arg-type]


def _check_count(value: object, argument: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _INT64_MAX:
        raise SchemaValidationError(
            f"{argument} must be a whole number of at least 1, got {describe_argument(value)}"
        )
    return value


def _check_flag(value: object, argument: str) -> bool:
    if not isinstance(value, bool):
        raise SchemaValidationError(
            f"{argument} must be True or False, got {describe_argument(value)}"
        )
    return value


def _check_seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT64_MAX:
        raise SchemaValidationError(
            f"seed must be a whole number of at least 0, got {describe_argument(value)}"
        )
    return value


def check_sweep_name(name: object) -> str:
    """The name of a sweep, which is part of the path of its group.

    Raises:
        SchemaValidationError: No name.
    """
    return check_label(name, "name")
