"""Where a run that is started leaves another one: `start_run(fork_from=(run, step))`."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quark_core.config import settings
from quark_core.config.arguments import check_run_id, describe_argument
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.query import check_step
from quark_core.runs.open_run import open_runs

_log = logging.getLogger("quark")

_FORM = (
    "fork_from must be a pair (run_id, step): a run, and the last step of it that is kept, "
    "such as (run.run_id, 1000)"
)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The run that a fork leaves, and where.

    Attributes:
        run_id: Its id, or the beginning of it.
        step: The last step that the fork has of it.
    """

    run_id: str
    step: int

    def flush(self) -> None:
        """Bring what this process has logged of that run to the store, where it has it open."""
        run = open_runs.find(self.run_id)
        if run is None or run.forked:
            return
        try:
            run.stream.flush(settings.persistence_timeout_s(), sync=False)
        except QuarkError as error:
            _log.warning("fork_from: not all of run %s is in its store yet: %s", self.run_id, error)


def check_fork_from(fork_from: object, parent_run_id: str | None) -> ForkPoint | None:
    """Return where a run is forked, or None where it is none.

    Args:
        fork_from: What was given: a run (its id, a session or a RunContext) and a step.
        parent_run_id: What was given as the run's parent, checked.

    Raises:
        SchemaValidationError: Not such a pair, or the parent is another run.
    """
    if fork_from is None:
        return None
    if isinstance(fork_from, str) and "?_step=" in fork_from:
        left, _, at = fork_from.partition("?_step=")
        raise SchemaValidationError(f"{_FORM}; {fork_from!r:.80} is ({left!r:.80}, {at:.20}) here")
    if not isinstance(fork_from, (tuple, list)) or len(fork_from) != 2:
        raise SchemaValidationError(f"{_FORM}, got {describe_argument(fork_from)}")
    run, given = fork_from
    run_id = run if isinstance(run, str) else getattr(run, "run_id", None)
    if not isinstance(run_id, str):
        raise SchemaValidationError(
            f"{_FORM}; its run must be an id, a session or a RunContext, not a "
            f"{type(run).__name__}" + (" without an id" if hasattr(run, "run_id") else "")
        )
    check_run_id(run_id, "fork_from[0]")
    step = check_step(given, "fork_from[1]")
    if step is None:
        raise SchemaValidationError(f"{_FORM}; its step must not be None")
    if parent_run_id is None or run_id.startswith(parent_run_id):
        return ForkPoint(run_id, step)
    if parent_run_id.startswith(run_id):
        return ForkPoint(parent_run_id, step)
    raise SchemaValidationError(
        f"parent_run_id ({parent_run_id}) and fork_from ({run_id}) name two runs: the run that is "
        "forked is the parent, so leave parent_run_id out"
    )
