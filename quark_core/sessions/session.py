"""TrainingSession: a run's life, from start to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, get_args

import msgspec

from quark_core.backends.delivery_report import DeliveryReport
from quark_core.backends.registry import default_registry
from quark_core.config import settings
from quark_core.config.arguments import check_tag
from quark_core.config.belonging import IfDone
from quark_core.config.habits import (
    explain_argument_errors,
    explain_attribute,
    explain_item,
    refuse_assignments,
)
from quark_core.config.objective import ObjectiveMode
from quark_core.delivery.stream import FlushLevel
from quark_core.errors import InvalidRunStateError, QuarkError, SchemaValidationError
from quark_core.presentation import bundle, has_kernel, paint
from quark_core.records import EventRecord, RunStatus, StreamRecord, format_time, parse_time
from quark_core.records.checks import check_choice
from quark_core.records.query import check_index
from quark_core.records.runs import RunContext, StopRequest
from quark_core.records.schema import TERMINAL_STATUSES
from quark_core.records.times import now_us
from quark_core.runs import opening, resumed_runs
from quark_core.runs.checkpoints import make_state, read_state
from quark_core.runs.environment_recorder import EnvironmentRecorder
from quark_core.runs.extensions import ask_extensions
from quark_core.runs.known_runs import note_run
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.sessions.belonging import Belonging
from quark_core.sessions.config_reads import ConfigReads, note_reads
from quark_core.sessions.end_causes import is_interruption
from quark_core.sessions.ending import emit_end, log_error, watch_process
from quark_core.sessions.feature_methods import find_method
from quark_core.sessions.fingerprints import Fingerprints
from quark_core.sessions.introduction import Introduction, find_page, tell_done
from quark_core.sessions.notebook_cells import end_run_of_this_cell, note_cell
from quark_core.sessions.observers import AUTOMATIC, CaptureChoice, Observers, choose_observers
from quark_core.sessions.run_config import RunConfig
from quark_core.sessions.signals import say_what_is_left
from quark_core.system.exit_status import read_exit_code
from quark_core.writers.default_steps import StepScope
from quark_core.writers.events import LogLines
from quark_core.writers.records import write_records

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun, SupportsRead
    from quark_core.writers.used_artifacts import UsedArtifact

_log = logging.getLogger("quark")
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
        run = resumed_runs.resume(
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
        from quark_core.writers.used_artifacts import use_artifact

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
                raise InvalidRunStateError(f"end_run: {run.refusal or 'the run has ended already'}")
            run.settle_writers()
            if run.already_done is not None:
                run.end_stream("an earlier run has done this configuration", 0.0)
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
        from quark_core.runs.short_report import read_short_report

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
            raise InvalidRunStateError(f"{call}: the run keeps nothing that could be read back")
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
            "a TrainingSession belongs to its process and cannot be pickled or copied: give the "
            "other process session.context, and make writers of it there"
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
