"""What of a run travels in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark_core.context import RunContext
from quark_core.errors import SchemaValidationError
from quark_core.query import check_index
from quark_core.schema import CURRENT_SCHEMA_VERSION

__all__ = ["find_first_step", "make_state"]


def make_state(context: RunContext, step: int | None) -> dict[str, Any]:
    """Plain values that name a run and the last step that a checkpoint has seen.

    Raises:
        SchemaValidationError: `step` is no non-negative integer.
    """
    return {
        "run_id": context.run_id,
        "attempt": context.run.attempt,
        "step": check_index(step, "step"),
        "schema_version": CURRENT_SCHEMA_VERSION,
    }


def find_first_step(state: object, run_id: object, from_step: int | None) -> int | None:
    """The step that a resumed run begins with: the given one, or the one after its checkpoint's.

    Raises:
        SchemaValidationError: `state` is not what `state_dict` gave, or of another run.
    """
    if state is None:
        return from_step
    if not isinstance(state, Mapping) or "run_id" not in state:
        raise SchemaValidationError("state must be what session.state_dict() gave")
    if state["run_id"] != run_id:
        raise SchemaValidationError(
            f"state is of run {state['run_id']!r:.60}, not of run_id {run_id!r:.60}"
        )
    step = check_index(state.get("step"), "state['step']")
    return from_step if from_step is not None or step is None else step + 1
