"""The best value of a run's objective, as W&B's summary has it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from quark_backends.wandb.state import WandbState
from quark_core.api import (
    MetricRecord,
    Objective,
    StreamRecord,
    decode_name,
    encode_name,
    find_mode,
    read_objective,
)

_MOST_KEPT = 100


def note_best(state: WandbState, records: Sequence[StreamRecord]) -> None:
    """Note points of the objective that are better than all before them."""
    objective = read_objective(state.config)
    if objective is None or not records or not isinstance(records[0], MetricRecord):
        return
    if state.best_of != _name(objective):
        state.best_of, state.best = _name(objective), []
    key, sign = encode_name(objective.metric), _sign(objective)
    for record in records:
        if not isinstance(record, MetricRecord) or record.metric_key != key or record.rank:
            continue
        if record.attempt > state.best_attempt and record.step is not None:
            state.best_attempt = record.attempt
            forget_from(state, record.step)  # what is done again
        if not isfinite(record.value):
            continue
        if not state.best or sign * record.value > sign * state.best[-1][0]:
            state.best.append((record.value, record.step))
    del state.best[:-_MOST_KEPT]


def forget_from(state: WandbState, step: int) -> None:
    """The run goes on from a step: what it had there and beyond no longer counts."""
    while state.best and (state.best[-1][1] is None or state.best[-1][1] >= step):
        state.best.pop()


def describe_best(state: WandbState) -> dict[str, Any]:
    """What the summary says: the best value, and its step."""
    objective = read_objective(state.config)
    if objective is None or not state.best or state.best_of != _name(objective):
        return {}
    value, step = state.best[-1]
    name = decode_name(encode_name(objective.metric))
    said = {f"quark/best/{name}": value}
    return said if step is None else {**said, f"quark/best_step/{name}": step}


def _name(objective: Objective) -> str:
    return f"{objective.metric}:{_sign(objective)}"


def _sign(objective: Objective) -> int:
    return 1 if find_mode(objective.metric, objective) == "max" else -1
