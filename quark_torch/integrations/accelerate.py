"""An Accelerate tracker: `Accelerator(log_with=QuarkTracker("vision"))`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.tracking import GeneralTracker, on_main_process

from quark_core.api import TrainingSession
from quark_torch.integrations.framework_run import (
    STOP_EVERY_STEPS,
    FrameworkRun,
    find_end_status,
)


class QuarkTracker(GeneralTracker):
    """Logs what `accelerator.log` is given, on the main process.

    `init_trackers(config=…)` becomes the configuration. Calls without a step
    count on from the last one. `accelerator.end_training()` ends the run:
    as failed or interrupted where it is called while an error is handled.

    The loop is the caller's, and so is its end: `if tracker.should_stop(accelerator): break`
    at each step, in all processes, ends it where somebody has asked for that (`quark stop`).
    In a single process `on_stop="raise"` does it without: `accelerator.log` raises.

    Args:
        project: As in `quark.start_run`, as is every further argument. With
            `run_id` that run is resumed instead.
        session: A run that the caller has started and will end.
    """

    name = "quark"
    requires_logging_directory = False
    main_process_only = True

    def __init__(
        self,
        project: str | None = None,
        *,
        session: TrainingSession | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self._run = FrameworkRun(session, arguments, project=project, framework="accelerate")
        self._next_step = 0
        self._asked = 0

    @property
    def tracker(self) -> TrainingSession:
        """The session, for everything else that Quark can log."""
        return self._run.session

    def should_stop(self, accelerator: Any) -> bool:
        """Whether the training is to stop: the same answer in all processes.

        Call it once a step in each of them. Several processes agree every 20 calls.
        """
        if accelerator.num_processes <= 1:
            return self._run.is_to_stop
        self._asked += 1
        if self._asked % STOP_EVERY_STEPS:
            return False
        flag = torch.tensor(float(self._run.is_to_stop), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item() > 0)

    @on_main_process  # type: ignore[untyped-decorator,unused-ignore]
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add to the run's configuration."""
        self._run.add_config(dict(values))

    @on_main_process  # type: ignore[untyped-decorator,unused-ignore]
    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log the numbers among some values at a step."""
        at_step = self._next_step if step is None else int(step)
        self._next_step = at_step + 1
        self._run.log(values, step=at_step)

    @on_main_process  # type: ignore[untyped-decorator,unused-ignore]
    def finish(self) -> None:
        """End the run."""
        error = sys.exc_info()[1]
        self._run.end(find_end_status(error))
