"""Synchronous halving: all trials train a little, the best of them more, and so on.

One bracket. A rung begins when all trials of the one before have come to an end; whichever worker
sees that first adds the survivors, and all workers would add the same ones. A survivor is a trial
of its own, with the parameters of its parent, whose run it may go on from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.search import PATIENCE_S, Proposal, Search, choose_better
from quark.sweeps.search_options import read_options
from quark_core.backends.coordination import MOST_TRIALS, NewTrial
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import StoredTrial

_SOURCE = "halving"


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
        if not 0 < rate < 1:
            raise SchemaValidationError(f"search: rate must lie between 0 and 1, got {rate:g}")
        if not isinstance(least, int) or least < 1:
            raise SchemaValidationError(f"search: least must be at least 1, got {least!r}")
        if definition.trials is None:
            raise SchemaValidationError(
                'trials must say how many trials the first rung has: search="halving", trials=27'
            )
        if definition.trials > MOST_TRIALS:
            raise SchemaValidationError(f"trials must be at most {MOST_TRIALS:,} for halving")
        if len(definition.goals) > 1:
            raise SchemaValidationError(
                'metric must be one metric for search="halving", which puts trials in an order'
            )
        self._definition = definition
        self._rate = rate
        self._first_seen: dict[int, float] = {}
        self.sizes = _plan_sizes(definition.trials, rate, least)

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """The first rung, or the survivors of the newest one where all of it has ended."""
        own = [trial for trial in trials if trial.origin.get("source") == _SOURCE]
        if not own:
            count = self.sizes[0]
            return [Proposal("rung-0", [self._draw(place) for place in range(count)])]
        newest = max(_find_rung(trial) for trial in own)
        members = [trial for trial in own if _find_rung(trial) == newest]
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
        return {"source": _SOURCE, "rung": rung, **said, **more}


def _plan_sizes(trials: int, rate: float, least: int) -> tuple[int, ...]:
    """How many trials each rung has."""
    sizes = [trials]
    while sizes[-1] > least:
        sizes.append(max(1, min(sizes[-1] - 1, int(sizes[-1] * rate + 1e-9))))
    return tuple(sizes)


def _find_rung(trial: StoredTrial) -> int:
    rung = trial.origin.get("rung")
    return rung if isinstance(rung, int) else 0
