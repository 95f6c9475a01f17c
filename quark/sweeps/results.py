"""What the trials of a sweep have come to: their figures, the best one, the front of several."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.search import choose_better
from quark_core.backends.contract import SupportsPrimary, SupportsSearch
from quark_core.errors import QuarkError
from quark_core.records.sweeps import StoredTrial


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
    farthest = max((_find_rung(trial) for trial in able), default=0)
    return [trial for trial in able if _find_rung(trial) == farthest]


def _keeps(trial: StoredTrial) -> bool:
    return trial.constraints is not None and all(broken <= 0 for broken in trial.constraints)


def _find_rung(trial: StoredTrial) -> int:
    rung = trial.origin.get("rung")
    return rung if isinstance(rung, int) else 0
