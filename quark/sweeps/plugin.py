"""Joins the runs of a sweep to their trials."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quark_core.config import settings
from quark_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from quark_core.runs.open_run import RunDraft
    from quark_core.sessions.session import TrainingSession

_BINDING = "quark.sweeps.trial_binding"


@hookimpl
def quark_run_starting(draft: RunDraft) -> None:
    """Bind the run to the trial that this process holds, or that QUARK_TRIAL names."""
    # Whoever holds a trial has imported the module.
    if _BINDING in sys.modules or os.environ.get(settings.TRIAL, "").strip():
        from quark.sweeps.trial_binding import bind_draft

        bind_draft(draft)


@hookimpl
def quark_session_opened(session: TrainingSession) -> None:
    """Give the trial its run."""
    if session.extensions:
        from quark.sweeps.trial_binding import find_bound_trial

        trial = find_bound_trial(session)
        if trial is not None:
            trial.take(session.open_run)


@hookimpl
def quark_register_session_methods() -> Mapping[str, str]:
    """The function behind `session.trial`."""
    return {"trial": f"{_BINDING}:find_bound_trial"}
