"""A backend in a process of its own, as its lane and its readers see it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from quark_core.backends.contract import (
    SOURCES_OPTION,
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
    Payload,
)
from quark_core.backends.methods import CHANGING_METHODS, list_methods
from quark_core.backends.registry import PROTOCOLS
from quark_core.config import settings
from quark_core.config.settings import list_credentials
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
from quark_core.hosting.protocol import (
    CallMethod,
    CloseBackend,
    Message,
    OpenBackend,
    PutPayload,
    ReadPayload,
    Reply,
    WriteBatches,
    describe_opener,
    dump_value,
    load_value,
)
from quark_core.system.process import current_process

if TYPE_CHECKING:
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query

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


# A backend that is at one write for so long does nothing any more. Payloads may take longer.
_WRITE_TIMEOUT_S = 600.0


def can_be_hosted(definition: BackendDefinition, config: BackendConfig) -> bool:
    """Whether a backend is to be opened in a process of its own, and another one can find it."""
    if not definition.own_process or config.read_only or describe_opener(definition) is None:
        return False
    if not sys.executable:
        _log.warning(
            "backend %s runs in the training process and can end it, because the path of the "
            "Python interpreter is unknown (sys.executable is empty)",
            definition.name,
        )
    return bool(sys.executable)


def open_hosted(definition: BackendDefinition, config: BackendConfig) -> Backend:
    """Open a backend in a process of its own.

    What is opened has what the definition declares, except for removal, which
    only commands do. A primary is read by a second process, which opens it
    for reading only when it is first asked.

    Raises:
        QuarkError: As the backend's own opening does.
        BackendUnavailable: The process cannot be started, too.
        SessionStoreError: That of a primary, or it does not open within
            QUARK_PERSISTENCE_TIMEOUT_SECONDS.
    """
    return cast(Backend, _make_class(definition.capabilities)(definition, config))


class _HostedBackend:
    """Hands batches to the process and raises what was raised there.

    A process that has ended is replaced at the next call: what it was at
    counts as not acknowledged.
    """

    def __init__(self, definition: BackendDefinition, config: BackendConfig) -> None:
        self._definition = definition
        self._name = definition.name
        self._folder = _choose_folder(definition, config)
        self._is_idempotent = Capability.IDEMPOTENT in definition.capabilities
        self._writer = Helper(definition, config, self._folder)
        if Capability.PRIMARY not in definition.capabilities:
            # What is sent there is decided here, so that nothing crosses that is not wanted.
            self.keeps_sources = config.options.get(SOURCES_OPTION) == "1"
        reading = replace(config, read_only=True)
        self._reader = Helper(definition, reading, self._folder)
        if Capability.PRIMARY in definition.capabilities:
            weakref.finalize(self, _remove_unless_told, self._folder)
        if Capability.PRIMARY not in definition.capabilities:
            self._writer.start(_WRITE_TIMEOUT_S)
            return
        try:
            self._writer.start(settings.persistence_timeout_s())
        except BackendUnavailable as error:
            raise SessionStoreError(f"backend {self._name}: {error}") from error

    def write(self, batch: Batch) -> None:
        """See `Backend`."""
        self._write((batch,))

    def close(self) -> None:
        """See `Backend`; the process ends."""
        try:
            if self._writer.is_running:
                self._ask(CloseBackend())
        finally:
            self._writer.end()
            _tidy(self._folder)

    def _write(self, batches: tuple[Batch, ...]) -> None:
        try:
            self._writer.ask(WriteBatches(batches), _WRITE_TIMEOUT_S)
        except HelperEnded as error:
            kind = BackendUnavailable if self._is_idempotent else BackendOutcomeUnknown
            raise kind(str(error), backend=self._name) from error

    def _ask(self, message: Message) -> Any:
        """Ask the process that writes."""
        try:
            reply = self._writer.ask(message)
        except HelperEnded as error:
            raise BackendUnavailable(str(error), backend=self._name) from error
        return load_value(reply.value) if reply.value else None

    def _read(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Ask the process that reads."""
        try:
            reply = self._reader.ask(CallMethod(method, dump_value((arguments, named))))
        except (HelperEnded, BackendUnavailable) as error:
            raise SessionStoreError(f"backend {self._name}: {error}") from error
        return load_value(reply.value)


class _Groups(_HostedBackend):
    def write_group(self, batches: Sequence[Batch]) -> None:
        """See `SupportsGroups`."""
        self._write(tuple(batches))


class _Artifacts(_HostedBackend):
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


class _Series(_HostedBackend):
    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; the parts are fetched one by one."""
        token = uuid.uuid4().hex
        self._read("iterate", token, run_id, kind, query, rows=rows)
        try:
            while (part := self._read("next_part", token)) is not None:
                yield part
        finally:
            with contextlib.suppress(SessionStoreError):
                self._read("end_iteration", token)


# What is not asked for by one call.
_PARTS: Mapping[Capability, type[_HostedBackend]] = {
    Capability.GROUPS: _Groups,
    Capability.SERIES: _Series,
    Capability.ARTIFACTS: _Artifacts,
}
_LEFT_OUT = frozenset({Capability.REMOVAL})
# The lane does not wait for a store that is out of reach: it is told so and comes again.
_RAISES_UNAVAILABLE = (Capability.EDITS, Capability.BELONGING, Capability.GENERATIONS)


def _make_class(capabilities: frozenset[Capability]) -> type[_HostedBackend]:
    """A class that has the methods of these capabilities, as the contract declares them."""
    parts = tuple(part for one, part in _PARTS.items() if one in capabilities)
    made: dict[str, Any] = {}
    for capability in PROTOCOLS.keys() & capabilities - _LEFT_OUT:
        for method in list_methods(PROTOCOLS[capability]):
            if not any(hasattr(part, method.__name__) for part in (_HostedBackend, *parts)):
                made[method.__name__] = _forward(method, capability)
    return type("HostedBackend", (*parts, _HostedBackend), made)


def _forward(method: Callable[..., Any], capability: Capability) -> Callable[..., Any]:
    """What calls a method of the contract in the process that writes, or in the one that reads."""
    name = method.__name__

    @functools.wraps(method)
    def read(self: _HostedBackend, *arguments: Any, **named: Any) -> Any:
        return self._read(name, *arguments, **named)

    @functools.wraps(method)
    def change(self: _HostedBackend, *arguments: Any, **named: Any) -> Any:
        try:
            return self._ask(CallMethod(name, dump_value((arguments, named))))
        except BackendUnavailable as error:
            if capability in _RAISES_UNAVAILABLE:
                raise
            raise SessionStoreError(f"backend {self._name}: {error}") from error

    return change if name in CHANGING_METHODS else read


def _remove_unless_told(folder: Path) -> None:
    """Remove a folder of our own, unless a process has printed something there."""
    if not any(path.stat().st_size for path in folder.glob("*.log")):
        shutil.rmtree(folder, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what is empty of a folder of our own: mostly the processes have printed nothing."""
    if any(folder.glob("*.json")):
        return  # another helper lives
    with contextlib.suppress(OSError):  # on Windows it is open, and a folder may hold something
        for path in folder.glob("*.log"):
            if not path.stat().st_size:
                path.unlink()
        folder.rmdir()
        folder.parent.rmdir()


def _choose_folder(definition: BackendDefinition, config: BackendConfig) -> Path:
    """Where a backend's processes are noted, and what they print.

    A mirror's is with the run. A primary may have its store at that place, in
    which nothing may be before it, and is made for several processes at once.
    """
    if Capability.PRIMARY in definition.capabilities:
        return Path(tempfile.mkdtemp(prefix=f"quark-{definition.name}-"))
    run_path = config.run_path or config.storage_dir / ".quark" / "runs" / (config.run_id or "")
    return run_path.resolve() / "mirrors" / "processes" / definition.name
