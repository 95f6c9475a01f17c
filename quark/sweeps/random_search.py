"""Random search: each trial is drawn by the sweep's seed and its place, whoever draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.search import Proposal, Search, count_new
from quark_core.backends.coordination import MOST_TRIALS, NewTrial
from quark_core.records.sweeps import StoredTrial


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
        origin: dict[str, Any] = {"source": self._source, "place": place}
        if self._definition.budget is not None:
            origin["budget"] = self._definition.budget
        parameters = self._definition.space.draw(self._definition.seed, place)
        return NewTrial(parameters=parameters, origin=origin)
