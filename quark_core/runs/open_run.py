"""A run that is open in this process: what the session and all its writers share."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quark_core.backends.contract import DeliveryReport, SupportsRead
from quark_core.backends.edits import STOP_SEEN, SupportsEdits
from quark_core.backends.registry import default_registry
from quark_core.config import settings
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import FlushLevel, RunStream, StandInStream
from quark_core.errors import InvalidRunStateError, SessionStoreError, StopRequested
from quark_core.records import ConfigSnapshot, EventRecord, LifecycleRecord, RunStatus, StreamRecord
from quark_core.records.base import now_us
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import RunContext, RunEnding, StopRequest
from quark_core.runs.reading import read_rows
from quark_core.system.process import list_members, start_thread

if TYPE_CHECKING:
    from quark_core.backends.run_summary import RunSummary
    from quark_core.config.objective import Objective
    from quark_core.ranks.launches import RunClaims
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query
    from quark_core.runs.backend_choice import BackendChoice
    from quark_core.runs.recovery import ChildDelivery

R = TypeVar("R", bound=StreamRecord)

_AGGREGATE = "aggregate"
_ENVIRONMENT_TIMEOUT_S = 2.0
_log = logging.getLogger("quark")

# What a forked child has of its parent: kept, so that nothing of it is ever closed.
_parents: list[object] = []


class BoundWriter(Protocol):
    """A writer, as far as a run must know it."""

    def bind(self) -> None:
        """Take up the run's stream, which was replaced."""

    def settle(self) -> None:
        """Hand over what is still being worked out, before the run ends."""

    def __hash__(self) -> int: ...


class Collecting(Protocol):
    """What sums up values for records of later, as far as a run must know it."""

    def collect(self, *, whole: bool = False) -> None:
        """Put records of what there is into the stream."""

    def settle(self) -> None:
        """Put all of it into the stream, before the run ends."""


class OpenRun:
    """One run as this process holds it: context, stream, reader and state.

    Attributes:
        context: The run as it is now; replaced when it changes.
        config: Its configuration as it is kept, or None where there is none or nobody has
            said; replaced when it changes.
        fields: What was noted of it, by name; replaced when it changes.
        already_done: The earlier run in whose place this one was not begun, or None.
        stream: Where records go.
        reader: Where they are read back, or None where nothing is kept.
        refusal: Why records are no longer taken, or None while they are; the text of a
            halt while one waits to be raised (`is_over` tells them apart).
        leads: Whether this process begins and ends the run, rather than joins it.
        claims: Where the other ranks of the launch look for the run, if they do.
        missed_leader: Whether the rank that leads was waited for in vain, at the start.
        begun_offline: Whether it was begun while its primary was out of reach.
        is_noted: Whether this machine keeps a note of the run; see `known_runs`.
        strict: Whether the run was started with `strict_mode`.
        exit_code: Status with which the process ends where that ends the run, else None.
        stop_request: That somebody has asked this attempt to stop, once that is known here.
        raises_on_stop: Whether the next call that logs then raises `StopRequested`.
        step: The step of calls that give none, set by `session.step`, or None.
        ending: Why the run ends before its program is through, or None.
        warned: The subjects of warnings that a run gives once, such as a kind and a metric key.
        non_finite: Metric key -> count of values in a row that were not finite.
        aggregates: What sums up values and times in this process, or None.
        first_step: The step that a resumed run begins with, or None where that is not said.
        payload_directory: Where the payloads of artifacts are put in place, or
            None where they are sent; the same in a forked child.
        extensions: State that features keep with the run, by its type; a forked child begins
            with none, because threads and claims are the parent's.
    """

    def __init__(
        self,
        context: RunContext,
        stream: RunStream,
        reader: SupportsRead | None,
        *,
        refusal: str | None = None,
        leads: bool = True,
    ) -> None:
        self.leads = leads
        self.claims: RunClaims | None = None
        self.warned: set[tuple[str, ...]] = set()
        self.first_step: int | None = None
        self.missed_leader = False
        self.begun_offline = False
        self.is_noted = False
        self.exit_code: int | None = None
        self.stop_request: StopRequest | None = None
        self.raises_on_stop = False
        self.step: int | None = None
        self.aggregates: Collecting | None = None
        self.ending: RunEnding | None = None
        self.extensions: dict[type, object] = {}
        self.context = context
        self.config: ConfigSnapshot | None = None
        self.fields: Mapping[str, Any] = {}
        self.already_done: RunSummary | None = None
        self.stream = stream
        self.reader = reader
        self.refusal = refusal
        self.strict = context.run.strict_mode
        self.non_finite: dict[str, int] = {}
        self.lock = threading.RLock()
        self.background: threading.Thread | None = None
        self.children: ChildDelivery | None = None
        self.choices: Sequence[BackendChoice] = ()
        self.forked = False
        self.payload_directory: Path | None = None
        self.reopen: Callable[[OpenRun, Origin], None] | None = None
        self.writers: weakref.WeakSet[BoundWriter] = weakref.WeakSet()
        self._has_settled = False
        self._failure: BaseException | None = None
        # Errors that are to be raised, with the thread that each spares, and what refuses for them.
        self._halts: list[tuple[Exception, int]] = []
        self._halt_text: str | None = None
        self._refusing = threading.Lock()
        self._open_writers = 0
        self._was_left = False
        self._has_waited_in_vain = False

    def __repr__(self) -> str:
        return f"OpenRun({self.context.describe()})"

    @property
    def origin(self) -> Origin:
        """What all records of this process have in common."""
        return self.stream.origin

    @property
    def failed(self) -> bool:
        """Whether the primary has failed to take something, in strict mode."""
        return self._failure is not None

    def note_failure(self, error: BaseException) -> None:
        """In strict mode, keep the primary's first delivery error for the next call."""
        with self._refusing:
            if self.strict and self._failure is None:
                self._failure = error
                self.refusal = f"strict_mode=True, and the primary store failed: {error}"

    def warns_first(self, *subject: str) -> bool:
        """Whether this is the first warning about a subject in this run, which it is once."""
        if subject in self.warned:
            return False
        self.warned.add(subject)
        return True

    @property
    def is_over(self) -> bool:
        """Whether records are no longer taken for good; a halt that waits does not count."""
        return self.refusal is not None and self.refusal is not self._halt_text

    def halt(self, error: Exception, *, spared_thread: int = 0) -> bool:
        """Let the next call that logs raise an error, once; whether there can be one.

        Args:
            error: What is raised.
            spared_thread: Ident of a thread whose calls do not raise it.
        """
        with self._refusing:
            if self.is_over:
                return False
            self._halts.append((error, spared_thread))
            self._note_halts()
        return True

    def withdraw_halt(self, error: Exception) -> None:
        """Take back a halt, where nobody has met it yet."""
        with self._refusing:
            self._halts = [halt for halt in self._halts if halt[0] is not error]
            self._note_halts()

    def _meet_halt(self) -> Exception | None:
        """The first halt that is this thread's to raise, which no other one raises then."""
        thread = threading.get_ident()
        with self._refusing:
            found = next((halt for halt in self._halts if halt[1] != thread), None)
            if found is None:
                return None
            self._halts.remove(found)
            self._note_halts()
        return found[0]

    def _note_halts(self) -> None:
        # Writers look at the refusal in any case, so that a halt costs them nothing.
        if self.refusal is None or self.refusal is self._halt_text:
            self._halt_text = str(self._halts[0][0]) if self._halts else None
            self.refusal = self._halt_text

    def _end_refusals(self, refusal: str | None) -> None:
        """Nothing is halted any more; why records are refused from now on, if they are."""
        with self._refusing:
            self._halts = []
            self._note_halts()
            self._halt_text = None
            self.refusal = self.refusal or refusal

    def refuse(self, call: str) -> None:
        """Raise why a call cannot be taken.

        Returns only where it can: of a halt, to the thread that it spares, and to one that
        comes while another is being halted.

        Raises:
            TrainingHalted: A monitor stops the training; the next call is taken.
            StopRequested: Somebody has asked it to stop, and it was started to be told so.
            SessionStoreError: In strict mode, the primary's first delivery error.
            InvalidRunStateError: The run has ended or is open for reading only.
            SystemExit: The process ends, and this is a daemon thread that does not know.
        """
        halt = self._meet_halt() if self._halts else None
        if halt is not None:
            raise halt
        if not self.is_over:
            return
        if open_runs.process_ends and threading.current_thread() is not threading.main_thread():
            raise SystemExit  # which ends a thread, and of which nothing is printed
        if self._failure is not None:
            raise SessionStoreError(f"{call}: {self.refusal}") from self._failure
        raise InvalidRunStateError(f"{call}: {self.refusal}")

    def emit_event(
        self,
        event_type: str,
        severity: str,
        *,
        step: int | None = None,
        epoch: int | None = None,
        status: str | None = None,
        payload: JsonObject | None = None,
        time_us: int | None = None,
    ) -> EventRecord:
        """Put an event into the stream; its arguments are checked already."""
        told = (event_type, severity, step, epoch, status, payload)
        return self.emit(EventRecord, *told, time_us=time_us)

    def emit_lifecycle(
        self, action: str, data: Mapping[str, Any] | None = None, *, time_us: int | None = None
    ) -> None:
        """Put a lifecycle record into the stream."""
        said = None if data is None else JsonObject(data)
        self.emit(LifecycleRecord, action, said, time_us=time_us)

    def emit(
        self, record_type: type[R], *values: Any, time_us: int | None = None, **named: Any
    ) -> R:
        """Put a record into the stream; what it says of itself must be checked already.

        For what is told now and then: what a loop logs at each step makes its own records.

        Args:
            record_type: Its type.
            *values, **named: Its fields but those that all records have.
            time_us: The moment; now by default.
        """
        # Looked up now: the first record of a forked child gives it a stream of its own.
        stream = self.stream
        channel = stream.channel(record_type.KIND)
        record = record_type(
            *stream.origin.head,
            channel.take_sequence(),
            now_us() if time_us is None else time_us,
            *values,
            **named,
        )
        return channel.put(record)

    def emit_gap(self, gaps: Mapping[str, int]) -> None:
        """Put into the stream what is missing from it: records by kind."""
        self.emit_lifecycle("gap", {"records": dict(gaps), "reason": "out of memory"})
        self.emit_event("records_dropped", "error", payload=JsonObject({"records": dict(gaps)}))

    def flush(self, timeout_s: float | None = None, level: FlushLevel = "stored") -> None:
        """Wait until everything that this process logged so far is as safe as `level` says.

        Raises:
            SessionStoreError: It does not answer in time; nothing is lost.
        """
        timeout_s = settings.persistence_timeout_s() if timeout_s is None else timeout_s
        if self.aggregates is not None:
            self.aggregates.collect(whole=True)
        self.stream.flush(timeout_s, level)

    def find_payload(self, sha256: str) -> Path | None:
        """The file of a payload that this process has stored and that is not delivered yet."""
        payloads = self.stream.payloads
        return None if payloads is None else payloads.find(sha256)

    def catch_up(self, verb: str = "read") -> None:
        """Bring what this process has logged to the primary, so that it can be read there.

        Args:
            verb: What the caller does with the run, for the message of the error.

        Raises:
            SessionStoreError: The store does not answer in time, or this process was forked.
        """
        if self.forked:
            raise SessionStoreError(
                f"a forked process can log to its parent's run but not {verb} it. {verb} it in "
                "the parent, or in a spawned process"
            )
        # What is read is in the primary then; the mirrors' share need not be on the disk for it.
        self.stream.flush(settings.persistence_timeout_s(), sync=False)

    def read(self, kind: str, query: Query) -> Columns:
        """Flush, then read rows of one kind in persistence order; none where nothing is kept."""
        from quark_core.records.columns import Columns

        if self.aggregates is not None and kind == _AGGREGATE and not self.forked:
            self.aggregates.collect(whole=True)
        self.catch_up()
        if self.reader is None or self.context.run_id is None:
            return Columns.empty(kind)
        return read_rows(self.reader, self.context.run_id, kind, query)

    def settle_writers(self) -> None:
        """Let the writers hand over what they are still working out; who looks on comes last.

        Only once: where that was broken off, as by Ctrl-C, nobody waits for it again.
        """
        if self._has_settled:
            return
        self._has_settled = True
        writers = list_members(self.writers)
        for writer in sorted(writers, key=lambda item: getattr(item, "looks_on", False)):
            try:
                writer.settle()
            except Exception:  # noqa: BLE001 - the run must end all the same
                _log.exception("run %s: a writer could not finish", self.context.run_id)
        self._settle_aggregates()

    def _settle_aggregates(self) -> None:
        try:
            if self.aggregates is not None:
                self.aggregates.settle()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("run %s: aggregates could not be finished", self.context.run_id)

    def add_writer(self, writer: BoundWriter) -> bool:
        """Count a writer that uses this run; False where the last one has left it."""
        with self.lock:
            self.writers.add(writer)
            self._open_writers += 1
            return not self._was_left

    def remove_writer(self) -> None:
        """Forget a writer; the last one of an attached run closes its stream."""
        with self.lock:
            self._open_writers -= 1
            leaves = self._open_writers == 0 and open_runs.detach(self)
            self._was_left = self._was_left or leaves
        if leaves:
            self.end_stream("the last writer of this context was closed", settings.exit_timeout_s())

    def become_child(self) -> None:
        """Leave everything of the parent alone: this process was forked.

        What logs gets a stream of its own at its first call; what does not
        log costs nothing. Nothing is closed, because locks and connections of
        the parent are in whatever state its threads had them.
        """
        _parents.append((self.stream, self.reader))
        self.stream.abandon()
        self.lock = threading.RLock()
        self._was_left = False
        self.background = self.children = self.reader = self.claims = None
        self.forked = True
        self.extensions = {}
        self.non_finite = {}
        self._refusing = threading.Lock()
        self._end_refusals(None)  # they are the parent's to raise
        self.aggregates = None  # the parent tells what was measured so far
        self.stop_request = None
        parent = self.stream.origin
        origin = Origin(parent.run_id, attempt=parent.attempt, rank=parent.rank)
        active = self.stream.active
        self.stream = RunStream(origin)
        if active and self.reopen is not None and self.refusal is None:
            self.stream = StandInStream(origin, self._open_child_stream)
        self._bind_writers()

    def bind_stream(self, stream: RunStream) -> None:
        """Go on with another stream."""
        self.stream = stream
        if self.aggregates is not None:
            stream.collect = self.aggregates.collect
        self._bind_writers()

    def _open_child_stream(self) -> None:
        with self.lock:
            if not isinstance(self.stream, StandInStream) or self.reopen is None:
                return
            try:
                self.reopen(self, self.stream.origin)
                open_runs.attach(self)
            except Exception:  # noqa: BLE001 - a worker's training must not end for this
                _log.exception(
                    "run %s: this forked process cannot open its own stream, so its records are "
                    "not stored",
                    self.context.run_id,
                )
                self.bind_stream(RunStream(self.stream.origin))

    def _bind_writers(self) -> None:
        for writer in list_members(self.writers):
            writer.bind()

    def hand_over_at_close(self) -> None:
        """Let the journal have what was logged, within the one time that all ends share."""
        patience_s = settings.exit_timeout_s()
        position = self.stream.hand_over(self.measure_budget(), patience_s=patience_s)
        self._has_waited_in_vain = position is None

    def measure_budget(self) -> float:
        """How long the end may wait in s: what an earlier close has waited in vain is spent."""
        whole_s = settings.exit_timeout_s()
        return min(settings.journal_timeout_s(), whole_s) if self._has_waited_in_vain else whole_s

    def end_stream(self, refusal: str, timeout_s: float) -> DeliveryReport:
        """Take no more records and deliver what is left.

        Args:
            refusal: Why records are no longer taken.
            timeout_s: How long, where nothing gets on; what gets on has
                QUARK_EXIT_TIMEOUT_SECONDS from each such moment on.
        """
        with open_runs.closing(self):
            return self._end_stream(refusal, timeout_s)

    def _end_stream(self, refusal: str, timeout_s: float) -> DeliveryReport:
        deadline = time.monotonic() + timeout_s
        if self.background is not None:
            # What a short run knows of its environment is still being found out.
            self.background.join(min(timeout_s, _ENVIRONMENT_TIMEOUT_S))
        self._settle_aggregates()
        self._end_refusals(refusal)
        if self.claims is not None:
            self.claims.end()
        if self.children is not None:
            self.children.finish(max(0.0, deadline - time.monotonic()), writers_timeout_s=0.0)
        mirror_s, closing_s = settings.mirror_timeout_s(), time.monotonic()
        report = self.stream.close(
            max(0.0, deadline - time.monotonic()),
            patience_s=settings.exit_timeout_s(),
            on_overtime=self._tell_overtime,
            # Training is over, and what a mirror lacks then is delivered without it.
            mirror_timeout_s=mirror_s,
            # Who has waited once for a rank that never came looks for it once more, and goes.
            gives_up=self.missed_leader,
        )
        if self.children is not None:
            # Mirrors that took so long to take the run are there for what was found out about it.
            left_s = timeout_s if report.complete else deadline - time.monotonic()
            if mirror_s is not None:
                left_s = min(left_s, closing_s + mirror_s - time.monotonic())
            self.children.finish_outputs(max(0.0, left_s))
        return report

    def _tell_overtime(self, report: DeliveryReport) -> None:
        _log.warning(
            "run %s has ended, and its waiting records are being delivered (%s). To leave them "
            "to `quark sync %s`, press Ctrl-C",
            self.context.run_id,
            "; ".join(lane.describe() for lane in report.lanes if not lane.complete),
            self.context.storage_dir,
        )


class RunHolder(Protocol):
    """What a session is to the list of open runs."""

    @property
    def run_id(self) -> str | None:
        """The run."""

    @property
    def open_run(self) -> OpenRun:
        """The run as it is open here."""

    @property
    def end_run(self) -> Callable[..., Any]:
        """Ends the run."""

    @property
    def log_error(self) -> Callable[..., Any]:
        """Says what ended the run."""


class OpenRuns:
    """The runs that are open in this process: by a session, or attached from a context.

    Attributes:
        process_ends: Whether the process is at its exit, where its runs are ended.
    """

    def __init__(self) -> None:
        self.process_ends = False
        self._lock = threading.Lock()
        self._sessions: list[RunHolder] = []
        # Those of which an end is on its way, and not said yet.
        self._ending: list[RunHolder] = []
        # Those of which the end is said, and delivered now.
        self._closing: list[OpenRun] = []
        self._attached: dict[str, OpenRun] = {}
        self._attaching: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def add(self, session: RunHolder) -> None:
        """Keep a session until it ends, as the latest one."""
        with self._lock:
            self._sessions.append(session)

    @contextmanager
    def ending(self, session: RunHolder) -> Iterator[bool]:
        """Around what must be done before a session's end is said: it is open no more.

        Where that is left by an exception, such as that of Ctrl-C, it is open again, for whoever
        ends it then. Gives whether it was open.
        """
        with self._lock:
            was_open = session in self._sessions
            if was_open:
                # First there, then not here any more: a signal may come in between.
                self._ending.append(session)
                self._sessions.remove(session)
        if not was_open:
            yield False
            return
        try:
            yield True
        except BaseException:
            with self._lock:
                self._sessions.append(session)
                self._ending.remove(session)
            raise
        with self._lock:
            # First there, then not here any more, as above; `closing` takes it from there.
            if not session.open_run.is_over:
                self._closing.append(session.open_run)
            self._ending.remove(session)

    @contextmanager
    def closing(self, run: OpenRun) -> Iterator[None]:
        """Around the delivery of what an ended run has left."""
        with self._lock:
            self._closing.append(run)
        try:
            yield
        finally:
            with self._lock:
                self._closing = [each for each in self._closing if each is not run]

    @property
    def sessions(self) -> tuple[RunHolder, ...]:
        """The open sessions, the latest last."""
        with self._lock:
            return tuple(self._sessions)

    def peek_sessions(self) -> list[RunHolder]:
        """The open sessions, without a lock: for a signal handler."""
        return self._sessions.copy()

    def peek_unended(self) -> list[RunHolder]:
        """Also those whose end is on its way and not said yet, without a lock."""
        ending = self._ending.copy()
        return [*ending, *(each for each in self._sessions.copy() if each not in ending)]

    def peek_runs(self) -> list[OpenRun]:
        """All runs of which something may still be delivered, without a lock."""
        runs = [session.open_run for session in self.peek_unended()]
        for run in (*self._closing.copy(), *list(self._attached.values())):
            if not any(run is each for each in runs):
                runs.append(run)
        return runs

    def find(self, run_id: str | None) -> OpenRun | None:
        """The run that is open under this id, or None."""
        with self._lock:
            for session in self._sessions:
                if run_id is not None and session.run_id == run_id:
                    return session.open_run
            return self._attached.get(run_id or "")

    def attaching(self, run_id: str | None) -> threading.RLock:
        """A lock around opening a run from a context, so that no two threads open it."""
        with self._lock:
            lock = self._attaching.get(run_id or "")
            if lock is None:
                lock = self._attaching[run_id or ""] = threading.RLock()
            return lock

    def attach(self, run: OpenRun) -> OpenRun:
        """Keep a run that was opened from a context; the first one wins."""
        with self._lock:
            return self._attached.setdefault(run.context.run_id or "", run)

    def detach(self, run: OpenRun) -> bool:
        """Forget a run that was opened from a context; whether it was one."""
        with self._lock:
            if self._attached.get(run.context.run_id or "") is not run:
                return False
            del self._attached[run.context.run_id or ""]
            return True

    @property
    def attached(self) -> tuple[OpenRun, ...]:
        """The runs that were opened from a context."""
        with self._lock:
            return tuple(self._attached.values())

    def become_child(self) -> None:
        """Forget the sessions, which are the parent's to end, and keep the runs."""
        self._lock = threading.Lock()
        self._attaching = weakref.WeakValueDictionary()
        sessions = [*self._ending, *self._sessions]
        runs = [session.open_run for session in sessions] + list(self._attached.values())
        self._sessions, self._ending, self._closing = [], [], []
        self._attached = {run.context.run_id or "": run for run in runs}
        for run in runs:
            run.become_child()


open_runs = OpenRuns()
"""Of this process."""

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=open_runs.become_child)


T = TypeVar("T")


class RunExtension:
    """State of a feature in a run that is open in this process, kept in `session.extensions`.

    Override the methods that the feature needs. A method that raises is logged and passed over.

    Attributes:
        is_announced: Whether the run's start is announced on the console.
    """

    is_announced = True

    def describe_start(self) -> Mapping[str, Any]:
        """JSON values to add to the record of the run's start."""
        return {}

    def describe_heartbeat(self) -> Mapping[str, Any]:
        """Return JSON values to add to the next heartbeat, which is sent every 10 s."""
        return {}

    def settle(self) -> None:
        """Log what must precede the end of the run; all writers have finished."""

    def describe_end(self, run: OpenRun, status: RunStatus) -> Mapping[str, Any]:  # noqa: ARG002
        """JSON values to add to the record of the run's end."""
        return {}

    def summarize(self) -> str | None:
        """The result in one line, in place of the run's name and status at its end."""
        return None

    def list_faults(self) -> Iterable[str]:
        """Return known problems, for the last line about the run on the console."""
        return ()

    def catches(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether an error that leaves a `with` block of the session ends there, as completed."""
        return False


@dataclass(slots=True, kw_only=True)
class RunDraft:
    """A run that is about to be started or resumed; a plugin may change it.

    Attributes:
        storage_dir: Where the run is stored, as the program asked for it, or None.
        config: The configuration; None where a run is resumed, which keeps its own.
        objective: What the run is judged by, or None. A resumed run keeps its own.
        tags, groups: Tags and paths of groups. A resumed run keeps its own.
        launch_key: Tells the ranks of a launch that this is another run than one with another key.
        extensions: Where `session.extensions` begins.
    """

    storage_dir: str | Path | None
    config: ConfigSnapshot | None = None
    objective: Objective | None = None
    tags: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    launch_key: str = ""
    extensions: dict[type, object] = field(default_factory=dict)

    def complete(self) -> RunDraft:
        """Let plugins change it.

        Raises:
            QuarkError: A plugin refuses the run.
        """
        default_registry().ask("quark_run_starting", draft=self)
        return self


def ask_extensions(
    extensions: Mapping[type, object], question: Callable[[RunExtension], T]
) -> list[T]:
    """What each extension of a run answers; one that raises is logged and passed over."""
    answers = []
    for each in list(extensions.values()):
        if isinstance(each, RunExtension):
            try:
                answers.append(question(each))
            except Exception:  # noqa: BLE001 - a feature must not end a run
                _log.exception("%s failed in a run", type(each).__name__)
    return answers


class StopLookout:
    """Asks the store of an open run, at each of its heartbeats, whether it shall stop.

    The training thread has no part in it: it reads an attribute. The store may be slow or out of
    reach: it is asked on a thread of its own, one at a time.

    Args:
        run: The run.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Ask, unless the answer is known or being waited for; returns at once."""
        run = self._run
        reader: object = run.reader
        if run.stop_request is not None or run.is_over or not isinstance(reader, SupportsEdits):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        # Where there is none to spare, the next heartbeat tries again.
        self._thread = start_thread(self._ask, args=(reader,), name="quark-stop")

    def _ask(self, reader: SupportsEdits) -> None:
        run_id = self._run.context.run_id
        try:
            request = None if run_id is None else reader.find_stop(run_id)
        except Exception as error:  # noqa: BLE001 - the next heartbeat asks again
            _log.debug("run %s: it is unknown if the run should stop: %s", run_id, error)
            return
        if request is not None:
            self._note(request)

    def _note(self, request: StopRequest) -> None:
        run = self._run
        if run.is_over:
            return
        _log.warning("run %s: %s", run.context.run_id, request.describe())
        run.emit_lifecycle("stop_seen", {"id": request.id})
        payload = {
            "message": f"the training process knows that {request.describe()}",
            "by": request.by,
            "reason": request.reason,
            "request": request.id,
        }
        run.emit_event(STOP_SEEN, "info", status="running", payload=JsonObject(payload))
        # Said first: the training may end the run as soon as it knows.
        run.stop_request = request
        if run.raises_on_stop:
            text = f"{request.describe()} (this call was not logged, the next one is)"
            run.halt(StopRequested(text, request))
