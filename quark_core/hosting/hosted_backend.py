"""A backend in a process of its own, as its lane and its readers see it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
from quark_core.backends.coordination import MOST_ENTRIES
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
    from quark_core.backends.contract import Generation, RunLocation
    from quark_core.backends.coordination import AppendedEntries, NewTrial, TrialWish
    from quark_core.backends.curves import Cursor, CurveQuery, CurveSet, RunChanges, RunHeads
    from quark_core.backends.edits import BelongingEdit, RunEdit, StoredGroup, StoredProject
    from quark_core.backends.grids import Grid, GridQuery
    from quark_core.backends.run_pages import PageSearch, RunNames, RunPage
    from quark_core.backends.run_summary import RunSummary, StoredRun
    from quark_core.backends.series import Series
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch
    from quark_core.records.runs import StopRequest
    from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState, TrialResult
    from quark_core.system.process import ProcessIdentity

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
            "backend %s works in this process, and can end it: Python's own program is not known "
            "(sys.executable is empty)",
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
    parts = [part for one, part in _PARTS.items() if one in definition.capabilities]
    kind = type("HostedBackend", (*parts, _HostedBackend), {})
    return cast(Backend, kind(definition, config))


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


class _Reads(_HostedBackend):
    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        return cast("Columns", self._read("read", run_id, kind, query))

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return cast("StoredRun", self._read("load_run", run_id))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        return cast("list[StoredRun]", self._read("list_runs", project=project, limit=limit))


class _Primary(_HostedBackend):
    def locate(self, run_id: str) -> RunLocation:
        """See `SupportsPrimary`."""
        return cast("RunLocation", self._read("locate", run_id))


class _Replays(_HostedBackend):
    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        return cast("list[Batch]", self._read("read_batches", run_id, writer_id, start, limit))


class _Series(_HostedBackend):
    def read_series(
        self,
        run_id: str,
        key: str,
        *,
        max_points: int | None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """See `SupportsSeries`."""
        named: dict[str, Any] = {"max_points": max_points, "all_attempts": all_attempts}
        if rank is not None:
            named["rank"] = rank
        return cast("Series", self._read("read_series", run_id, key, **named))

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


class _Changes(_HostedBackend):
    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """See `SupportsChanges`."""
        return cast("CurveSet", self._read("read_series_many", run_id, query))

    def read_heads(self, run_id: str) -> RunHeads:
        """See `SupportsChanges`."""
        return cast("RunHeads", self._read("read_heads", run_id))

    def read_changes(
        self,
        run_id: str,
        cursor: Cursor,
        *,
        kinds: Sequence[str],
        keys: Sequence[str] | None = None,
        all_attempts: bool = False,
        max_rows: int,
    ) -> RunChanges:
        """See `SupportsChanges`."""
        named = {"kinds": kinds, "keys": keys, "all_attempts": all_attempts, "max_rows": max_rows}
        return cast("RunChanges", self._read("read_changes", run_id, dict(cursor), **named))

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`."""
        return cast(str, self._read("read_mark", run_id))


class _Search(_HostedBackend):
    def search(self, search: RunSearch) -> list[RunSummary]:
        """See `SupportsSearch`."""
        return cast("list[RunSummary]", self._read("search", search))

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        return cast("RunSummary", self._read("summarize", run_id))


class _Pages(_HostedBackend):
    def search_page(self, search: PageSearch) -> RunPage:
        """See `SupportsPages`."""
        return cast("RunPage", self._read("search_page", search))

    def list_names(self, project: str | None, text: str, limit: int) -> RunNames:
        """See `SupportsPages`."""
        return cast("RunNames", self._read("list_names", project, text, limit))


class _Grid(_HostedBackend):
    def read_grid(self, run_id: str, query: GridQuery) -> Grid:
        """See `SupportsGrid`."""
        return cast("Grid", self._read("read_grid", run_id, query))


class _Edits(_HostedBackend):
    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `SupportsEdits`."""
        call = CallMethod("edit_run", dump_value(((run_id, edit), {"by": by})))
        return cast("StoredRun", self._ask(call))

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `SupportsEdits`."""
        call = CallMethod("request_stop", dump_value(((run_id,), {"by": by, "reason": reason})))
        return cast("StopRequest", self._ask(call))

    def find_stop(self, run_id: str) -> StopRequest | None:
        """See `SupportsEdits`."""
        return cast("StopRequest | None", self._read("find_stop", run_id))


class _Belonging(_HostedBackend):
    def list_groups(self, project: str | None = None) -> list[StoredGroup]:
        """See `SupportsBelonging`."""
        return cast("list[StoredGroup]", self._read("list_groups", project))

    def load_project(self, project: str) -> StoredProject:
        """See `SupportsBelonging`."""
        return cast("StoredProject", self._read("load_project", project))

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """See `SupportsBelonging`."""
        call = CallMethod("update_project", dump_value(((project, edit), {"by": by})))
        return cast("StoredProject", self._ask(call))

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """See `SupportsBelonging`."""
        call = CallMethod("update_group", dump_value(((project, path, edit), {"by": by})))
        return cast("StoredGroup", self._ask(call))


class _Coordination(_HostedBackend):
    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """See `SupportsCoordination`."""
        more = {"max_failures": max_failures}
        return cast("StoredSweep", self._change("open_sweep", (project, name, definition), more))

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        return cast("StoredSweep", self._change("update_sweep", (sweep_id, state), {"by": by}))

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
        found = self._change("add_trials", (sweep_id, list(trials)), {"key": key})
        return cast("list[StoredTrial]", found)

    def claim_trial(
        self,
        sweep_id: str,
        *,
        request_id: str,
        worker: ProcessIdentity,
        lease_s: float,
        wish: TrialWish | None = None,
    ) -> StoredTrial | None:
        """See `SupportsCoordination`."""
        asked = {"request_id": request_id, "worker": worker, "lease_s": lease_s, "wish": wish}
        return cast("StoredTrial | None", self._change("claim_trial", (sweep_id,), asked))

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """See `SupportsCoordination`."""
        told = (sweep_id, number, token, result)
        return cast("StoredTrial", self._change("settle_trial", told, {"lease_s": lease_s}))

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """See `SupportsCoordination`."""
        found = self._change("append_entries", (log, list(entries)), {"request_id": request_id})
        return cast("AppendedEntries", found)

    def read_entries(self, log: str, start: int, *, limit: int = MOST_ENTRIES) -> list[str]:
        """See `SupportsCoordination`."""
        return cast("list[str]", self._read("read_entries", log, start, limit=limit))

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """See `SupportsCoordination`."""
        told = (run_id, field, expect, value)
        return cast(bool, self._change("compare_and_set", told, {"by": by}))

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """See `SupportsCoordination`."""
        told = (project, path, field, expect, value)
        return cast(bool, self._change("compare_and_set_group", told, {"by": by}))

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """See `SupportsCoordination`."""
        return cast("list[StoredSweep]", self._read("list_sweeps", project))

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """See `SupportsCoordination`."""
        return cast("StoredSweep", self._read("load_sweep", sweep_id))

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`."""
        found = self._read("list_trials", sweep_id, start=start, limit=limit)
        return cast("list[StoredTrial]", found)

    def _change(self, method: str, values: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        try:
            return self._ask(CallMethod(method, dump_value((values, dict(named)))))
        except BackendUnavailable as error:
            raise SessionStoreError(f"backend {self._name}: {error}") from error


class _Generations(_HostedBackend):
    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        found = self._ask(CallMethod("write_generation", dump_value(((generation,), {}))))
        return cast(int, found)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        return cast("Columns", self._read("read_outputs", run_id, kind, analyzer))


_PARTS: Mapping[Capability, type[_HostedBackend]] = {
    Capability.PRIMARY: _Primary,
    Capability.READ: _Reads,
    Capability.GROUPS: _Groups,
    Capability.REPLAY: _Replays,
    Capability.SERIES: _Series,
    Capability.CHANGES: _Changes,
    Capability.SEARCH: _Search,
    Capability.PAGES: _Pages,
    Capability.GRID: _Grid,
    Capability.GENERATIONS: _Generations,
    Capability.EDITS: _Edits,
    Capability.BELONGING: _Belonging,
    Capability.COORDINATION: _Coordination,
    Capability.ARTIFACTS: _Artifacts,
}


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
