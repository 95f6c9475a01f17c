"""Binds a run of this process to the trial that it is of.

A trial is held by a loop over a sweep (`current_trial`), or it is named by QUARK_TRIAL, as
`quark sweep run` sets it. The first run that begins meanwhile is the trial's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.config import settings
from quark_core.runs.open_run import RunDraft, RunExtension

if TYPE_CHECKING:
    from quark.sweeps.trial import Trial
    from quark_core.records import RunStatus
    from quark_core.runs.open_run import OpenRun
    from quark_core.sessions.session import TrainingSession

current_trial: ContextVar[Trial | None] = ContextVar("quark_current_trial", default=None)
"""The trial that is being worked at here, or None."""


class TrialBinding(RunExtension):
    """What the run of a trial asks of it.

    Args:
        trial: The trial.
    """

    is_announced = False

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def describe_start(self) -> Mapping[str, Any]:
        """The claim by which the trial is held."""
        claim = self.trial.claim
        said = {"sweep_id": claim.sweep_id, "number": claim.number, "token": claim.token}
        return {"trial": said}

    def describe_end(self, run: OpenRun, status: RunStatus) -> Mapping[str, Any]:
        """The result of the trial; nothing where the status says it all."""
        told = self.trial.tell(run, status)
        return {} if told is None else {"trial": told}

    def summarize(self) -> str:
        """The result of the trial in a line."""
        return self.trial.describe_end()

    def catches(self, error: BaseException) -> bool:
        """Whether an error only ends this trial, and nothing beyond its run."""
        return self.trial.ends_by(error)


def bind_draft(draft: RunDraft) -> None:
    """Make a run that begins now the run of the trial that is held here, if there is one.

    Raises:
        SchemaValidationError: QUARK_TRIAL names no trial of the store.
        SessionStoreError: The store cannot say.
    """
    trial = _find_trial(draft.storage_dir)
    if trial is None or trial.is_taken:
        return
    draft.extensions[TrialBinding] = TrialBinding(trial)
    draft.launch_key = trial.claim.to_text()
    if draft.storage_dir is None:
        draft.storage_dir = trial.storage_dir
    if draft.config is not None:
        draft.config = trial.join_config(draft.config)
        draft.objective = draft.objective or trial.objective
        draft.groups = tuple(sorted({*draft.groups, trial.group}))


def _find_trial(storage_dir: str | Path | None) -> Trial | None:
    trial = current_trial.get()
    text = "" if trial is not None else os.environ.get(settings.TRIAL, "").strip()
    if not text:
        return trial
    from quark.sweeps.given_trial import open_given_trial

    return open_given_trial(text, storage_dir)


def find_bound_trial(session: TrainingSession) -> Trial | None:
    """The trial that a session's run is of, or None."""
    found = session.extensions.get(TrialBinding)
    return found.trial if isinstance(found, TrialBinding) else None
