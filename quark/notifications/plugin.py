"""Notifies people of the alerts and the end of a run."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from quark_core.config import settings
from quark_core.errors import SchemaValidationError
from quark_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from quark.notifications.notifier import RunNotifier
    from quark_core.records import EventRecord
    from quark_core.runs.open_run import OpenRun
    from quark_core.sessions.session import TrainingSession

_log = logging.getLogger("quark")


@hookimpl
def quark_session_opened(session: TrainingSession) -> None:
    """Attach the targets that QUARK_NOTIFY names; a bad value costs a warning, and no run."""
    given = os.environ.get(settings.NOTIFY, "").strip()
    if not given:
        return
    from quark.notifications.notifier import attach_notifier

    try:
        attach_notifier(session.open_run, given, None, settings.NOTIFY)
    except SchemaValidationError as error:
        _log.warning("run %s: notifications are off: %s", session.run_id, error)


@hookimpl
def quark_finding_raised(run: OpenRun, event: EventRecord) -> None:
    """Send an alert."""
    notifier = _find_notifier(run)
    if notifier is not None:
        notifier.notify_alert(event)


@hookimpl
def quark_run_settled(session: TrainingSession, status: str) -> None:
    """Send how the run has ended, and wait for a moment until it is sent."""
    notifier = _find_notifier(session.open_run)
    if notifier is not None:
        notifier.notify_end(status)


def _find_notifier(run: OpenRun) -> RunNotifier | None:
    if not run.extensions:
        return None
    from quark.notifications.notifier import RunNotifier

    found = run.extensions.get(RunNotifier)
    return found if isinstance(found, RunNotifier) else None
