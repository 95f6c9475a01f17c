"""A backend in a process of its own, as its lane sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from quark_core.artifacts.contract import Payload
from quark_core.backend import Backend, BackendConfig, BackendDefinition, Batch, Capability
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendContractError,
    BackendError,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    SessionStoreError,
)
from quark_core.hosting.child_process import ChildGone, ChildProcess
from quark_core.hosting.messages import (
    CloseBackend,
    Message,
    OpenBackend,
    PutPayload,
    ReadPayload,
    Reply,
    WriteBatches,
)
from quark_core.process import current_process

__all__ = ["can_be_hosted", "open_hosted"]

_log = logging.getLogger("quark")
_MODULE = "quark_core.hosting.worker"
_ERRORS: Mapping[str, type[BackendError]] = {
    kind.__name__: kind
    for kind in (BackendContractError, BackendRejected, BackendUnauthorized, BackendUnavailable)
}

_READING_ERRORS: Mapping[str, type[SessionStoreError]] = {
    kind.__name__: kind for kind in (ArtifactNotFoundError, SessionStoreError)
}


def can_be_hosted(definition: BackendDefinition, config: BackendConfig) -> bool:
    """Whether a backend is to be opened in a process of its own, and another one can find it."""
    opener = definition.open
    module = sys.modules.get(getattr(opener, "__module__", ""))
    name = getattr(opener, "__qualname__", "")
    return (
        definition.own_process
        and config.run_id is not None
        and not config.read_only
        and bool(sys.executable)
        and getattr(module, name, None) is opener
        and opener.__module__ != "__main__"
    )


def open_hosted(definition: BackendDefinition, config: BackendConfig) -> Backend:
    """Open a backend in a process of its own.

    Raises:
        BackendError: As the backend's own opening does.
        BackendUnavailable: The process cannot be started, too.
    """
    if Capability.ARTIFACTS in definition.capabilities:
        return _HostedBackendWithArtifacts(definition, config)
    return _HostedBackend(definition, config)


class _HostedBackend:
    """Hands batches to the process and raises what was raised there.

    A process that has ended is replaced at the next call: what it was at
    counts as not acknowledged.
    """

    def __init__(self, definition: BackendDefinition, config: BackendConfig) -> None:
        self._name = definition.name
        run_id = config.run_id or ""
        run_path = config.run_path or config.storage_dir / ".quark" / "runs" / run_id
        self._folder = run_path.resolve() / "mirrors" / "processes" / definition.name
        self._opening = OpenBackend(
            name=definition.name,
            opener=f"{definition.open.__module__}:{definition.open.__qualname__}",
            capabilities=tuple(sorted(definition.capabilities)),
            config={
                "storage_dir": str(config.storage_dir),
                "run_path": None if config.run_path is None else str(config.run_path),
                "run_id": config.run_id,
                "project": config.project,
                "location": config.location,
                "options": dict(config.options),
            },
            parent=current_process(),
            folder=str(self._folder),
            import_path=tuple(sys.path),
            log_level=_log.getEffectiveLevel(),
        )
        self._child: ChildProcess | None = None
        self._start()

    def write(self, batch: Batch) -> None:
        """See `Backend`."""
        self._ask(WriteBatches((batch,)))

    def write_group(self, batches: Sequence[Batch]) -> None:
        """See `SupportsGroups`."""
        self._ask(WriteBatches(tuple(batches)))

    def close(self) -> None:
        """See `Backend`; the process ends."""
        if self._child is not None:
            try:
                self._ask(CloseBackend())
            finally:
                self._end()

    def _ask(self, message: Message) -> None:
        child = self._child or self._start()
        try:
            reply = child.request(message, Reply)
        except ChildGone as error:
            self._child = None
            raise self._unavailable(f"{error}; see {self._folder / 'process.log'}") from error
        self._take(reply)

    def _start(self) -> ChildProcess:
        try:
            child = ChildProcess(
                _MODULE, f"backend {self._name}", self._folder / "process.log", os.environ
            )
            reply = child.request(self._opening, Reply)
        except (OSError, ChildGone) as error:
            raise self._unavailable(f"its process cannot be started: {error}") from error
        self._child = child
        if reply.outcome != "ok":
            self._end()
        self._take(reply)
        return child

    def _take(self, reply: Reply) -> None:
        for level, text in reply.said:
            _log.log(level, "%s", text)
        if reply.outcome == "ok":
            return
        if reply.outcome == BackendUnauthorized.__name__:
            # Another process has the environment of then, in which the key may be another.
            self._end()
        if reply.outcome in _READING_ERRORS:
            raise _READING_ERRORS[reply.outcome](reply.text)
        kind = _ERRORS.get(reply.outcome)
        if kind is None:
            raise BackendError(f"{reply.outcome}: {reply.text}", backend=self._name)
        error = kind(reply.text, backend=self._name)
        if isinstance(error, BackendUnavailable):
            error.retry_after_s = reply.retry_after_s
        raise error

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _unavailable(self, text: str) -> BackendUnavailable:
        return BackendUnavailable(text, backend=self._name)


class _HostedBackendWithArtifacts(_HostedBackend):
    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`."""
        self._ask(PutPayload(payload.run_id, payload.sha256, payload.size_bytes, str(payload.path)))

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`; a copy, which is gone when it is closed."""
        path = self._folder / f"payload-{uuid.uuid4().hex}"
        try:
            self._ask(ReadPayload(run_id, sha256, str(path)))
            return path.open("rb")
        finally:
            with contextlib.suppress(OSError):  # Windows keeps it while it is open
                path.unlink()

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`; payloads have to be sent."""
        del run_id
        return None
