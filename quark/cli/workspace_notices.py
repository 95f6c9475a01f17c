"""`quark serve --notify`: people are told of the runs of workspaces.

A thread of the server's first process looks at each workspace every few seconds: runs that go
on, for alerts that their monitors raise and for being lost, and runs that have ended since.
What was told stands in the control database, so that no restart and no other server on the
same database tells it again.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quark.notifications.notices import (
    NoticeChoice,
    describe_alert,
    describe_end,
    parse_choice,
)
from quark.notifications.notifier import Notifier, Pacing
from quark.notifications.targets import Target, parse_targets
from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import (
    ControlDatabase,
    Deployment,
    check_workspace,
)
from quark_backends.service.server.stores import WorkspaceReader
from quark_core.backends.run_summary import StoredRun
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import EventRecord, format_time
from quark_core.records.base import now_us
from quark_core.records.kinds.findings import ALERT_RAISED
from quark_core.records.query import Query
from quark_core.runs.following import read_changes, read_mark
from quark_core.runs.run_search import build_search, find_runs

if TYPE_CHECKING:
    from quark_backends.store.run_store import RunStore

_log = logging.getLogger("quark.service")

_LOOK_S = 10.0
_END_S = 3.0
_JOIN_S = 10.0
_MAX_RUNS = 500
# How long after its end a run is looked at: what it has left behind may come late.
_RECENT_US = 3600 * 10**6
_KEPT_US = 90 * 86400 * 10**6
_SEVERITIES = ("info", "warning", "error", "critical")
_OF_WORKSPACE = re.compile(r"([a-z][a-z0-9_]*)=([A-Za-z][A-Za-z0-9+.-]*://.*)")
_SINCE = "since"


class WorkspaceNotices:
    """Looks at workspaces, and tells.

    Args:
        config: The server's, with `notify` and `notify_on`.
        pacing: How often people are told.

    Raises:
        SchemaValidationError: A bad target or choice; the message holds nothing of a URL.
    """

    def __init__(self, config: ServiceConfig, pacing: Pacing | None = None) -> None:
        self._choice = parse_choice(config.notify_on or None, "--notify-on")
        self._targets = _sort_targets(config.notify)
        self._deployment = Deployment(config)
        self._pacing = pacing
        self._workspaces: dict[str, _Workspace] = {}
        self._ending = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._watch, name="quark-notices", daemon=True)

    def start(self) -> None:
        """Begin to look; whatever comes from now on is told."""
        for name in self._deployment.control.list_workspaces():
            self._deployment.control.note_told(name, _SINCE)
        self._thread.start()

    def close(self) -> None:
        """Look no more, and send for a moment what is on its way."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        for each in self._workspaces.values():
            each.notifier.close(_END_S)
            each.close()
        self._deployment.close()

    def look(self) -> None:
        """Look once at every workspace; a store that cannot be read costs a warning."""
        for name in self._deployment.control.list_workspaces():
            targets = (*self._targets.get("", ()), *self._targets.get(name, ()))
            if not targets or self._ending.is_set():
                continue
            try:
                workspace = self._workspaces.get(name)
                if workspace is None:
                    workspace = self._workspaces[name] = self._open(name, targets)
                workspace.look()
            except QuarkError as error:
                self._warn(f"workspace {name} cannot be looked at now: {error}")
        self._failed = False

    def _open(self, name: str, targets: Iterable[Target]) -> _Workspace:
        control = self._deployment.control
        # Of what was before the first look nobody wants to be told now.
        since_us = control.note_told(name, _SINCE) or now_us()
        ledger = _ControlLedger(control, name)
        notifier = Notifier(tuple(targets), self._choice, ledger, self._pacing)
        store = self._deployment.open_store(name, read_only=True)
        return _Workspace(name, store, notifier, self._choice, since_us)

    def _watch(self) -> None:
        """The thread."""
        try:
            self._deployment.control.forget_told(now_us() - _KEPT_US)
        except QuarkError as error:
            self._warn(str(error))
        while True:
            try:
                self.look()
            except QuarkError as error:
                self._warn(f"workspaces cannot be looked at now: {error}")
            except Exception:  # noqa: BLE001 - a bug of ours must not end the watch
                if not self._failed:
                    _log.exception("notify: a look failed")
                self._failed = True
            if self._ending.wait(_LOOK_S):
                return

    def _warn(self, message: str) -> None:
        if not self._failed:
            _log.warning("notify: %s", message)
        self._failed = True


class _ControlLedger:
    """What was told of a workspace; see `Ledger`."""

    def __init__(self, control: ControlDatabase, workspace: str) -> None:
        self._control = control
        self._workspace = workspace

    def note(self, key: str) -> bool:
        """See `Ledger`.

        Raises:
            SessionStoreError: The database cannot be written; it is not told then.
        """
        return self._control.note_told(self._workspace, key) is None


@dataclass(slots=True)
class _Seen:
    """How far a run was looked at."""

    mark: str | None = None
    cursor: dict[str, int] = field(default_factory=dict)
    state: str = ""


class _Workspace:
    """One workspace that is looked at."""

    def __init__(
        self,
        name: str,
        store: RunStore,
        notifier: Notifier,
        choice: NoticeChoice,
        since_us: int,
    ) -> None:
        self.notifier = notifier
        self._store = store
        self._reader = WorkspaceReader(store, None, name)
        self._choice = choice
        self._since_us = since_us
        self._seen: dict[str, _Seen] = {}

    def close(self) -> None:
        self._store.close()

    def look(self) -> None:
        """Look at the runs that go on and at those that have ended lately.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        since = format_time(max(self._since_us, now_us() - _RECENT_US))
        found: dict[str, StoredRun] = {}
        for where in ("status == 'running'", f"ended >= '{since}'"):
            search = build_search(where=where, archived=True, limit=_MAX_RUNS)
            for summary in find_runs(self._reader, search):
                found[summary.run_id] = summary.stored
        self._seen = {run_id: seen for run_id, seen in self._seen.items() if run_id in found}
        for run_id, stored in found.items():
            seen = self._seen.setdefault(run_id, _Seen())
            if self._choice.severity is not None:
                self._tell_alerts(run_id, stored, seen)
            if stored.state != seen.state:
                seen.state = stored.state
                self._tell_end(run_id, stored)

    def _tell_end(self, run_id: str, stored: StoredRun) -> None:
        if stored.state == "running":
            return
        reason = None if stored.ending is None else stored.ending.describe()
        if stored.state == "failed" and reason is None:  # of a client that is older
            query = Query(equals={"event_type": "runtime_error"}, limit=1)
            for record in self._reader.read(run_id, EventRecord.KIND, query).to_records():
                payload: Any = getattr(record, "payload", None) or {}
                reason = str(payload.get("message") or "")
        self.notifier.tell(describe_end(stored.run, stored.state, reason))

    def _tell_alerts(self, run_id: str, stored: StoredRun, seen: _Seen) -> None:
        mark = read_mark(self._reader, run_id)
        if mark is not None and mark == seen.mark:
            return
        more = True
        while more:
            changes = read_changes(self._reader, run_id, seen.cursor, kinds=(EventRecord.KIND,))
            events = changes.records.get(EventRecord.KIND)
            for event in () if events is None else events.to_records():
                if isinstance(event, EventRecord):
                    self._tell_alert(stored, event)
            # What is stale is read anew: what was told stands in the ledger.
            cursor = {} if changes.stale else dict(changes.cursor)
            more = (changes.more or changes.stale) and cursor != seen.cursor
            seen.cursor = cursor
        seen.mark = mark

    def _tell_alert(self, stored: StoredRun, event: EventRecord) -> None:
        if event.event_type != ALERT_RAISED or event.time_us < self._since_us:
            return
        if event.severity in _SEVERITIES:
            self.notifier.tell(describe_alert(stored.run, event.payload or {}, event.severity))


def _sort_targets(given: Iterable[str]) -> dict[str, tuple[Target, ...]]:
    """Targets by workspace; "" for all.

    Raises:
        SchemaValidationError: A bad one.
    """
    found: dict[str, tuple[Target, ...]] = {}
    for each in given:
        match = _OF_WORKSPACE.fullmatch(each)
        workspace, url = ("", each) if match is None else (check_workspace(match[1]), match[2])
        if not url.split():
            raise SchemaValidationError("--notify must be a URL, or WORKSPACE=URL")
        found[workspace] = (*found.get(workspace, ()), *parse_targets(url, "--notify"))
    return found
