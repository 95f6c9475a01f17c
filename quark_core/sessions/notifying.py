"""People are told of a run of this process: its alerts, and how it has ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.config import settings
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.runs.open_run import OpenRun

if TYPE_CHECKING:
    from quark_core.notifications.ledger import FileLedger
    from quark_core.notifications.targets import NotifyArgument

__all__ = [
    "NOTIFIED",
    "attach_notifier",
    "attach_notifier_of_environment",
    "settle_notices",
    "tell_end",
]

_log = logging.getLogger("quark")

NOTIFIED = "notified"
"""The type of the event that says that people were told, and of what."""

_END_WAIT_S = 3.0
_NOTE_WAIT_S = 1.0
_FOLDER = "notified"


def attach_notifier_of_environment(run: OpenRun) -> None:
    """Attach what QUARK_NOTIFY names; a bad value costs a warning, and no run."""
    given = os.environ.get(settings.NOTIFY, "").strip()
    if not given:
        return
    try:
        attach_notifier(run, given, None, settings.NOTIFY)
    except SchemaValidationError as error:
        _log.warning("run %s: nobody is told of it: %s", run.context.run_id, error)


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
    from quark_core.notifications.ledger import FileLedger
    from quark_core.notifications.notices import parse_choice
    from quark_core.notifications.notifier import Notifier
    from quark_core.notifications.targets import parse_targets

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
    before = run.notifier
    run.notifier = Notifier(targets, choice, ledger, on_told=lambda key: _note(run, key))
    if before is not None:
        before.close(0.0)


def settle_notices(run: OpenRun) -> None:
    """Wait for a moment until the run has the events of what was told; called before its end."""
    if run.notifier is not None:
        run.notifier.settle(_NOTE_WAIT_S)


def tell_end(run: OpenRun, status: str) -> None:
    """Tell how a run has ended, and wait for a moment until it is told; never raises."""
    notifier, run.notifier = run.notifier, None
    if notifier is None or run.forked:
        return
    from quark_core.notifications.notices import describe_end

    try:
        notifier.tell(describe_end(run.context.run, status, run.last_error))
        notifier.close(min(_END_WAIT_S, settings.exit_timeout_s()))
    except Exception:  # noqa: BLE001 - the end of the run goes on
        _log.warning("run %s: its end could not be told", run.context.run_id, exc_info=True)


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
