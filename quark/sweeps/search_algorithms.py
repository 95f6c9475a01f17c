"""The search algorithms: grid, random, ASHA and halving, and how one is found by its name."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from quark.sweeps.definition import (
    PATIENCE_S,
    Proposal,
    Search,
    SearchChoice,
    SweepDefinition,
    choose_better,
    count_new,
    find_rung,
    parse_search,
    read_options,
)
from quark_core.backends.coordination import MOST_TRIALS, NewTrial, SupportsCoordination
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import StoredTrial


def _make_trial(
    definition: SweepDefinition, source: str, place: int, parameters: dict[str, Any]
) -> NewTrial:
    origin: dict[str, Any] = {"source": source, "place": place}
    if definition.budget is not None:
        origin["budget"] = definition.budget
    return NewTrial(parameters=parameters, origin=origin)


def _check_halving(definition: SweepDefinition, rate: float) -> None:
    if not 0 < rate < 1:
        raise SchemaValidationError(f"search: rate must be between 0 and 1, got {rate:g}")
    if len(definition.goals) > 1:
        raise SchemaValidationError(
            f'metric must be a single metric for search="{definition.search.name}", which ranks '
            "trials"
        )


class RandomSearch(Search):
    """Draws trials at random.

    Args:
        definition: Of the sweep; without `trials` there is always one more.
        source: What the trials say of where they come from.
    """

    def __init__(self, definition: SweepDefinition, source: str = "random") -> None:
        self._definition = definition
        self._source = source

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """All that are still to be drawn; without a bound, one."""
        drawn, bound = count_new(trials, self._source), self._definition.trials
        count = 1 if bound is None else min(bound - drawn, MOST_TRIALS)
        if count <= 0:
            return None
        places = range(drawn, drawn + count)
        # As long as the key is the same, so is what stands behind it, up to how much of it.
        return [Proposal(f"{self._source}-{drawn}", [self._draw(place) for place in places])]

    def _draw(self, place: int) -> NewTrial:
        definition = self._definition
        drawn = definition.space.draw(definition.seed, place)
        return _make_trial(definition, self._source, place, drawn)


_SOURCE = "grid"


class GridSearch(Search):
    """Tries all combinations, the last parameter changing first.

    Args:
        definition: Of the sweep; `trials` takes so many of the combinations, chosen by its seed.

    Raises:
        SchemaValidationError: The space has no end, or too many combinations.
    """

    def __init__(self, definition: SweepDefinition) -> None:
        self._definition = definition
        self._size = definition.space.count_grid()

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """The next of them, as many as can be added at once."""
        added = count_new(trials, _SOURCE)
        bound = self._definition.trials
        end = self._size if bound is None else min(bound, self._size)
        if added >= end:
            return None
        stop = min(added + MOST_TRIALS, end)
        chosen = [
            _make_trial(self._definition, _SOURCE, place, parameters)
            for place, parameters in islice(self._iterate(), added, stop)
        ]
        return [Proposal(f"{_SOURCE}-{added}", chosen)]

    def _iterate(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Place and parameters of each, in the order in which they are tried."""
        combinations = enumerate(self._definition.space.iterate_grid())
        if self._definition.trials is None:
            yield from combinations
            return
        # All of them in an order of the seed's, so that more trials later go on with the rest.
        listed = list(combinations)
        random.Random(self._definition.seed).shuffle(listed)
        yield from listed


# ASHA: trials stop at rungs where they are worse than most that came so far; nobody waits.
#
# What trials have come to at a rung stands in the log `<sweep>/reports`, an entry for each report.

_ASHA_SOURCE = "asha"
_RUNGS = 3
_MOST_RUNGS = 1_000


class AshaSearch:
    """Random trials, of which the best part at each rung goes on.

    Args:
        definition: Of the sweep; `budget` is how many steps a whole trial has. Settings: `rate`,
            the part that goes on at a rung (a third by default), `least`, the first rung's step
            (by default such that there are three rungs).
        sweep_id: The sweep.
        store: Where its log is.

    Raises:
        SchemaValidationError: A bad setting, no `budget`, or several metrics.
    """

    def __init__(
        self, definition: SweepDefinition, sweep_id: str, store: SupportsCoordination
    ) -> None:
        options = read_options(definition.search, {"rate": 1 / 3, "least": 0})
        rate, least = float(options["rate"]), int(options["least"])
        _check_halving(definition, rate)
        if definition.budget is None:
            raise SchemaValidationError(
                "budget is required (steps of a full trial), such as budget=100"
            )
        self._goal = definition.goals[0]
        self._rate = rate
        self._store = store
        self._log = f"{sweep_id}/reports"
        self._read = 0
        self._costs: dict[int, dict[int, float]] = {}
        self._draws = RandomSearch(definition, _ASHA_SOURCE)
        self.rungs = _plan_rungs(definition.budget, rate, least)

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """All that are still to be drawn."""
        return self._draws.propose(trials)

    def list_rungs(self, trial: StoredTrial) -> tuple[int, ...] | None:  # noqa: ARG002
        """The same for all trials."""
        return self.rungs

    def report(self, trial: StoredTrial, values: tuple[float | None, ...], step: int) -> bool:
        """Whether it is not among the best part of those that have come to this rung."""
        value = values[0]
        said = {"trial": trial.number, "token": trial.token, "rung": step, "value": value}
        # The same trial at the same rung says it again where an answer was lost.
        request_id = f"{trial.sweep_id}-{trial.number}-{trial.token}-{step}"
        self._store.append_entries(self._log, [json.dumps(said)], request_id=request_id)
        self._catch_up()
        costs = self._costs.setdefault(step, {})
        own = costs[trial.number] = choose_better(self._goal.mode, value)
        better = sum(
            (cost, number) < (own, trial.number)
            for number, cost in costs.items()
            if number != trial.number
        )
        return better >= max(1, int(len(costs) * self._rate + 1e-9))

    def close(self) -> None:
        """Holds nothing."""

    def _catch_up(self) -> None:
        while True:
            entries = self._store.read_entries(self._log, self._read)
            if not entries:
                return
            self._read += len(entries)
            for entry in entries:
                self._note(entry)

    def _note(self, entry: str) -> None:
        """Take note of a report; what is none is passed over, since anybody may write there."""
        try:
            said: Any = json.loads(entry)
            number, rung, value = said["trial"], said["rung"], said["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(number, int) or rung not in self.rungs:
            return
        if value is None or is_number:
            self._costs.setdefault(rung, {})[number] = choose_better(self._goal.mode, value)


def _plan_rungs(budget: int, rate: float, least: int) -> tuple[int, ...]:
    if least > 0:
        rungs: list[int] = []
        step = float(least)
        while round(step) < budget:
            if len(rungs) == _MOST_RUNGS:
                raise SchemaValidationError(
                    f"search: rate {rate:g} creates more than {_MOST_RUNGS:,} rungs from "
                    f"{least} to {budget}. Use a smaller rate, or a larger least"
                )
            rungs.append(round(step))
            step /= rate
        return tuple(dict.fromkeys(rungs))
    planned = (round(budget * rate**power) for power in range(_RUNGS, 0, -1))
    return tuple(dict.fromkeys(step for step in planned if 1 <= step < budget))


# Synchronous halving: all trials train a little, the best of them more, and so on.
#
# One bracket. A rung begins when all trials of the one before have come to an end; whichever worker
# sees that first adds the survivors, and all workers would add the same ones. A survivor is a trial
# of its own, with the parameters of its parent, whose run it may go on from.

_HALVING_SOURCE = "halving"


class HalvingSearch(Search):
    """One bracket of successive halving.

    Args:
        definition: Of the sweep. `trials` is how many the first rung has, `budget` how many steps
            a trial of the last rung has; without one, trials know their rung alone. Settings:
            `rate`, the part of a rung that goes on (a third by default), and `least`, how many
            trials make a rung the last one (1).

    Raises:
        SchemaValidationError: A bad setting, no `trials`, or several metrics.
    """

    def __init__(self, definition: SweepDefinition) -> None:
        options = read_options(definition.search, {"rate": 1 / 3, "least": 1})
        rate, least = float(options["rate"]), options["least"]
        _check_halving(definition, rate)
        if not isinstance(least, int) or least < 1:
            raise SchemaValidationError(f"search: least must be at least 1, got {least!r:.60}")
        if definition.trials is None:
            raise SchemaValidationError(
                "trials is required (number of trials in rung 1), such as trials=27"
            )
        if definition.trials > MOST_TRIALS:
            raise SchemaValidationError(f"trials must be at most {MOST_TRIALS:,} for halving")
        self._definition = definition
        self._rate = rate
        self._first_seen: dict[int, float] = {}
        self.sizes = _plan_sizes(definition.trials, rate, least)

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """The first rung, or the survivors of the newest one where all of it has ended."""
        own = [trial for trial in trials if trial.origin.get("source") == _HALVING_SOURCE]
        if not own:
            count = self.sizes[0]
            return [Proposal("rung-0", [self._draw(place) for place in range(count)])]
        newest = max(find_rung(trial) for trial in own)
        members = [trial for trial in own if find_rung(trial) == newest]
        if newest + 1 >= len(self.sizes):
            return None
        if any(not trial.is_final or self._may_get_figures(trial) for trial in members):
            return []
        survivors = self._choose(members, self.sizes[newest + 1])
        if not survivors:
            return None
        promoted = [self._promote(trial, newest + 1) for trial in survivors]
        return [Proposal(f"rung-{newest + 1}", promoted)]

    def find_budget(self, rung: int) -> int | None:
        """The steps that a trial of a rung has; None where there is no budget."""
        budget = self._definition.budget
        if budget is None:
            return None
        return max(1, round(budget * self._rate ** (len(self.sizes) - 1 - rung)))

    def _may_get_figures(self, trial: StoredTrial) -> bool:
        if trial.state != "completed" or trial.values:
            return False
        since_s = self._first_seen.setdefault(trial.number, time.monotonic())
        return time.monotonic() - since_s < PATIENCE_S

    def _choose(self, members: list[StoredTrial], count: int) -> list[StoredTrial]:
        mode = self._definition.goals[0].mode
        ranked = sorted(
            (trial for trial in members if trial.state == "completed" and trial.values),
            key=lambda trial: (
                any(broken > 0 for broken in trial.constraints or ()),
                choose_better(mode, (trial.values or (None,))[0]),
                trial.number,
            ),
        )
        return ranked[:count]

    def _draw(self, place: int) -> NewTrial:
        parameters = self._definition.space.draw(self._definition.seed, place)
        origin = self._describe(0, {"place": place})
        return NewTrial(parameters=parameters, origin=origin)

    def _promote(self, parent: StoredTrial, rung: int) -> NewTrial:
        origin = self._describe(rung, {"parent": parent.number})
        return NewTrial(parameters=dict(parent.parameters), origin=origin)

    def _describe(self, rung: int, more: dict[str, Any]) -> dict[str, Any]:
        budget = self.find_budget(rung)
        said = {} if budget is None else {"budget": budget}
        return {"source": _HALVING_SOURCE, "rung": rung, **said, **more}


def _plan_sizes(trials: int, rate: float, least: int) -> tuple[int, ...]:
    """How many trials each rung has."""
    sizes = [trials]
    while sizes[-1] > least:
        sizes.append(max(1, min(sizes[-1] - 1, int(sizes[-1] * rate + 1e-9))))
    return tuple(sizes)


def choose_search(given: object) -> SearchChoice:
    """The search that an argument asks for, as a definition has it.

    Args:
        given: A text, or what Optuna has for it.

    Raises:
        SchemaValidationError: No such search.
    """
    if isinstance(given, str):
        return parse_search(given)
    _require_optuna(given)
    from quark.sweeps.optuna_samplers import describe_objects

    return parse_search(describe_objects(given))


def open_search(
    definition: SweepDefinition,
    sweep_id: str,
    store: SupportsCoordination,
    given: object = None,
) -> Search:
    """The search of a sweep, for one worker.

    Args:
        definition: What the sweep is.
        sweep_id: Its id.
        store: Where its trials and logs are.
        given: Optuna's sampler, pruner, or both as a pair, as this process was given them; None
            where it was given a name, or has joined.

    Raises:
        SchemaValidationError: No such search, one that the definition does not fit, Optuna is not
            installed, or the sweep was opened with objects of Optuna and this process has none.
    """
    name = definition.search.name
    if name == "halving":
        return HalvingSearch(definition)
    if name == "asha":
        return AshaSearch(definition, sweep_id, store)
    if name in ("random", "grid"):
        read_options(definition.search, {})
        return RandomSearch(definition) if name == "random" else GridSearch(definition)
    _require_optuna(given if given is not None else str(definition.search))
    from quark.sweeps.optuna_samplers import choose_methods
    from quark.sweeps.optuna_search import OptunaSearch

    return OptunaSearch(definition, sweep_id, store, choose_methods(definition, given))


def _require_optuna(wanted: object) -> None:
    """See that Optuna is installed, which is imported when a sweep needs it and not before."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        what = repr(wanted[:60]) if isinstance(wanted, str) else type(wanted).__name__
        raise SchemaValidationError(
            f'search={what} requires Optuna: pip install "quark-tracker[sweep]". "grid", '
            f'"random", "halving" and "asha" do not ({error})'
        ) from None
