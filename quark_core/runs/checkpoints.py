"""What a checkpoint says of the run that it is of: made by `state_dict`, read where it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from quark_core.config.arguments import check_run_id
from quark_core.errors import SchemaValidationError
from quark_core.records.query import check_step
from quark_core.records.runs import RunContext
from quark_core.records.schema import CURRENT_SCHEMA_VERSION


class Checkpoint(NamedTuple):
    """What a state says.

    Attributes:
        run_id: The run.
        next_step: The step after the last one that the checkpoint has seen, or None.
    """

    run_id: str
    next_step: int | None


def make_state(context: RunContext, step: int | None) -> dict[str, Any]:
    """Plain values that name a run and the last step that a checkpoint has seen.

    Raises:
        SchemaValidationError: `step` is no non-negative integer.
    """
    return {
        "run_id": context.run_id,
        "attempt": context.run.attempt,
        "step": check_step(step, "step"),
        "schema_version": CURRENT_SCHEMA_VERSION,
    }


def read_state(state: object) -> Checkpoint | None:
    """What a state says; None for None.

    Raises:
        SchemaValidationError: It is not what `state_dict` gave.
    """
    if state is None:
        return None
    if not isinstance(state, Mapping) or state.get("run_id") is None:
        raise SchemaValidationError("state must be what session.state_dict() gave")
    step = check_step(state.get("step"), "state['step']")
    run_id = check_run_id(state["run_id"], "state['run_id']")
    return Checkpoint(run_id, None if step is None else step + 1)
