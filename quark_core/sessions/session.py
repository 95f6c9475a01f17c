"""TrainingSession: a run's life, from start to end."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, get_args

import msgspec

from quark_core.backends.contract import DeliveryReport
from quark_core.backends.registry import default_registry
from quark_core.config import settings
from quark_core.config.arguments import IfExists, check_tag
from quark_core.config.migration_hints import (
    explain_argument_errors,
    explain_attribute,
    explain_item,
    refuse_assignments,
)
from quark_core.config.objective import ObjectiveMode
from quark_core.config.redaction import redact_text
from quark_core.delivery.stream import FlushLevel
from quark_core.errors import InvalidRunStateError, QuarkError, SchemaValidationError
from quark_core.presentation import bundle, has_kernel, paint
from quark_core.records import EventRecord, RunStatus, StreamRecord, format_time, parse_time
from quark_core.records.base import now_us
from quark_core.records.checks import check_choice
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import check_index
from quark_core.records.runs import RunContext, StopRequest
from quark_core.records.schema import TERMINAL_STATUSES
from quark_core.runs import attempts, opening
from quark_core.runs.environment import EnvironmentRecorder
from quark_core.runs.open_run import OpenRun, ask_extensions, open_runs
from quark_core.runs.opening import make_state, read_state
from quark_core.runs.primary_store import note_run
from quark_core.sessions.banner import Introduction, find_page, tell_done
from quark_core.sessions.ending import (
    emit_end,
    end_run_of_this_cell,
    is_interruption,
    log_error,
    note_cell,
    say_what_is_left,
    watch_process,
)
from quark_core.sessions.run_config import Belonging, ConfigReads, RunConfig, note_reads
from quark_core.system.exit_status import read_exit_code
from quark_core.system.process import importing
from quark_core.writers.console import CaptureMode, ConsoleCapture
from quark_core.writers.events import LogLines
from quark_core.writers.metrics import StepScope
from quark_core.writers.records import write_records
from quark_core.writers.telemetry import SystemMetrics

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import StoredRun
    from quark_core.writers.artifact_links import UsedArtifact

# Method -> the function that does its work, once it was called.
_found: dict[str, Callable[..., Any]] = {}


def find_method(method: str, feature: str) -> Callable[..., Any]:
    """The function that does the work of a session's method; it gets the session first.

    Args:
        method: The method, as a plugin declares it by `quark_register_session_methods`.
        feature: The plugin of Quark that declares it, for the error.

    Raises:
        QuarkError: No plugin declares it.
    """
    known = _found.get(method)
    if known is not None:
        return known
    for _, declared in default_registry().collect("quark_register_session_methods"):
        place = declared.get(method) if isinstance(declared, Mapping) else None
        if isinstance(place, str):
            module, _, name = place.partition(":")
            function: Callable[..., Any] = getattr(import_module(module), name)
            _found[method] = function
            return function
    raise QuarkError(
        f"{method}: the feature {feature!r} of Quark is not installed, or its plugin was "
        "ignored with a warning. Reinstall quark-tracker"
    )


_FEATURE = "provenance"

SampleIds = str | Callable[[Any], Any] | None
"""How samples get their ids: the name of a field, a function, or by their order."""


class PendingFingerprint:
    """A fingerprint that is being found out; what `fingerprint` and `fingerprint_data` return.

    Attributes:
        key: Its key.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._done = threading.Event()
        self._record: FingerprintRecord | None = None
        self._reason = ""

    @property
    def done(self) -> bool:
        """Whether it is found out, or never will be."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> FingerprintRecord | None:
        """The record, once it is found out; None where there is none, which `reason` tells.

        Args:
            timeout_s: How long to wait; as long as it takes by default.

        Raises:
            TimeoutError: It is not found out yet; it goes on.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"fingerprint {self.key!r} is not ready within {timeout_s} s")
        return self._record

    @property
    def reason(self) -> str:
        """Why there is no record; empty as long as there may be one."""
        return self._reason

    def settle(self, record: FingerprintRecord | None, reason: str = "") -> None:
        """It is found out, or never will be."""
        self._record, self._reason = record, reason
        self._done.set()

    def __repr__(self) -> str:
        state = self._record.digest if self._record else self._reason or "on its way"
        return f"PendingFingerprint({self.key!r}, {state})"


class Fingerprints:
    """What data and outputs were, by digest: `quark why` tells from it what is the same."""

    def fingerprint(
        self,
        key: str,
        value: object,
        *,
        step: int | None = None,
        level: Literal["sample", "full"] = "sample",
    ) -> PendingFingerprint:
        """Record a fingerprint of a value: a digest and a sketch.

        The sketch distinguishes rounding from a change. The value is read during the call. CPU
        arrays are hashed at about 0.2 ms per MB; at level `sample`, larger arrays take no longer.
        Device tensors are copied on the device (up to 256 MB) and hashed in a background thread,
        without a device synchronization.

        Args:
            key: Name, such as "predictions".
            value: An array, tensor, table, image, number, string, or a container of them. For other
                types, only the type is recorded.
            step: Step. Defaults to the step set by `session.step`, or None.
            level: `sample` reads 16 blocks of 64 kB of arrays above 1 MB, `full` reads everything.
                Defaults to `sample`.

        Returns:
            A pending fingerprint. `wait()` returns its record.

        Raises:
            SchemaValidationError: The key, step or level is invalid.
            InvalidRunStateError: The run has ended.
            QuarkError: The provenance feature is not installed.
        """
        found: PendingFingerprint = find_method("fingerprint", _FEATURE)(
            self, key, value, step, level
        )
        return found

    def fingerprint_data(
        self, key: str, source: object, *, level: Literal["sample", "full"] = "sample"
    ) -> PendingFingerprint:
        """Record a fingerprint of a data set in the background, on the lead rank.

        Do not change an array or table until it is done. For a data set with `len()` and `[index]`,
        the call reads 64 items, for up to 5 s, and restores the random states.

        Args:
            key: Name, such as "train".
            source: Path of a file or folder, a glob pattern, an array, tensor or table, or a data
                set of Hugging Face or torch. Also a `.dvc` file or Git LFS pointer.
            level: `sample` reads 16 blocks of 64 kB of each file or array, `full` reads everything.
                Defaults to `sample`.

        Returns:
            A pending fingerprint. `wait()` returns its record, or None if it failed.

        Raises:
            SchemaValidationError: An argument is invalid, or `source` is a stream; use `watch_data`
                for streams.
            InvalidRunStateError: The run has ended.
            QuarkError: The provenance feature is not installed.
        """
        found: PendingFingerprint = find_method("fingerprint_data", _FEATURE)(
            self, key, source, level
        )
        return found

    def watch_data(self, loader: Any, name: str = "train", *, sample_ids: SampleIds = None) -> Any:
        """Record which samples a loader yields; see `quark.watch_data`."""
        return find_method("watch_data", _FEATURE)(self, loader, name, sample_ids)


_log = logging.getLogger("quark")

AUTOMATIC: Literal["auto"] = "auto"

CaptureChoice = Literal["auto", "sys", "fd"] | None

_LEAST_INTERVAL_S = 0.1


class Observers:
    """The machine and the console of one run; whatever of them fails costs a warning.

    Args:
        interval_s: Seconds between readings of the machine; 0 for none.
        capture: How the console is captured, if at all.
    """

    def __init__(self, interval_s: float, capture: CaptureMode | None) -> None:
        self._interval_s = interval_s
        self._capture = capture
        self._parts: list[SystemMetrics | ConsoleCapture] = []

    def start(self, run: OpenRun) -> None:
        """Begin to record, where this process keeps records."""
        if not run.stream.active or run.is_over or run.forked:
            return
        if self._capture is not None:
            self._begin(ConsoleCapture(run, self._capture))
        if self._interval_s > 0:
            self._begin(SystemMetrics(run, self._interval_s))

    def stop(self) -> None:
        """Record what there is so far, and no more."""
        while self._parts:
            part = self._parts.pop()
            try:
                part.stop()
            except Exception:  # noqa: BLE001 - the run must end all the same
                _log.exception("%s could not finish", type(part).__name__)

    def _begin(self, part: SystemMetrics | ConsoleCapture) -> None:
        try:
            part.start()
        except Exception as error:  # noqa: BLE001 - training must begin all the same
            _log.warning("%s is off: %s: %s", type(part).__name__, type(error).__name__, error)
            return
        self._parts.append(part)


def choose_observers(system_metrics: object, capture: object) -> Observers:
    """What a run's arguments and the environment ask for.

    Raises:
        SchemaValidationError: One of them is bad; the message names it.
    """
    return Observers(_choose_interval_s(system_metrics), _choose_mode(capture))


def _choose_interval_s(given: object) -> float:
    if given is None:
        return settings.system_metrics_interval_s()
    if given is True:
        return settings.SYSTEM_METRICS_S
    if given is False:
        return 0.0
    if not isinstance(given, (int, float)) or not math.isfinite(given) or given < 0:
        raise SchemaValidationError(
            f"system_metrics must be True, False or a number of seconds, got {given!r:.60}"
        )
    return max(_LEAST_INTERVAL_S, float(given)) if given else 0.0


def _choose_mode(given: object) -> CaptureMode | None:
    if given is None:
        return None
    mode = check_choice(given, "capture", (AUTOMATIC, "sys", "fd", "none"))
    mode = settings.capture_mode() if mode == AUTOMATIC else mode
    return None if mode == "none" else mode  # type: ignore[return-value]


_JOURNAL_TIMEOUT_S = 1.0

OnStop = Literal["flag", "raise"]


@refuse_assignments
class TrainingSession(LogLines, Belonging, Fingerprints):
    """Open run in this process.

    Made by `start_run`, `resume_run` or `open_run`. As a context manager, it ends the run: as
    completed, as failed after an exception, or as interrupted on KeyboardInterrupt, SystemExit and
    StopRequested. Exceptions propagate. If a sweep stops its trial (`stop=True`), the block ends
    without an exception: the run is completed and the trial is pruned. Thread-safe.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._introduction: Introduction | None = None
        self._observers: Observers | None = None
        self._reads: ConfigReads | None = None

    @classmethod
    @explain_argument_errors
    def start_run(
        cls,
        *,
        project: str,
        config: object = None,
        tags: Iterable[str] | None = None,
        parent_run_id: str | None = None,
        storage_dir: str | Path | None = None,
        strict_mode: bool = False,
        backends: str | Sequence[str] | None = None,
        name: str | None = None,
        notes: str | None = None,
        ranks: str | Iterable[int] | None = None,
        objective: str | None = None,
        mode: ObjectiveMode | None = None,
        fork_from: tuple[object, int] | None = None,
        on_stop: OnStop = "flag",
        system_metrics: bool | float | None = None,
        capture: CaptureChoice = AUTOMATIC,
        group: str | Iterable[str] | None = None,
        version: str | Callable[[], object] | None = None,
        if_exists: IfExists | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> TrainingSession:
        """Start a run and return its session.

        As a context manager, the session ends the run: as completed, as failed after an exception,
        or as interrupted on Ctrl-C.

        Args:
            project: Name of the project.
            config: Hyperparameters and other config values: a mapping, argparse Namespace or
                parser, dataclass, attrs or pydantic object, NamedTuple, SimpleNamespace or
                OmegaConf DictConfig. Copied now; secrets are redacted and interpolations resolved.
            tags: Labels for searching.
            parent_run_id: ID of an existing run that this run descends from.
            storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the
                nearest parent that has a store.
            strict_mode: If True, raise on non-finite values, unusual metric names and the primary
                store's first delivery error. Defaults to False.
            backends: Backends to write to in addition to the primary store, as names or URIs:
                "csv", ["csv:./out", "mlflow"]. "none" stores nothing. Defaults to QUARK_BACKENDS.
            name, notes: Display name and free text.
            ranks: Ranks that record: "zero", "all" or a list. The lowest of them starts and ends
                the run. Defaults to QUARK_RANKS, then "zero".
            objective: Metric that measures the run's quality, such as "val/loss". Defaults to
                QUARK_OBJECTIVE, then to a loss or score found by name.
            mode: "min" or "max". Defaults to the direction implied by the objective's name, then
                "min".
            fork_from: `(run, step)`: the curves of the new run begin with those of `run` up to
                `step`.
            on_stop: Effect of `quark stop`: "flag" sets `stop_requested`; "raise" also raises
                `StopRequested` at the next logging call. Defaults to "flag".
            system_metrics: Whether to record CPU, memory, disk, network and GPU metrics, or the
                interval in seconds. Defaults to QUARK_SYSTEM_METRICS, then 10.
            capture: Console output to record: "sys" (Python), "fd" (child processes too) or None.
                Defaults to QUARK_CAPTURE, then "sys".
            group: Group path or paths, such as "paper/fig3".
            version: Version of the code: a string, or a function that returns one.
            if_exists: Action if a run with this config, seeds and version exists: "skip", "resume"
                or "again". See `already_done`.
            state: Result of `session.state_dict()` from a checkpoint. The run of the checkpoint is
                then resumed after its step, with its config unless you pass one. None starts a new
                run.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            UnknownBackendError: A backend does not exist.
            RunNotFoundError: The parent run, the run to fork or the run of `state` does not exist.
            InvalidRunStateError: The run of `state` is completed or still running.
            SessionStoreError: The primary store cannot be opened, or does not answer within
                QUARK_PERSISTENCE_TIMEOUT_SECONDS (15; 5 s for a Quark server). After a restart by
                the launcher, or with QUARK_OFFLINE=allow, a run starts within 2 s without the
                server, unless QUARK_REQUIRE_SERVICE is set or the run is strict.

        Example:
            with quark.start_run(project="digits", config={"lr": 3e-3}) as session:
                metrics = quark.MetricsLogger(session)
        """
        check_choice(on_stop, "on_stop", get_args(OnStop))
        observers = choose_observers(system_metrics, capture)
        end_run_of_this_cell()
        run = opening.start(
            project=project, config=config, tags=tags, parent_run_id=parent_run_id,
            storage_dir=storage_dir, strict_mode=strict_mode, backends=backends, name=name,
            notes=notes, ranks=ranks, objective=objective, mode=mode, group=group,
            version=version, if_exists=if_exists, fork_from=fork_from, state=state,
        )  # fmt: skip
        session = cls._opened(run, on_stop, observers)
        session._reads = note_reads(run, config)
        return session

    @classmethod
    @explain_argument_errors
    def resume_run(
        cls,
        *,
        run_id: str,
        storage_dir: str | Path | None = None,
        backends: str | Sequence[str] | None = None,
        reopen: bool = False,
        from_step: int | None = None,
        state: Mapping[str, Any] | None = None,
        ranks: str | Iterable[int] | None = None,
        on_stop: OnStop = "flag",
        system_metrics: bool | float | None = None,
        capture: CaptureChoice = AUTOMATIC,
    ) -> TrainingSession:
        """Continue an interrupted, failed or lost run as a new attempt.

        Use `quark.open_run` to read a run without resuming it.

        Args:
            run_id: Run ID, or at least its first 4 characters.
            storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the
                nearest parent that has a store.
            backends, ranks, on_stop, system_metrics, capture: See `start_run`.
            reopen: Whether a completed run may be continued. Defaults to False.
            from_step: First step that is repeated, usually the checkpoint's step plus one. Readers
                ignore what earlier attempts logged from this step on, unless `all_attempts=True`.
                Without it, they ignore the steps that are logged again.
            state: Result of `session.state_dict()`, loaded from a checkpoint of this run. If it has
                a step, `from_step` defaults to the next one.

        Raises:
            SchemaValidationError: An argument is invalid, or the state is that of another run.
            RunNotFoundError: The run does not exist.
            InvalidRunStateError: The run is completed or still running.
            SessionStoreError: The primary store does not answer (within 5 s for a Quark server). A
                run that this machine has led before is resumed within 2 s without the server.
        """
        check_choice(on_stop, "on_stop", get_args(OnStop))
        observers = choose_observers(system_metrics, capture)
        end_run_of_this_cell()
        run = attempts.resume(
            run_id=run_id,
            storage_dir=storage_dir,
            backends=backends,
            reopen=reopen,
            from_step=_find_first_step(state, run_id, from_step),
            ranks=ranks,
        )
        return cls._opened(run, on_stop, observers)

    @classmethod
    def _opened(cls, run: OpenRun, on_stop: OnStop, observers: Observers) -> Self:
        run.raises_on_stop = on_stop == "raise"
        session = cls(run)
        session._observers = observers
        open_runs.add(session)
        default_registry().notify("quark_session_opened", session=session)
        if run.already_done is not None:
            tell_done(run)
            return session
        recorder = run.extensions.get(EnvironmentRecorder)
        if isinstance(recorder, EnvironmentRecorder):
            recorder.start(session)
        note_cell(session)
        watch_process()
        session._introduction = Introduction(run)
        session._introduction.greet()
        observers.start(run)
        default_registry().notify("quark_run_started", context=run.context)
        return session

    @property
    def open_run(self) -> OpenRun:
        """The open run, for reading and writing records directly."""
        return self._run

    @property
    def extensions(self) -> dict[type, object]:
        """State of plugins for this run, by type; empty in a forked child."""
        return self._run.extensions

    @property
    def context(self) -> RunContext:
        """Context of the run, which can be passed to other processes."""
        return self._run.context

    @property
    def run_id(self) -> str | None:
        """ID of the run. None only on a rank that cannot know it."""
        return self._run.context.run_id

    @property
    def run_path(self) -> Path | str:
        """Directory of the run, or its URI in a remote store."""
        return self._run.context.run_path

    @property
    def id(self) -> str | None:
        """ID of the run, like `run_id`."""
        return self._run.context.run_id

    @property
    def name(self) -> str | None:
        """Name of the run, or None."""
        return self._run.context.run.name

    @property
    def config(self) -> RunConfig:
        """Stored config, without secrets; `config.update(…)` changes it."""
        return RunConfig(self._run)

    @property
    def url(self) -> str | None:
        """URL of the run in the web UI of its Quark server, or None.

        Only a server with `quark serve --ui` has a web UI. A run from `quark.open_run` asks the
        server once.
        """
        return find_page(self._run)

    @property
    def project_name(self) -> str:
        """Name of the project."""
        return self._run.context.project_name

    @property
    def status(self) -> str:
        """Status of the run, as known to this process."""
        return self._run.context.status

    @property
    def stop_requested(self) -> StopRequest | None:
        """Request to stop this run, or None.

        It is set within a heartbeat (10 s) of the request, or when the store is reachable again.
        Reading it is as cheap as an attribute. None on ranks that do not record, and in forked
        children.
        """
        return self._run.stop_request

    @property
    def trial(self) -> Any:
        """Trial of a sweep that this run belongs to (`quark.Trial`), or None."""
        try:
            return find_method("trial", "sweeps")(self) if self.extensions else None
        except QuarkError:
            return None  # without the feature there are no trials

    def reload(self) -> RunContext:
        """Read the run from the primary store, and return the updated context.

        Raises:
            SessionStoreError: The primary store cannot be read.
        """
        run = self._run
        if run.reader is not None and run.context.run_id is not None:
            run.flush()
            stored = run.reader.load_run(run.context.run_id)
            with run.lock:
                run.context = msgspec.structs.replace(
                    run.context, project=stored.project, run=stored.run
                )
                run.config, run.fields = stored.config, stored.fields
        return run.context

    def add_tag(self, tag: str) -> RunContext:
        """Add a tag to the run, and return the updated context.

        Args:
            tag: The tag.

        Raises:
            SchemaValidationError: The tag is not a str, empty or too long.
            InvalidRunStateError: The run has ended.
        """
        run = self._run
        checked = check_tag(tag, "tag")
        self._check_open("add_tag")
        with run.lock:
            tags = tuple(sorted({*run.context.run.tags, checked}))
            self._change_run(tags=tags, updated_at=format_time(now_us()))
        run.emit_lifecycle("tag", {"tag": checked})
        run.stream.hand_over(_JOURNAL_TIMEOUT_S)
        return run.context

    def _check_open(self, call: str) -> None:
        if self._run.refusal is not None:
            self._run.refuse(call)

    def _keep_log(self, record: EventRecord) -> None:  # noqa: ARG002
        self._run.stream.hand_over(_JOURNAL_TIMEOUT_S)

    def step(self, step: int | None) -> StepScope:
        """Set the step of the following logging calls that do not pass one.

        Applies to all writers of the run in this process and to all threads: metrics, events, log
        lines, artifacts and batch diagnostics, also if they pass an epoch. `with session.step(n):`
        restores the previous step at the end of the block. A forked child inherits the step. The
        call is as cheap as an attribute.

        Args:
            step: The step. None removes it.

        Raises:
            SchemaValidationError: `step` is not a non-negative integer.
        """
        return StepScope(self._run, step)

    def write(self, records: Iterable[StreamRecord]) -> int:
        """Write records of any kind, and return their number.

        Each record is validated. The session sets run, writer, attempt, rank and sequence; time and
        content are kept. The call waits for the journal, so no record is dropped. A collection is
        accepted as a whole or not at all. A generator is accepted in slices of up to 10,000
        records.

        Args:
            records: The records.

        Raises:
            SchemaValidationError: A record is invalid. The message gives its position.
            InvalidRunStateError: The run has ended, or is open for reading.
            SessionStoreError: The journal took too long. Accepted records are not lost.
        """
        return write_records(self._run, records)

    def use_artifact(
        self, name: str, *, project: str | None = None, step: int | None = None
    ) -> UsedArtifact:
        """Find a version of an artifact to read, and record that this run uses it.

        Any run of the project may have logged it. The call waits for the store.

        Args:
            name: "model:best" (an alias), "model:v3" (a version) or "model" (the newest).
            project: Name of another project. Defaults to the run's project.
            step: First step at which it is used, or None.

        Returns:
            The artifact, with `path`, `read()`, `load()`, `open()` and `copy_to(folder)`.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            ArtifactNotFoundError: The version does not exist. The message lists the existing ones.
            InvalidRunStateError: The run has ended.
            SessionStoreError: The store cannot be read.
        """
        with importing():
            from quark_core.writers.artifact_links import use_artifact

        return use_artifact(self._run, name, project, step)

    def end_run(self, status: RunStatus = "completed") -> RunContext:
        """End the run and return its last context.

        The call waits for the primary store as long as it makes progress. It stops waiting after
        QUARK_EXIT_TIMEOUT_SECONDS (10) without progress, or after 12 times as long in total.
        Mirrors get 2 s, or as long as the store if that variable is set. Another process delivers
        the rest. If records are left for `quark sync`, a message is logged.

        If other processes have the run open, it waits for them for up to
        QUARK_WRITERS_TIMEOUT_SECONDS (2). Their later records are kept.

        Args:
            status: "completed", "failed" or "interrupted". Defaults to "completed".

        Raises:
            SchemaValidationError: The status is invalid.
            InvalidRunStateError: The run has already ended, or is open for reading.
        """
        run = self._run
        check_choice(status, "status", TERMINAL_STATUSES)
        timeout_s = run.measure_budget()
        deadline = time.monotonic() + timeout_s
        with open_runs.ending(self) as was_open:
            if not was_open:
                raise InvalidRunStateError(f"end_run: {run.refusal or 'the run has already ended'}")
            run.settle_writers()
            if run.already_done is not None:
                run.end_stream("an earlier run used this config", 0.0)
                return run.context
            ask_extensions(run.extensions, lambda each: each.settle())
            if run.children is not None:
                # What the run's other writers have logged comes before its end.
                half_s = max(0.0, (deadline - time.monotonic()) / 2)
                run.children.finish(half_s, writers_timeout_s=settings.writers_timeout_s())
            if self._observers is not None:
                self._observers.stop()
            ended_us = now_us()
            emit_end(run, status, ended_us)
        report = run.end_stream(
            f"the run has ended ({status})", max(0.0, deadline - time.monotonic())
        )
        with run.lock:
            moment = format_time(ended_us)
            self._change_run(status=status, updated_at=moment, ended_at=moment)
        if run.is_noted:
            note_run(run.context)
        if not report.complete:
            from quark_core.runs.late_delivery import start_late_delivery

            say_what_is_left(run, report, is_under_way=start_late_delivery(run))
        if self._introduction is not None:
            started_us = parse_time(run.context.run.created_at)
            self._introduction.part(status, (ended_us - started_us) / 1e6)
        default_registry().notify("quark_run_settled", session=self, status=status)
        default_registry().notify("quark_run_ended", context=run.context, report=report)
        return run.context

    def flush(self, level: FlushLevel = "stored", timeout_s: float | None = None) -> None:
        """Wait until everything that this process has logged is safe.

        Args:
            level: "journaled": it survives the death of this process. "durable": it survives a
                power failure. "stored": the primary store has acknowledged it. Defaults to
                "stored".
            timeout_s: Timeout in seconds. Defaults to QUARK_PERSISTENCE_TIMEOUT_SECONDS (15).

        Raises:
            SchemaValidationError: The level is unknown.
            SessionStoreError: The timeout expired. Records are not lost.
        """
        check_choice(level, "level", get_args(FlushLevel))
        self._run.flush(timeout_s, level)

    def report_delivery(self) -> DeliveryReport:
        """Return how many records each backend has received, rejected or not yet received."""
        return self._run.stream.report()

    def report(self, *, short: bool = False, config: bool = True, logs: bool = True) -> Any:
        """Create a report on the run so far, without storing anything.

        Args:
            short: If True, return a `ShortReport`: config, metrics, timers and errors as text, dict
                or JSON, without an analysis. Defaults to False.
            config: Whether to include config, environment, command line and paths. Defaults to
                True.
            logs: Whether to include the newest events and log lines. Defaults to True.

        Returns:
            The report. `str()` is text; `save("report.html")` writes one HTML file.

        Raises:
            InvalidRunStateError: The run stores nothing that can be read.
            SessionStoreError: The store does not answer in time.
        """
        if not short:
            return find_method("report", "page")(self, config=config, logs=logs)
        from quark_core.runs.run_report import read_short_report

        self._run.flush()
        return read_short_report(*self._find_stored("report"))

    def capture_output(self, last: int = 50, *, stream: str | None = None) -> list[str]:
        """Return the newest lines that this run has printed, oldest first.

        Console output is recorded unless `capture=None`. An incomplete last line is included.

        Args:
            last: Maximum number of lines. Defaults to 50.
            stream: "stdout" or "stderr". Defaults to both.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: The run stores nothing that can be read.
            SessionStoreError: The store does not answer in time.
        """
        from quark_core.runs.console_lines import read_text_lines

        check_index(last, "last")
        if stream is not None:
            check_choice(stream, "stream", ("stdout", "stderr"))
        self._run.flush()
        reader, stored = self._find_stored("capture_output")
        return read_text_lines(reader, str(stored.run.id), stream, last)

    def _find_stored(self, call: str) -> tuple[SupportsRead, StoredRun]:
        reader, run_id = self._run.reader, self.run_id
        if reader is None or run_id is None:
            raise InvalidRunStateError(f"{call}: the run stores nothing that could be read back")
        return reader, reader.load_run(run_id)

    def __repr__(self) -> str:
        return f"TrainingSession({self._run.context.describe()})"

    def _repr_html_(self) -> str | None:
        return paint(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)

    def _ipython_display_(self) -> None:
        if not has_kernel() or not self._is_shown_live():
            raise NotImplementedError  # by which IPython asks for `_repr_mimebundle_`

    def _is_shown_live(self) -> bool:
        try:
            return bool(find_method("show_live", "page")(self))
        except Exception:  # noqa: BLE001 - what cannot be shown must not end a cell
            _log.debug("the session cannot be shown live", exc_info=True)
            return False

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Return the state to put into a checkpoint, for resuming the run.

        Args:
            step: Last step of the checkpoint. `resume_run(state=…)` then hides everything that was
                logged after it.

        Returns:
            Plain values: `run_id`, `attempt`, `step`, `schema_version`.

        Raises:
            SchemaValidationError: `step` is not a non-negative integer.
        """
        return make_state(self._run.context, step)

    def to_dict(self) -> dict[str, Any]:
        """Return the context, including project and run, as JSON values."""
        return self._run.context.to_dict()

    if not TYPE_CHECKING:  # for mypy every attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            raise explain_attribute(self, name, "session", "'TrainingSession' object")

        def __getitem__(self, key: object) -> NoReturn:
            raise explain_item(key)

        def __setitem__(self, key: object, value: object) -> NoReturn:
            raise explain_item(key)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TrainingSession belongs to its process and cannot be pickled or copied. Pass "
            "session.context to the other process, and create writers from it there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:  # not bool: type checkers would think that each block may go on behind it
        ends_here = error is not None and any(
            ask_extensions(self.extensions, lambda each: each.catches(error))
        )
        if self not in open_runs.sessions:
            return ends_here
        if error is None:
            try:
                self.end_run("completed")
            except (KeyboardInterrupt, SystemExit) as stop:
                if self in open_runs.sessions:
                    # It came while the end was waited for, which is not done once more.
                    self._end_by(stop, "interrupted")
                raise
            return False
        status: RunStatus = "interrupted" if is_interruption(error) else "failed"
        if isinstance(error, SystemExit):
            self._run.exit_code = read_exit_code(error)
        self._end_by(None if ends_here else error, "completed" if ends_here else status)
        return ends_here

    def _end_by(self, error: BaseException | None, status: RunStatus) -> None:
        try:
            if error is not None:
                self.log_error(error, status)
            self.end_run(status)
        except Exception:  # noqa: BLE001
            # The user's exception is on its way; ours must not take its place.
            _log.exception("the end of run %s could not be recorded", self.run_id)

    def log_error(self, error: BaseException, status: RunStatus) -> None:
        """Log the exception that ends the run."""
        check_choice(status, "status", get_args(RunStatus))
        log_error(self._run, error, status)

    def _change_run(self, **changes: Any) -> None:
        context = self._run.context
        self._run.context = msgspec.structs.replace(
            context, run=msgspec.structs.replace(context.run, **changes)
        )


def _find_first_step(state: object, run_id: object, from_step: int | None) -> int | None:
    """The step that a resumed run begins with: the given one, or the one after its checkpoint's.

    Raises:
        SchemaValidationError: `state` is not what `state_dict` gave, or of another run.
    """
    checkpoint = read_state(state)
    if checkpoint is None:
        return from_step
    # The beginning of an id is as good.
    if not checkpoint.run_id.startswith(str(run_id)):
        raise SchemaValidationError(
            f"state is of run {checkpoint.run_id!r:.60}, not of run_id {run_id!r:.60}"
        )
    return checkpoint.next_step if from_step is None else from_step


start_run = TrainingSession.start_run
resume_run = TrainingSession.resume_run


def open_run(
    run_id: str, storage_dir: str | Path | None = None, *, backend: str | None = None
) -> TrainingSession:
    """Open a run for reading.

    Methods that would write raise InvalidRunStateError. To open a run that another tool stores,
    pass `backend`, for example `open_run(run_id, backend="mlflow+http://127.0.0.1:5000")`.

    Args:
        run_id: Run ID, or at least its first 4 characters. It may also be the name or URI of a
            backend, followed by the run as second argument.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.
        backend: Name or URI of a backend to read from instead of the primary store, such as
            "csv:/data/mirror". Analyses of such a run are not stored.

    Raises:
        RunNotFoundError: The run does not exist.
        SchemaValidationError: The backend cannot be read, is given twice, or lacks a run.
        SessionStoreError: The store does not exist, or cannot be read.
    """
    from quark_core.runs.run_reader import find_backend

    first = find_backend(run_id, storage_dir)
    if first is not None:
        shown = redact_text(first)
        if backend is not None:
            raise SchemaValidationError(
                f"backend is given twice: {shown!r} comes first, and backend= is "
                f"{redact_text(str(backend))!r}. Remove one of them"
            )
        if not isinstance(storage_dir, str):
            raise SchemaValidationError(
                f"run_id must follow the backend: open_run({shown!r}, run_id), got "
                f"{storage_dir!r:.60}. To read from a storage root, call open_run(run_id, "
                "storage_dir, backend=…)"
            )
        return TrainingSession(opening.open_for_reading(storage_dir, None, first))
    if isinstance(storage_dir, str) and "://" in storage_dir:
        shown = redact_text(storage_dir)
        raise SchemaValidationError(
            f"storage_dir must be a folder, but {shown!r} is a URI. To read from a backend, "
            f"call open_run({shown!r}, run_id)"
        )
    return TrainingSession(opening.open_for_reading(run_id, storage_dir, backend))


def end_run(session: TrainingSession | None = None, status: RunStatus = "completed") -> RunContext:
    """End the run of a session.

    Args:
        session: The session. Defaults to the one opened last.
        status: "completed", "failed" or "interrupted". Defaults to "completed".

    Raises:
        InvalidRunStateError: No session is open, or the run has ended.
    """
    return _choose_session(session, "end_run").end_run(status)


def add_tag(session: TrainingSession | str | None = None, tag: str | None = None) -> RunContext:
    """Add a tag to a run: `add_tag(session, tag)` or `add_tag(tag)`.

    Args:
        session: The session, or the tag. Defaults to the session opened last.
        tag: The tag.

    Raises:
        SchemaValidationError: The tag is missing or invalid.
        InvalidRunStateError: No session is open, or the run has ended.
    """
    chosen, text = _split_target(session, tag, "tag")
    return _choose_session(chosen, "add_tag").add_tag(text)


def add_log(
    session: TrainingSession | str | None = None, message: str | None = None, **arguments: Any
) -> EventRecord:
    """Log a message: `add_log(session, message, …)` or `add_log(message, …)`.

    Args:
        session: The session, or the message. Defaults to the session opened last.
        message: The message.
        **arguments: Keywords of `TrainingSession.add_log`.

    Raises:
        SchemaValidationError: The message is missing, or an argument is invalid.
        InvalidRunStateError: No session is open, or the run has ended.
    """
    chosen, text = _split_target(session, message, "message")
    return _choose_session(chosen, "add_log").add_log(text, **arguments)


def watch_data(
    loader: Any,
    name: str = "train",
    *,
    sample_ids: SampleIds = None,
    session: TrainingSession | None = None,
) -> Any:
    """Wrap a loader to record which samples it yields, and in which order.

    The wrapper yields the same batches, raises the same exceptions, and has the length and
    attributes of the loader. Each pass becomes one fingerprint of the run, also an incomplete pass.
    Up to 4 kB of each sample are hashed, or 16 blocks of a larger one. Batches 0 to 3 and batches
    at powers of two are also hashed as a whole. Batches on a device are only counted, to avoid a
    synchronization.

    Args:
        loader: A DataLoader, or another iterable.
        name: Key of the fingerprints. Defaults to "train".
        sample_ids: Key of the batches, or function of a batch, that gives one ID per sample. IDs
            are then recorded instead of contents.
        session: The session. Defaults to the one opened last.

    Returns:
        The wrapped loader.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        InvalidRunStateError: No session is open.
    """
    return _choose_session(session, "watch_data").watch_data(loader, name, sample_ids=sample_ids)


def _split_target(
    session: TrainingSession | str | None, text: str | None, argument: str
) -> tuple[TrainingSession | None, str]:
    """Tell `f(session, text)` from `f(text)`."""
    if text is None and not isinstance(session, TrainingSession):
        session, text = None, session
    if text is None:
        raise SchemaValidationError(f"{argument} must be given")
    return session, text  # type: ignore[return-value]


def _choose_session(session: TrainingSession | None, call: str) -> TrainingSession:
    if session is not None:
        if not isinstance(session, TrainingSession):
            raise SchemaValidationError(
                f"session must be a TrainingSession, not {type(session).__name__}"
            )
        return session
    sessions = [one for one in open_runs.sessions if isinstance(one, TrainingSession)]
    if not sessions:
        raise InvalidRunStateError(f"{call}: no session is open in this process")
    return sessions[-1]
