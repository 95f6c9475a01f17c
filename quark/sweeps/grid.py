"""Grid search: every combination of the space's values, or some of them chosen by the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.search import Proposal, Search, count_new
from quark_core.backends.coordination import MOST_TRIALS, NewTrial
from quark_core.records.sweeps import StoredTrial

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
        chosen = [self._make(*each) for each in islice(self._iterate(), added, stop)]
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

    def _make(self, place: int, parameters: dict[str, Any]) -> NewTrial:
        origin: dict[str, Any] = {"source": _SOURCE, "place": place}
        if self._definition.budget is not None:
            origin["budget"] = self._definition.budget
        return NewTrial(parameters=parameters, origin=origin)
