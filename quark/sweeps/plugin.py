"""Joins the runs of a sweep to their trials."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quark_core.config import settings
from quark_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from quark.sweeps.trial import Trial
    from quark_core.runs.open_run import RunDraft
    from quark_core.sessions.session import TrainingSession

_TRIALS = "quark.sweeps.trial"  # whoever holds a trial has imported it


@hookimpl
def quark_run_starting(draft: RunDraft) -> None:
    """Bind the run to the trial that this process holds, or else to that of QUARK_TRIAL.

    Raises:
        SchemaValidationError: QUARK_TRIAL names no trial of the store.
        SessionStoreError: The store cannot say.
    """
    text = os.environ.get(settings.TRIAL, "").strip()
    if _TRIALS not in sys.modules and not text:
        return
    from quark.sweeps.trial import current_trial

    trial = current_trial.get()
    if trial is None and text:
        from quark.sweeps.sweep import open_given_trial

        trial = open_given_trial(text, draft.storage_dir)
    if trial is not None:
        trial.bind(draft)


@hookimpl
def quark_session_opened(session: TrainingSession) -> None:
    """Give the trial its run, and watch that for faults where the sweep asks for it."""
    trial = find_bound_trial(session)
    if trial is not None and trial.take(session):
        from quark.sweeps.broken_trials import watch_trial

        watch_trial(session, trial)


@hookimpl
def quark_register_session_methods() -> Mapping[str, str]:
    """The function behind `session.trial`."""
    return {"trial": "quark.sweeps.plugin:find_bound_trial"}


def find_bound_trial(session: TrainingSession) -> Trial | None:
    """The trial that a session's run is of, or None."""
    if _TRIALS not in sys.modules:
        return None
    from quark.sweeps.trial import Trial

    found = session.extensions.get(Trial)
    return found if isinstance(found, Trial) else None
