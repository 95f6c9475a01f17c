"""The contract of a search: what it proposes, and which trials it stops at a rung.

A search has no state that another worker must know: each worker opens its own, of the definition
that all share, and looks at the trials and at the logs of the sweep. So workers come and go, on
any machine, and whatever happens to one of them the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quark_core.backends.coordination import NewTrial
from quark_core.records.sweeps import StoredTrial

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
