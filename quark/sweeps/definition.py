"""The definition of a sweep, the contract of a search, and the results of the trials."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, get_args

import msgspec

from quark.sweeps.space import Space, read_space
from quark_core.backends.contract import SupportsPrimary, SupportsSearch
from quark_core.backends.coordination import NewTrial
from quark_core.config.arguments import check_label, describe_argument
from quark_core.config.objective import ObjectiveMode
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.records.names import check_name, encode_name
from quark_core.records.sweeps import StoredTrial

_MOST_METRICS = 20
_MOST_CONSTRAINTS = 20
_MOST_CHARACTERS = 1_000
_MOST_FAILURES = 1_000
_MOST_OPTION = 1_000_000_000
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
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        del said["goals"]
        return {
            "space": said.pop("space").to_dict(),
            "metric": metrics[0] if is_one else metrics,
            "mode": modes[0] if is_one else modes,
            **said,
            "search": str(self.search),
            "constraints": [str(each) for each in self.constraints],
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
            trials=_check_limit(given.get("trials"), "trials"),
            budget=_check_limit(given.get("budget"), "budget"),
            constraints=read_constraints(given.get("constraints")),
            max_failures=_check_limit(given.get("max_failures", 3), "max_failures") or 3,
            stop=_check_flag(given.get("stop", False), "stop"),
            stop_broken=_check_flag(given.get("stop_broken", False), "stop_broken"),
            seed=_check_count(given.get("seed", 0), "seed", 0),
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
            return f"{name} is {before[name]!r}, not {value!r}"
        places = sorted(set(before[name]) | set(value))
        place = next((p for p in places if before[name].get(p) != value.get(p)), None)
        if place is None:
            continue
        there, here = before[name].get(place), value.get(place)
        return f"space[{place!r}] is {there!r:.80}, not {here!r:.80}"
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
            'search must be a string such as "random" or "halving(rate=0.3, least=3)", got '
            f"{describe_argument(given)}"
        )
    options: dict[str, float | str | bool] = {}
    for part in (found["options"] or "").split(","):
        if not part.strip():
            continue
        option = _OPTION.fullmatch(part)
        if option is None:
            raise SchemaValidationError(
                f"search: {part.strip()[:60]!r} is not a setting. Write name=value"
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


def read_options(choice: SearchChoice, defaults: Mapping[str, float]) -> dict[str, float]:
    """The settings of a search, those that are not given by default; all of them are numbers.

    Raises:
        SchemaValidationError: One that the search does not have, or no number within bounds.
    """
    for name, value in choice.options.items():
        if name not in defaults:
            raise SchemaValidationError(
                f"search: {choice.name} has no setting {name!r}. Its settings are "
                f"{', '.join(defaults) or 'none'}"
            )
        if isinstance(value, bool | str):
            raise SchemaValidationError(f"search: {name} must be a number, got {value!r:.60}")
        if not abs(value) <= _MOST_OPTION:
            raise SchemaValidationError(
                f"search: {name} must be a finite number of at most {_MOST_OPTION:,}, "
                f"got {value!r:.40}"
            )
    given = {name: value for name, value in choice.options.items() if not isinstance(value, str)}
    return {**defaults, **given}


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
            f"metric must be a string or a list of 1 to {_MOST_METRICS} strings, got "
            f"{describe_argument(metric)}"
        )
    modes = [mode] * len(metrics) if isinstance(mode, str) or mode is None else mode
    if not isinstance(modes, Sequence) or len(modes) != len(metrics):
        raise SchemaValidationError(
            f"mode must be one string, or one for each of the {len(metrics)} metrics, got "
            f"{describe_argument(mode)}"
        )
    goals = []
    for name, way in zip(metrics, modes, strict=True):
        if name is None:
            raise SchemaValidationError(
                'metric is required: the logged metric to optimize, such as metric="val/acc"'
            )
        key = check_name(name, "metric")
        goals.append(Goal(key, check_choice(way, f"mode of {key!r}", get_args(ObjectiveMode))))
    if len({goal.key for goal in goals}) < len(goals):
        raise SchemaValidationError("metric contains the same metric twice")
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
            f"constraints must be a list of at most {_MOST_CONSTRAINTS} strings, got "
            f"{describe_argument(given)}"
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
            "constraints: each must be a string such as 'latency_ms <= 20', with <= or >= and a "
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


def _check_limit(value: object, argument: str) -> int | None:
    return None if value is None else _check_count(value, argument, 1)


def _check_count(value: object, argument: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _INT64_MAX:
        raise SchemaValidationError(
            f"{argument} must be a whole number of at least {least}, got {describe_argument(value)}"
        )
    return value


def _check_flag(value: object, argument: str) -> bool:
    if not isinstance(value, bool):
        raise SchemaValidationError(
            f"{argument} must be True or False, got {describe_argument(value)}"
        )
    return value


def check_sweep_name(name: object) -> str:
    """The name of a sweep, which is part of the path of its group.

    Raises:
        SchemaValidationError: No name.
    """
    return check_label(name, "name")


# The contract of a search: what it proposes, and which trials it stops at a rung.
#
# A search has no state that another worker must know: each worker opens its own, of the definition
# that all share, and looks at the trials and at the logs of the sweep. So workers come and go, on
# any machine, and whatever happens to one of them the others go on.

PATIENCE_S = 10.0
"""How long the figures of a completed trial are waited for: what a training returns, or what
another store has of its run, comes after the run's end."""


class Proposal(NamedTuple):
    """Trials that are to be added together.

    Attributes:
        key: Where several workers propose under one key, the trials of the first are added and
            the others get those: so the same proposal must have the same key everywhere.
        trials: The trials.
    """

    key: str
    trials: list[NewTrial]


class Search(Protocol):
    """How a sweep chooses its trials.

    Called by one worker from one thread at a time; other workers have one each. What it raises
    ends no training: a `propose` that raises ends the loop over the sweep, and a `report` that
    raises is told once and lets the trial go on. One that says nothing else stops no trial early,
    and holds nothing open.
    """

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """What is to be tried next; asked where a claim has found nothing.

        Args:
            trials: All trials of the sweep, in their order, those that others hold too. Of one
                that has ended, `values` are those of the sweep's metrics where they are known.

        Returns:
            What is to be added; an empty list where there is nothing until trials that run
            have ended; None where there will be nothing more.
        """

    def list_rungs(self, trial: StoredTrial) -> tuple[int, ...] | None:  # noqa: ARG002
        """At which steps `report` is to be called for a trial, rising; None for each step.

        Empty where it stops no trial early.
        """
        return ()

    def report(
        self,
        trial: StoredTrial,  # noqa: ARG002
        values: tuple[float | None, ...],  # noqa: ARG002
        step: int,  # noqa: ARG002
    ) -> bool:
        """Take note of how far a trial has come; returns whether it shall stop there.

        Args:
            trial: A trial that this worker holds.
            values: The newest figure of each of the sweep's metrics at a rung, in their order.
                None, and never NaN, where there is none yet or it is not finite.
            step: The rung, or the step where each one is reported. Where a training logs only
                now and then, the figures may be of a later step than the rung.
        """
        return False

    def close(self) -> None:
        """Let go of what it holds open."""
        return


def choose_better(mode: str, value: float | None) -> float:
    """A figure as one that is better the lower it is; what is missing is worse than any."""
    if value is None or value != value:
        return float("inf")
    return -value if mode == "max" else value


def count_new(trials: Sequence[StoredTrial], source: str) -> int:
    """How many trials a search has added itself, by the `source` of their origin."""
    return sum(trial.origin.get("source") == source for trial in trials)


def fill_values(
    store: SupportsPrimary, trials: Sequence[StoredTrial], definition: SweepDefinition
) -> list[StoredTrial]:
    """Trials, those that have completed without a word with the figures of their runs."""
    return [
        _fill(store, trial, definition)
        if trial.state == "completed" and trial.values is None and trial.run_id is not None
        else trial
        for trial in trials
    ]


def _fill(store: SupportsPrimary, trial: StoredTrial, definition: SweepDefinition) -> StoredTrial:
    reader: object = store
    if not isinstance(reader, SupportsSearch):
        return trial
    try:
        metrics = reader.summarize(trial.run_id or "").metrics
    except QuarkError:
        return trial
    last = {key: figure.last for key, figure in metrics.items()}
    values = tuple(v for goal in definition.goals if (v := last.get(goal.key)) is not None)
    if len(values) < len(definition.goals):
        return trial
    broken = tuple(
        each.measure(value)
        for each in definition.constraints
        if (value := last.get(each.key)) is not None
    )
    is_known = bool(broken) and len(broken) == len(definition.constraints)
    return msgspec.structs.replace(
        trial, values=values, constraints=broken if is_known else trial.constraints
    )


def choose_best(trials: Sequence[StoredTrial], definition: SweepDefinition) -> StoredTrial | None:
    """The completed trial with the best figure of the first metric; of equal ones the first."""
    mode = definition.goals[0].mode
    able = _find_able(trials, definition)
    return min(
        able,
        key=lambda trial: (choose_better(mode, (trial.values or (None,))[0]), trial.number),
        default=None,
    )


def choose_front(trials: Sequence[StoredTrial], definition: SweepDefinition) -> list[StoredTrial]:
    """Completed trials than which no other is as good in all metrics and better in one."""
    able = _find_able(trials, definition)
    costs = {
        trial.number: tuple(
            choose_better(goal.mode, value)
            for goal, value in zip(definition.goals, trial.values or (), strict=True)
        )
        for trial in able
    }

    def is_beaten(trial: StoredTrial) -> bool:
        own = costs[trial.number]
        return any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True))
            for other in costs.values()
        )

    return [trial for trial in able if not is_beaten(trial)]


def _find_able(trials: Sequence[StoredTrial], definition: SweepDefinition) -> list[StoredTrial]:
    """Completed trials that may be the best: with all figures, and within the constraints."""
    able = [
        trial
        for trial in trials
        if trial.state == "completed"
        and trial.values is not None
        and len(trial.values) == len(definition.goals)
        and (not definition.constraints or _keeps(trial))
    ]
    # After halving, figures of a smaller budget are no match for those of a larger one.
    farthest = max((find_rung(trial) for trial in able), default=0)
    return [trial for trial in able if find_rung(trial) == farthest]


def _keeps(trial: StoredTrial) -> bool:
    return trial.constraints is not None and all(broken <= 0 for broken in trial.constraints)


def find_rung(trial: StoredTrial) -> int:
    """How often a trial has survived a halving."""
    rung = trial.origin.get("rung")
    return rung if isinstance(rung, int) else 0
