"""The helper process of one backend: started when it is needed, again after its end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quark_core.backends.contract import BackendConfig, BackendDefinition
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendContractError,
    BackendError,
    BackendOutcomeUnknown,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
    InvalidRunStateError,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.hosting.child_process import ChildGone, ChildProcess
from quark_core.hosting.messages import Message, OpenBackend, Reply
from quark_core.hosting.opener import describe_opener
from quark_core.system.credentials import list_credentials
from quark_core.system.process import current_process

_log = logging.getLogger("quark")
_MODULE = "quark_core.hosting.worker"
_BACKEND_ERRORS: Mapping[str, type[BackendError]] = {
    kind.__name__: kind
    for kind in (
        BackendContractError,
        BackendOutcomeUnknown,
        BackendRejected,
        BackendUnauthorized,
        BackendUnavailable,
        BackendUnusable,
    )
}
# A refusal of a bucket's credentials is not told apart from a server that is out of reach.
_MAY_BE_REFUSED = (BackendUnauthorized.__name__, BackendUnavailable.__name__)
_OTHER_ERRORS: Mapping[str, type[QuarkError]] = {
    kind.__name__: kind
    for kind in (
        ArtifactNotFoundError,
        InvalidRunStateError,
        RunNotFoundError,
        SchemaValidationError,
        SessionStoreError,
    )
}


class HelperEnded(Exception):
    """The process ended, or was ended, while it was at a request."""


class Helper:
    """Asks the process in which a backend is open, and raises what was raised there.

    A process that has ended is replaced at the next call. Calls of several
    threads wait for each other.

    Args:
        definition: The backend.
        config: What it is opened with.
        folder: Where its processes note that they live, and what they print.
    """

    def __init__(self, definition: BackendDefinition, config: BackendConfig, folder: Path) -> None:
        opener, plugin = describe_opener(definition) or ("", "")
        self._name = definition.name
        self._log_path = folder / ("reader.log" if config.read_only else "process.log")
        self._opening = OpenBackend(
            name=definition.name,
            opener=opener,
            plugin=plugin,
            capabilities=tuple(sorted(definition.capabilities)),
            config={
                "storage_dir": str(config.storage_dir),
                "run_path": None if config.run_path is None else str(config.run_path),
                "run_id": config.run_id,
                "project": config.project,
                "location": config.location,
                "options": dict(config.options),
                "read_only": config.read_only,
                "is_noted": config.is_noted,
                "unasked": config.unasked,
            },
            parent=current_process(),
            folder="" if config.read_only else str(folder),
            # Python's own "" is wherever it was started.
            import_path=tuple(path or os.getcwd() for path in sys.path),
            log_level=_log.getEffectiveLevel(),
        )
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._credentials: frozenset[tuple[str, str]] = frozenset()
        self._finalizer: Any = None

    @property
    def log_path(self) -> Path:
        """Where what the process prints is found."""
        return self._log_path

    @property
    def is_running(self) -> bool:
        """Whether there is a process, as far as one knows."""
        return self._child is not None

    def start(self, timeout_s: float | None = None) -> None:
        """Start the process and open the backend in it, unless that is done.

        Raises:
            BackendUnavailable: It cannot be started, or ended, or took too long.
            QuarkError: As the backend's own opening does.
        """
        self._leave_parent()
        with self._lock:
            self._start(timeout_s)

    def ask(self, message: Message, timeout_s: float | None = None) -> Reply:
        """Send a message and wait for the reply.

        Raises:
            HelperEnded: The process is gone, or did not answer in time.
            QuarkError: As `start`, and what the backend raises.
        """
        self._leave_parent()
        with self._lock:
            reply = self._request(message, timeout_s)
            if reply.outcome in _MAY_BE_REFUSED and self._credentials != list_credentials():
                # A token runs out, and the script has drawn another one since: once more.
                self._end()
                reply = self._request(message, timeout_s)
            self._take(reply)
            return reply

    def _request(self, message: Message, timeout_s: float | None) -> Reply:
        child = self._start()
        try:
            return child.request(message, Reply, timeout_s)
        except ChildGone as error:
            self._forget()
            raise HelperEnded(f"{error}; see {self._log_path}") from error

    def end(self) -> None:
        """Give the process up."""
        self._leave_parent()
        with self._lock:
            self._end()

    def _leave_parent(self) -> None:
        """In a forked child, forget the process, and the lock that another thread may hold."""
        if os.getpid() != self._opening.parent.pid:
            self._lock = threading.Lock()
            self._forget()
            self._opening = msgspec.structs.replace(self._opening, parent=current_process())

    def _start(self, timeout_s: float | None = None) -> ChildProcess:
        if self._child is not None:
            return self._child
        try:
            self._credentials = list_credentials()
            child = ChildProcess(_MODULE, f"backend {self._name}", self._log_path, os.environ)
            self._child = child
            self._finalizer = weakref.finalize(self, child.end, wait_s=0.0)
            self._finalizer.atexit = False
            reply = child.request(self._opening, Reply, timeout_s)
        except (OSError, ChildGone) as error:
            self._forget()
            raise BackendUnavailable(
                f"its process cannot be started: {error}; see {self._log_path}",
                backend=self._name,
            ) from error
        if reply.outcome != "ok":
            self._end()
        self._take(reply)
        return child

    def _take(self, reply: Reply) -> None:
        for level, text in reply.said:
            _log.log(level, "%s", text)
        if reply.outcome == "ok":
            return
        if issubclass(_BACKEND_ERRORS.get(reply.outcome, BackendError), BackendUnusable):
            # Another process has the environment of then: another key, one more package.
            self._end()
        other = _OTHER_ERRORS.get(reply.outcome)
        if other is not None:
            raise other(reply.text)
        kind = _BACKEND_ERRORS.get(reply.outcome)
        if kind is None:
            raise BackendError(reply.text, backend=self._name)
        error = kind(reply.text, backend=self._name)
        if isinstance(error, BackendUnavailable):
            error.retry_after_s = reply.retry_after_s
        raise error

    def _end(self) -> None:
        child = self._child
        self._forget()
        if child is not None:
            child.end()

    def _forget(self) -> None:
        self._child = None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
