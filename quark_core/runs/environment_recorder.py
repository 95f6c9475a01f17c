"""EnvironmentRecorder: records the environment of a run, and records it again when it changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from quark_core.backends.registry import default_registry
from quark_core.errors import SchemaValidationError
from quark_core.records import EnvironmentSnapshot
from quark_core.records.json_object import JsonObject, normalize_json
from quark_core.runs.environment import GitState, complete_environment
from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")

# What the training thread still imports for its first value comes before it.
_FIRST_S = 0.1
# What is looked at again may be set by the first steps, and what is imported by them.
_LOOKS_S = (5.0, 60.0)
_ENDING_S = 2.0


class EnvironmentRecorder:
    """Records the environment of a run; for the process that leads it.

    It asks `quark_describe_environment` of every plugin in a thread: at the start, 5 s and 60 s
    later, and at the end. The end waits 2 s at most, and what comes later is not recorded.

    Args:
        run: The run.
        known: The facts that were recorded with the start.
        git: The git tree, if there is one.
    """

    def __init__(self, run: OpenRun, known: dict[str, Any], git: GitState | None) -> None:
        self._run, self._known, self._git = run, known, git
        self._started = time.monotonic()
        self._ending = threading.Event()
        self._first: threading.Thread | None = None
        self._later: threading.Thread | None = None
        self._values: dict[str, Any] = {}
        self._session: object = None
        run.writers.add(self)

    def start(self, session: object) -> None:
        """Begin; without a thread to spare the environment stays as it is known at once.

        Args:
            session: The session of the run, which plugins get.
        """
        self._session = session
        self._first = threading.Thread(
            target=self._look_first, name="quark-environment", daemon=True
        )
        self._later = threading.Thread(
            target=self._look_later, name="quark-environment-later", daemon=True
        )
        try:
            self._first.start()
        except RuntimeError:
            self._first = self._later = None
        self._run.background = self._first

    def bind(self) -> None:
        """A forked child leaves this to its parent."""

    def settle(self) -> None:
        """Look for the last time, before the run ends; waits 2 s at most."""
        if self._run.forked:
            return
        self._ending.set()
        deadline = time.monotonic() + _ENDING_S
        for thread in (self._first, self._later):
            if thread is not None and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _look_first(self) -> None:
        self._ending.wait(_FIRST_S)
        try:
            snapshot = complete_environment(self._known, self._git, self._collect_facts())
        except Exception as error:  # noqa: BLE001 - what is known at once must do
            _log.debug("the environment could not be found out: %s", error)
            return
        if self._run.is_over:
            return
        self._record(snapshot)
        if self._later is not None:
            try:
                self._later.start()
            except RuntimeError:
                self._later = None

    def _look_later(self) -> None:
        for look_s in (*_LOOKS_S, None):
            if look_s is None:
                self._ending.wait()
            else:
                self._ending.wait(max(0.0, self._started + look_s - time.monotonic()))
            if self._run.is_over:
                return
            now = {**self._values, **self._collect_facts()}
            if now != self._values:
                self._record(EnvironmentSnapshot(JsonObject(now)))
            if self._ending.is_set():
                return

    def _collect_facts(self) -> dict[str, Any]:
        """The facts of all plugins; those that are no JSON are left out."""
        facts: dict[str, Any] = {}
        described = default_registry().collect("quark_describe_environment", session=self._session)
        for plugin, found in described:
            try:
                if not isinstance(found, Mapping):
                    raise SchemaValidationError(f"environment: no mapping, but {found!r:.60}")
                facts.update(normalize_json(dict(found), "environment"))
            except Exception as error:  # noqa: BLE001 - whatever a plugin may give
                _log.warning("the facts of plugin %s are not recorded: %s", plugin, error)
        return facts

    def _record(self, snapshot: EnvironmentSnapshot) -> None:
        """Record the environment: of several records of it the newest counts."""
        self._values = dict(snapshot.values)
        self._run.emit_lifecycle("environment", snapshot.values)
        default_registry().notify(
            "quark_environment_recorded", session=self._session, values=snapshot.values
        )
