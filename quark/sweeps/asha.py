"""ASHA: trials stop at rungs where they are worse than most that came so far; nobody waits.

What trials have come to at a rung stands in the log `<sweep>/reports`, an entry for each report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.random_search import RandomSearch
from quark.sweeps.search import Proposal, choose_better
from quark.sweeps.search_options import read_options
from quark_core.backends.coordination import SupportsCoordination
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import StoredTrial

_SOURCE = "asha"
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
        if not 0 < rate < 1:
            raise SchemaValidationError(f"search: rate must lie between 0 and 1, got {rate:g}")
        if definition.budget is None:
            raise SchemaValidationError(
                'budget must say how many steps a whole trial has: search="asha", budget=100'
            )
        if len(definition.goals) > 1:
            raise SchemaValidationError(
                'metric must be one metric for search="asha", which puts trials in an order'
            )
        self._goal = definition.goals[0]
        self._rate = rate
        self._store = store
        self._log = f"{sweep_id}/reports"
        self._read = 0
        self._costs: dict[int, dict[int, float]] = {}
        self._draws = RandomSearch(definition, _SOURCE)
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
                    f"search: rate {rate:g} makes more than {_MOST_RUNGS:,} rungs from {least} to "
                    f"{budget}: take a smaller one, or a larger least"
                )
            rungs.append(round(step))
            step /= rate
        return tuple(dict.fromkeys(rungs))
    planned = (round(budget * rate**power) for power in range(_RUNGS, 0, -1))
    return tuple(dict.fromkeys(step for step in planned if 1 <= step < budget))
