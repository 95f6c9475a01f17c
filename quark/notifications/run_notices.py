"""Notifies people of a run of this process: its alerts, and how it has ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quark.notifications.ledger import FileLedger
from quark.notifications.notices import describe_alert, describe_end, parse_choice
from quark.notifications.notifier import Notifier
from quark.notifications.targets import NotifyArgument, parse_targets
from quark_core.config import settings
from quark_core.errors import QuarkError
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.runs.open_run import OpenRun, RunExtension

_log = logging.getLogger("quark")

NOTIFIED = "notified"
"""The type of the event that says that people were told, and of what."""

_END_WAIT_S = 3.0
_NOTE_WAIT_S = 1.0
_FOLDER = "notified"


class RunNotifier(RunExtension):
    """Notifies people of the alerts and the end of one run.

    Args:
        run: The run.
        notifier: Sends the notices.
    """

    def __init__(self, run: OpenRun, notifier: Notifier) -> None:
        self._run = run
        self._notifier = notifier

    def __repr__(self) -> str:
        return repr(self._notifier)

    def notify_alert(self, event: EventRecord) -> None:
        """Send an alert that the run has recorded."""
        notice = describe_alert(self._run.context.run, event.payload or {}, event.severity)
        self._notifier.tell(notice)

    def settle(self) -> None:
        """Wait for a moment until the run has the events of what was told."""
        self._notifier.settle(_NOTE_WAIT_S)

    def notify_end(self, status: str) -> None:
        """Send how the run has ended, and wait for a moment until it is sent."""
        run = self._run
        reason = None if run.ending is None else run.ending.describe()
        self._notifier.tell(describe_end(run.context.run, status, reason))
        self.close(min(_END_WAIT_S, settings.exit_timeout_s()))

    def close(self, wait_s: float) -> None:
        """Send nothing more, after waiting so long at most for what is on its way."""
        self._notifier.close(wait_s)


def attach_notifier(
    run: OpenRun,
    notify: NotifyArgument,
    notify_on: str | Iterable[str] | None,
    argument: str = "notify",
) -> None:
    """Have people told of a run that this process leads; in place of whoever was told before.

    Args:
        run: The run.
        notify: Where: a URL, a function of one notice, or several of both.
        notify_on: What; QUARK_NOTIFY_ON by default.
        argument: What errors call `notify`.

    Raises:
        SchemaValidationError: A bad argument; the message holds nothing of a URL.
    """
    targets = parse_targets(notify, argument)
    chosen, name = notify_on, "notify_on"
    if chosen is None:
        chosen, name = os.environ.get(settings.NOTIFY_ON, "").strip() or None, settings.NOTIFY_ON
    choice = parse_choice(chosen, name)
    if not targets or not run.leads or run.forked or not run.stream.active:
        return
    ledger = FileLedger(_find_ledger(run))
    if run.context.run.attempt and not run.begun_offline:
        _take_up(run, ledger)
    before = run.extensions.get(RunNotifier)
    notifier = Notifier(targets, choice, ledger, on_told=lambda key: _note(run, key))
    run.extensions[RunNotifier] = RunNotifier(run, notifier)
    if isinstance(before, RunNotifier):
        before.close(0.0)


def _find_ledger(run: OpenRun) -> Path:
    """On this machine, also of a run that a service keeps."""
    place = run.context.storage_dir / ".quark" / _FOLDER
    return place / f"{run.context.run_id}.jsonl"


def _take_up(run: OpenRun, ledger: FileLedger) -> None:
    """What the attempts before have told, of another machine too."""
    try:
        told = run.read(EventRecord.KIND, Query(equals={"event_type": NOTIFIED})).to_records()
    except QuarkError as error:
        _log.warning("run %s: what was told of it before cannot be read: %s",
                     run.context.run_id, error)  # fmt: skip
        return
    payloads: list[Any] = [getattr(each, "payload", None) or {} for each in told]
    ledger.take_up({str(payload["key"]) for payload in payloads if "key" in payload})


def _note(run: OpenRun, key: str) -> None:
    if not run.is_over:
        run.emit_event(NOTIFIED, "debug", payload=JsonObject({"key": key}))
