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
from quark_core.config.arguments import IfDone, check_tag
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
        """Note what an output was: a digest, and a sketch that tells rounding from change.

        The value is taken as it is now. Values of the CPU are hashed in the call: about 0.2 ms
        for 1 MB, and no more for a larger array at level `sample`. Tensors on a device are
        copied there, 256 MB at most, and hashed by a thread: nobody waits for the device.

        Args:
            key: Name, such as `predictions`.
            value: An array, tensor, table, image, number, text, or containers of them. Parts of
                another type count by their type alone, which the fingerprint says.
            step: Step counter; by default what `session.step` has set, or None.
            level: `full` looks at all of arrays above 1 MB, `sample` at 16 places of 64 kB.

        Returns:
            A PendingFingerprint; `.wait()` gives the record.

        Raises:
            SchemaValidationError: A bad key, step or level; never for what the value is.
            InvalidRunStateError: The run has ended.
            QuarkError: The feature provenance is not installed.
        """
        found: PendingFingerprint = find_method("fingerprint", _FEATURE)(
            self, key, value, step, level
        )
        return found

    def fingerprint_data(
        self, key: str, source: object, *, level: Literal["sample", "full"] = "sample"
    ) -> PendingFingerprint:
        """Note what data a run has, beside training; returns at once.

        Only the rank that leads the run does it. An array or table must not be changed until it
        is done. Of a dataset with `len()` and `[index]`, 64 items are read in this call, 5 s at
        most, and random states are put back.

        Args:
            key: Name, such as `train`.
            source: The path of a file or folder, or a pattern; an array, tensor, table; a
                dataset of Hugging Face (its own fingerprint), of torch or alike; a `.dvc` file or
                Git LFS pointer (the hash in it).
            level: `sample` reads 16 places of 64 kB of each file or array, `full` all of it.

        Returns:
            A PendingFingerprint; `.wait()` gives the record, or None where it failed.

        Raises:
            SchemaValidationError: A bad argument, or a stream: see `watch_data`.
            InvalidRunStateError: The run has ended.
            QuarkError: The feature provenance is not installed.
        """
        found: PendingFingerprint = find_method("fingerprint_data", _FEATURE)(
            self, key, source, level
        )
        return found

    def watch_data(self, loader: Any, name: str = "train", *, sample_ids: SampleIds = None) -> Any:
        """The same loader, whose samples are noted as they come; see `quark.watch_data`."""
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
    """One run, open in this process.

    Made by `start_run`, `resume_run` or `open_run`. As a context manager it
    ends the run as completed, as failed on an exception, or as interrupted on
    KeyboardInterrupt, SystemExit and StopRequested, and never replaces the exception. A sweep
    that stops its trial (`stop=True`) ends the block alone: the run is completed, the trial pruned.

    Every method may be called from any thread.
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
        if_done: IfDone | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> TrainingSession:
        """Start a new run, or with `state` go on with the one that a checkpoint is of.

        Args:
            project: Name of the project that the run belongs to.
            config: A mapping, an argparse Namespace or ArgumentParser (which parses the command
                line), a SimpleNamespace, NamedTuple, dataclass, attrs class, pydantic model or
                DictConfig; taken as it is now, secrets redacted, interpolations resolved.
            tags, parent_run_id: Labels to find the run by; the run that it descends from.
            storage_dir: Folder of the store; the working directory, or one above it with a store.
            strict_mode: Fail on what only data can cause (non-finite values,
                odd metric names) and on the primary's first delivery error.
            backends: What is added to the primary: names or URIs, such as "csv" or
                ["csv:./out"]; "none" keeps nothing. QUARK_BACKENDS by default.
            name, notes: A name for people, and free text.
            ranks: Which ranks keep records: "zero", "all" or a list; the lowest
                begins and ends the run. QUARK_RANKS, else "zero" by default.
            objective: The metric that the run's health is judged by, such as "val/loss"; it is
                kept in the configuration. QUARK_OBJECTIVE, else what names say.
            mode: Whether it is better "min" or "max"; as its name says by default, else "min".
            fork_from: `(run, step)`, a run (id, session, context) of the store: this one's curves
                begin with its, up to that step.
            on_stop: What `quark stop` does: "flag" sets `stop_requested` on the ranks
                that keep records, "raise" also raises `StopRequested`, once, at the next call
                that logs.
            system_metrics: Whether the machine is recorded, or every how many seconds;
                QUARK_SYSTEM_METRICS, else 10.
            capture: What of the console is kept, "sys", "fd" (children's output too) or None;
                QUARK_CAPTURE, else "sys".
            group: Paths of the groups that it is in, one or several, such as "paper/fig3".
            version: What the code is called: a text, or what is called for it.
            if_done: "skip", "resume" or "again" where a run of this configuration, seeds and
                version is there already; see `already_done`.
            state: What `state_dict` gave, out of a checkpoint: its run goes on after its step, as
                by `resume_run`, with its configuration unless one is given. None: a new run.

        Raises:
            SchemaValidationError, UnknownBackendError: A bad argument; the message names it.
            RunNotFoundError: There is no run `parent_run_id`, none to fork, or none of `state`.
            InvalidRunStateError: The run of `state` is completed, or alive.
            SessionStoreError: The primary store cannot be opened or does not acknowledge within
                QUARK_PERSISTENCE_TIMEOUT_SECONDS (15); a service within 5 s. Where the launcher
                has restarted the run, or QUARK_OFFLINE is "allow", it begins within 2 s without
                a service, unless QUARK_REQUIRE_SERVICE is set or the run is strict.
        """
        check_choice(on_stop, "on_stop", get_args(OnStop))
        observers = choose_observers(system_metrics, capture)
        end_run_of_this_cell()
        run = opening.start(
            project=project, config=config, tags=tags, parent_run_id=parent_run_id,
            storage_dir=storage_dir, strict_mode=strict_mode, backends=backends, name=name,
            notes=notes, ranks=ranks, objective=objective, mode=mode, group=group,
            version=version, if_done=if_done, fork_from=fork_from, state=state,
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
        """Continue a run that was interrupted, has failed or was lost.

        Starts a new attempt and emits `run_resumed`. To look at a run without
        continuing it, use `quark.open_run`.

        Args:
            run_id: The run; of its id the beginning is enough (4 characters at least).
            storage_dir: Storage root; as in `start_run` by default.
            backends, ranks, on_stop, system_metrics, capture: As in `start_run`.
            reopen: Let a completed run be continued too.
            from_step: The first step that is done again, such as that of the
                checkpoint plus one. Readers then leave out what earlier
                attempts have from there on, unless asked for all attempts.
                Without it they leave out the steps that are repeated.
            state: What `state_dict` gave, out of the checkpoint that training
                goes on from. It must be of this run; its step, where it has
                one, sets `from_step` to the step after it.

        Raises:
            SchemaValidationError: A bad argument, or the state of another run.
            RunNotFoundError: The store has no such run.
            InvalidRunStateError: The run is completed, or alive.
            SessionStoreError: The primary store cannot serve the call; a service
                within 5 s. A run that this machine has led before is continued
                within 2 s without a service that is out of reach, as in `start_run`.
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
        """The run as this process holds it; for writers and readers."""
        return self._run

    @property
    def extensions(self) -> dict[type, object]:
        """State that plugins keep with this run, by its type; a forked child begins with none."""
        return self._run.extensions

    @property
    def context(self) -> RunContext:
        """The run's context: plain data that other processes can hold."""
        return self._run.context

    @property
    def run_id(self) -> str | None:
        """The run's id; None only on a rank that cannot know it."""
        return self._run.context.run_id

    @property
    def run_path(self) -> Path | str:
        """The run's directory; a URI where the primary is remote."""
        return self._run.context.run_path

    @property
    def id(self) -> str | None:
        """The run's id, as `run_id`."""
        return self._run.context.run_id

    @property
    def name(self) -> str | None:
        """The run's name, or None."""
        return self._run.context.run.name

    @property
    def config(self) -> RunConfig:
        """The run's configuration as it is kept, without secrets; `config.update(…)` changes it."""
        return RunConfig(self._run)

    @property
    def url(self) -> str | None:
        """Where the run can be looked at in a browser; None where its store has no page.

        A service with a page (`quark serve --ui`) has one. Of a run from `quark.open_run`
        the service is asked for it once.
        """
        return find_page(self._run)

    @property
    def project_name(self) -> str:
        """Name of the project."""
        return self._run.context.project_name

    @property
    def status(self) -> str:
        """The run's status as this process knows it."""
        return self._run.context.status

    @property
    def stop_requested(self) -> StopRequest | None:
        """Who has asked this run to stop, when and why; None as long as nobody has.

        Known here within a heartbeat (10 s) of the request, or when the store can be reached
        again. Costs what an attribute costs: it may be read at each step. None on ranks that
        keep no records, and in forked children.
        """
        return self._run.stop_request

    @property
    def trial(self) -> Any:
        """The trial of a sweep that this run has, a `quark.Trial`; None of all other runs."""
        try:
            return find_method("trial", "sweeps")(self) if self.extensions else None
        except QuarkError:
            return None  # without the feature there are no trials

    def reload(self) -> RunContext:
        """Read the run from the primary again and return the refreshed context.

        Raises:
            SessionStoreError: The primary cannot serve the call.
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
        """Add a tag to the run and return the refreshed context.

        Raises:
            SchemaValidationError: Not a str, empty or too long.
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
        """Set the step of the calls that follow and give none; costs what an attribute costs.

        It holds for every writer of this run in this process and for all its threads: metrics,
        events, log lines, artifacts and batch diagnostics, those with an epoch too. A step that
        a call gives itself counts for that call alone. `with session.step(n):` puts back at the
        end of the block what was set before it. A forked child goes on with what was set.

        Args:
            step: The step; None lets calls need their own again.

        Raises:
            SchemaValidationError: `step` is no non-negative integer.
        """
        return StepScope(self._run, step)

    def write(self, records: Iterable[StreamRecord]) -> int:
        """Write records of any type of the stream, mixed as they come; returns how many.

        Each is validated. Who wrote it (run, writer, attempt, rank, sequence)
        becomes this session; its time and content are kept. However fast
        records come, none is dropped: this waits for the journal. Of a
        collection none is accepted unless all are good; of a generator the
        same is true of each slice of at most 10,000 records.

        Raises:
            SchemaValidationError: A record that does not fit, with its place.
            InvalidRunStateError: The run has ended or is open for reading only.
            SessionStoreError: The journal took too long; nothing is lost.
        """
        return write_records(self._run, records)

    def use_artifact(
        self, name: str, *, project: str | None = None, step: int | None = None
    ) -> UsedArtifact:
        """Find a version of an artifact that any run of the project has logged, to be read here.

        That this run uses it becomes part of its lineage. Waits for the store, which reads the
        artifacts of each run of the project.

        Args:
            name: `model:best` (an alias), `model:v3` (a number), or `model` (the newest).
            project: Of another project.
            step: From which step on it is used.

        Returns:
            A UsedArtifact, with `.path`, `.read()`, `.load()`, `.open()` and `.copy_to(folder)`.

        Raises:
            SchemaValidationError: A bad argument.
            ArtifactNotFoundError: There is no such version; the message says which there are.
            InvalidRunStateError: The run has ended.
            SessionStoreError: The store cannot be read.
        """
        with importing():
            from quark_core.writers.artifact_links import use_artifact

        return use_artifact(self._run, name, project, step)

    def end_run(self, status: RunStatus = "completed") -> RunContext:
        """End the run and return its last context.

        Waits for the store as long as it gets on: until nothing has for
        QUARK_EXIT_TIMEOUT_SECONDS (10), or for 12 times as long in all. Mirrors
        have 2 s of it, and another process delivers the rest; where that
        variable is set, they have as long as the store. What waits for
        `quark sync` then is said on the log. Where other processes (forked
        workers, holders of the context) still have the run open, its end waits
        for them for QUARK_WRITERS_TIMEOUT_SECONDS (2) of that; what they log
        later is kept too, and comes after the end.

        Raises:
            SchemaValidationError: `status` is not completed, failed or interrupted.
            InvalidRunStateError: The run has ended already, or is open for
                reading only.
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
        """Wait until everything that this process logged so far is as safe as `level` says.

        Args:
            level: "journaled": it survives the death of this process;
                "durable": it survives the loss of power of this machine;
                "stored": the primary store has acknowledged it.
            timeout_s: How long; QUARK_PERSISTENCE_TIMEOUT_SECONDS (15) by default.

        Raises:
            SchemaValidationError: An unknown level.
            SessionStoreError: It took longer; nothing is lost.
        """
        check_choice(level, "level", get_args(FlushLevel))
        self._run.flush(timeout_s, level)

    def report_delivery(self) -> DeliveryReport:
        """What each backend has got so far, what waits, and what was refused and why."""
        return self._run.stream.report()

    def report(self, *, short: bool = False, config: bool = True, logs: bool = True) -> Any:
        """What is wrong with the run and what shows it, up to now; see `quark.RunReport`.

        `str()` of it is text, `to_dict()` plain values, `save("report.html")` writes one file
        that works without a server. Nothing is stored, and the run goes on.

        Args:
            short: Only what it is, its settings, metrics, timers and errors: a `ShortReport` of
                text, dict and JSON, the same as `quark report RUN --short`. Nothing is analyzed.
            config: Whether configuration, environment, command line and paths are in it.
            logs: Whether the newest events and log lines are.

        Raises:
            InvalidRunStateError: The run keeps nothing that could be read back.
            SessionStoreError: The store does not answer in time.
        """
        if not short:
            return find_method("report", "page")(self, config=config, logs=logs)
        from quark_core.runs.run_report import read_short_report

        self._run.flush()
        return read_short_report(*self._find_stored("report"))

    def capture_output(self, last: int = 50, *, stream: str | None = None) -> list[str]:
        """The newest lines that this run has printed, oldest first, as its console is kept.

        Everything printed is kept from the start on, unless `capture=None` was given: this
        reads it. The newest line is there even where its end has not come yet.

        Args:
            last: How many.
            stream: Only of "stdout" or "stderr".

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: The run keeps nothing that could be read back.
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
        """What to put into a checkpoint, so that a resumed run goes on where it is.

        Args:
            step: The last step that the checkpoint has seen; with it
                `resume_run(..., state=...)` hides what was logged after it.

        Returns:
            Plain values: `run_id`, `attempt`, `step`, `schema_version`.

        Raises:
            SchemaValidationError: `step` is no non-negative integer.
        """
        return make_state(self._run.context, step)

    def to_dict(self) -> dict[str, Any]:
        """The whole context, project and run included, as JSON-like values."""
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
        """Write the exception that ends the run into it; see `run_ending.log_error`."""
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
    """Look at a run without touching it: no status change, no event.

    Every reader and analyzer works on what is returned; whatever would write
    raises InvalidRunStateError. A run that another tool keeps is opened by
    `open_run("mlflow+http://127.0.0.1:5000", run_id)`, or with `backend=`.

    Args:
        run_id: The run, by its id or the beginning of that (4 characters at least); or name or
            URI of a backend, with the run behind it.
        storage_dir: The storage root, by default the working directory or the
            nearest folder above it that has a store; or the run, behind a backend.
        backend: Name or URI of a backend to read from in place of the primary
            store, such as "csv:/data/mirror"; analyzers return their results
            there and store nothing.

    Raises:
        RunNotFoundError: The store has no such run.
        SchemaValidationError: The backend cannot be read back, is given twice,
            or has no run behind it.
        SessionStoreError: There is no store, or it cannot be read.
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
    """End a session's run; without a session, that of the one opened last.

    Raises:
        InvalidRunStateError: No session is open, or this one has ended.
    """
    return _choose_session(session, "end_run").end_run(status)


def add_tag(session: TrainingSession | str | None = None, tag: str | None = None) -> RunContext:
    """Add a tag to a session's run: `add_tag(session, tag)`, or `add_tag(tag)` for the latest.

    Raises:
        SchemaValidationError: No tag, or a bad one.
        InvalidRunStateError: No session is open, or this one has ended.
    """
    chosen, text = _split_target(session, tag, "tag")
    return _choose_session(chosen, "add_tag").add_tag(text)


def add_log(
    session: TrainingSession | str | None = None, message: str | None = None, **arguments: Any
) -> EventRecord:
    """Write a log line: `add_log(session, message, …)`, or `add_log(message, …)` for the latest.

    Takes the keywords of `TrainingSession.add_log`.

    Raises:
        SchemaValidationError: No message, or a bad argument.
        InvalidRunStateError: No session is open, or this one has ended.
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
    """The same loader, whose samples are noted as they come: which ones, and in which order.

    What it yields is what the loader yields, and what the loader raises passes through; length
    and attributes are the loader's. Each pass through it becomes one fingerprint of the run, also
    one that was left early. Of each sample 4 kB, or 16 places of a larger one, are hashed, and
    batches 0 to 3 and those at powers of two as a whole, where the loop takes them. Batches with
    tensors on a device are only counted, since looking at them would wait for the device.

    Args:
        loader: A DataLoader, or anything to iterate over.
        name: Key of the fingerprints.
        sample_ids: A key of the batches, or a function of a batch, that gives one id for each
            sample; then ids are digested in place of contents.
        session: The run; by default that of the session opened last.

    Raises:
        SchemaValidationError: A bad argument.
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
