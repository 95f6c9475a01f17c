"""The end of a run: what is said of it, and what happens to open runs when the process ends.

At exit, runs that were left open are ended within the exit timeout: as failed where an
exception that nobody caught has ended the program, as interrupted where it ends with a
status other than 0, by Ctrl-C, or by what a handler of SIGTERM or SIGHUP has raised. See
`exit_status`, and `signals` for signals that end the process at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import StopRequested
from quark_core.records import RunStatus
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import RunEnding
from quark_core.runs.open_run import OpenRun, ask_extensions, open_runs
from quark_core.system.exit_status import (
    ExitWatch,
    find_signal,
    handler_codes,
    make_last_calls,
    read_exit_code,
)
from quark_core.writers.events import make_log_payload

if TYPE_CHECKING:
    from quark_core.backends.contract import DeliveryReport
    from quark_core.delivery.stream import RunStream
    from quark_core.runs.open_run import RunHolder

# Signals that end the process: SIGTERM, and SIGHUP where a terminal or a parent goes.
#
# Schedulers and launchers send SIGTERM, and SIGKILL 30 s later (Docker: 10 s). The handler says
# that the open runs are interrupted and waits until their primary store has all of it; then it
# restores the default and raises the signal again, so that the exit status is that of the signal.
#
# - It waits while the primary store gets on: 15 s at most, and no longer than 5 s in which the
# store takes nothing. Mirrors have the first 2 s: what they lack then stays in the journal, and
# is said.
# - A handler of the program's own is called once everything is on the disk (2 s at most), and
# decides what becomes of the process. What it raises makes the run an interrupted one; see
# `exit_status.find_signal`. Where it returns, the program goes on, and so does the run.
# - The first process of a container (PID 1) outlives the signal, as the kernel has it: its run
# reads as interrupted until its program ends, or says something else.
# - An ignored signal stays ignored, and Python lets the main thread alone install handlers: a run
# that is opened in another one has none. Whoever reads next takes up what is in the journal.
#
# There is no handler for SIGINT: KeyboardInterrupt does it. QUARK_SIGTERM_HANDLER=0 leaves all
# signals alone.

_log = logging.getLogger("quark")

_JOURNAL_S = 2.0
_STORE_S = 15.0
_STANDSTILL_S = 5.0
_MIRRORS_S = 2.0
_TELL_S = 0.5
_POLL_S = 0.005
_SLURM_END_TIME, _SLURM_JOB = "SLURM_JOB_END_TIME", "SLURM_JOB_ID"

# Windows has no SIGHUP.
_NUMBERS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

_previous: dict[int, Callable[[int, FrameType | None], Any] | int] = {}
_received: list[str] = []
_is_ending = False


def watch_signals() -> None:
    """Have signals that end this process end its runs first; called where a run begins."""
    if os.environ.get(settings.SIGTERM_HANDLER, "").strip() == "0":
        return
    # Python allows it in the main thread only; elsewhere the journal must do.
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _NUMBERS:
        current = signal.getsignal(number)
        # None is a handler that was not installed from Python.
        if current is _handle_signal or current is None or current == signal.SIG_IGN:
            continue
        _previous[number] = current
        signal.signal(number, _handle_signal)


def find_received() -> str | None:
    """Name of the newest signal that a handler of the program's own was called for, or None."""
    return _received[-1] if _received else None


def describe_signal(name: str, then: str | None = None) -> RunEnding:
    """The ending of a run whose process got a signal.

    Args:
        name: Name of the signal.
        then: What ended the program thereupon, where a handler of its own did.
    """
    limit = os.environ.get(_SLURM_END_TIME, "")
    if name == "SIGTERM" and limit.isdigit() and time.time() >= int(limit):
        name += f" at the time limit of Slurm job {os.environ.get(_SLURM_JOB, '?')}"
    return RunEnding("signal", name if then is None else f"{name}, then {then}")


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Runs between two steps of the main thread, which may hold any lock: so it takes none."""
    global _is_ending
    if _is_ending:
        return  # a launcher and its scheduler both send it, and once is enough
    name, previous = signal.Signals(number).name, _previous.get(number, signal.SIG_DFL)
    runs = open_runs.peek_runs()
    streams = [run.stream for run in runs]
    if callable(previous):
        if number == signal.SIGTERM:  # by SIGHUP many a program is told to read its files anew
            _received.append(name)
        try:
            _wait_for_journals(streams, time.monotonic() + _JOURNAL_S)
        finally:
            previous(number, frame)
        return
    _is_ending = True
    try:
        _interrupt_runs(name)
        _wait_for_stores(runs)
    finally:
        # Also where Ctrl-C has broken off the wait.
        _is_ending = False
        if os.getpid() != 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


handler_codes.add(_handle_signal.__code__)


def _interrupt_runs(name: str) -> None:
    """Say of each open run that a signal has ended it."""
    for session in open_runs.peek_unended():
        run = session.open_run
        if run.is_over:
            continue
        ending = describe_signal(name)
        said = JsonObject({"message": ending.message, "identifier": "Warning", "signal": name})
        run.emit_event("runtime_interruption", "warning", status="interrupted", payload=said)
        if run.leads:
            said = JsonObject({"status": "interrupted", "ending": ending.to_dict()})
            run.emit_lifecycle("status", said)


def _wait_for_journals(streams: Iterable[RunStream], deadline: float) -> bool:
    """Wait until all that was accepted is on the disk; whether it is."""
    tickets = [(stream, stream.ask_from_signal()) for stream in streams]
    while not all(stream.is_answered(ticket) for stream, ticket in tickets):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _wait_for_stores(runs: list[OpenRun]) -> None:
    """Wait until the primary stores have all that was accepted, or nothing gets on any more."""
    streams = [run.stream for run in runs]
    start = time.monotonic()
    if _wait_for_journals(streams, start + _STANDSTILL_S):
        fewest, moved_at = None, time.monotonic()
        while waiting := sum(stream.count_unstored_from_signal() for stream in streams):
            now = time.monotonic()
            if fewest is None or waiting < fewest:
                fewest, moved_at = waiting, now
            if now >= min(moved_at + _STANDSTILL_S, start + _STORE_S):
                break
            time.sleep(_POLL_S)
    while any(stream.is_behind_from_signal() for stream in streams):
        if time.monotonic() >= start + _MIRRORS_S:
            break
        time.sleep(_POLL_S)
    told: list[OpenRun] = []
    behind = [run for run in runs if run.stream.is_behind_from_signal()]
    for run in behind:
        run.stream.call_from_signal(partial(_tell_what_is_left, run, told))
    deadline = time.monotonic() + _TELL_S
    while len(told) < len(behind) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _tell_what_is_left(run: OpenRun, told: list[OpenRun]) -> None:
    """Done by the delivery thread: logging takes locks, which the main thread may hold."""
    with contextlib.suppress(Exception):
        say_what_is_left(run, run.stream.report())
    told.append(run)


def say_what_is_left(run: OpenRun, report: DeliveryReport, *, is_under_way: bool = False) -> None:
    """Log what waits where, and how it gets delivered; nothing where all is delivered."""
    if report.complete:
        return
    lanes = "; ".join(lane.describe() for lane in report.lanes if not lane.complete)
    if is_under_way:
        _log.info("run %s: %s; another process delivers it now", run.context.run_id, lanes)
        return
    hint = ""
    if run.stream.left_behind is not None:
        hint = f". To deliver waiting records, run: quark sync {run.context.storage_dir}"
    _log.warning("run %s: %s%s", run.context.run_id, lanes, hint)


def is_interruption(error: BaseException) -> bool:
    """Whether what leaves a program says that it was interrupted, rather than that it failed."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, StopRequested)):
        return True
    return find_signal(error) is not None


def word_error(error: BaseException) -> str:
    """An exception in one line, with whatever secrets are in it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def find_ending(error: BaseException) -> RunEnding:
    """Why a run ends that an exception ends, without secrets."""
    message = redact_text(word_error(error))
    if isinstance(error, StopRequested):
        return RunEnding("stop_request", message)
    if isinstance(error, KeyboardInterrupt):
        return RunEnding("signal", find_signal(error) or "SIGINT (Ctrl-C)")
    if isinstance(error, SystemExit):
        told = f"exit status {read_exit_code(error)}"
        # A handler may only note the signal, and leave the exit to the training loop.
        name = find_signal(error) or (find_received() if read_exit_code(error) else None)
        return RunEnding("exit_status", told) if name is None else describe_signal(name, told)
    name = find_signal(error)
    return RunEnding("exception", message) if name is None else describe_signal(name, message)


# Runs that are started in cells of a notebook: what a cell's end means for them.
#
# Only where IPython runs this program already; nothing of it is ever imported.
#
# - An exception in a cell ends no program, so no run either: it is told on every open run of this
# process as an event, and the run goes on. So is an interrupt, which is no error.
# - A cell that started a run and is run again has lost the way to that run: it is ended before the
# new one begins, as failed where a cell has failed since its start, as interrupted where one was.
# So is one that is left open when the kernel is shut down.

_CELL_FAILED, _CELL_INTERRUPTED = "cell_failed", "cell_interrupted"


@dataclass(slots=True)
class _Start:
    """The cell that has started a run.

    Attributes:
        cell: What tells it from others.
        turn: Which execution of a cell that was; a cell may start several runs in one.
        status: As what the run ends, by what its cells have done since.
    """

    cell: object
    turn: object
    status: RunStatus = "completed"


_starts: weakref.WeakKeyDictionary[RunHolder, _Start] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def end_run_of_this_cell() -> None:
    """Before a run begins: end the one that the same cell has started, where it is still open."""
    shell = _find_shell()
    if shell is None:
        return
    cell, turn = _name_cell(shell), _find_turn(shell)
    for session in open_runs.sessions:
        start = _starts.get(session)
        if cell is None or start is None or start.cell != cell or start.turn == turn:
            continue
        _log.info("run %s is ended: the cell that started it runs again", session.run_id)
        try:
            session.end_run(find_status(session))
        except Exception:  # noqa: BLE001 - what is new must be able to begin
            _log.exception("the end of run %s could not be recorded", session.run_id)


def note_cell(session: RunHolder) -> None:
    """After a run has begun: remember its cell, and watch for cells that fail."""
    shell = _find_shell()
    if shell is None:
        return
    cell = _name_cell(shell)
    if cell is None:
        return
    _starts[session] = _Start(cell, _find_turn(shell))
    if shell not in _watched:
        shell.events.register("post_run_cell", _tell_failure)
        _watched.add(shell)


def find_status(session: RunHolder) -> RunStatus:
    """As what a run ends that nobody has ended, by what its cells have done since its start."""
    start = _starts.get(session)
    return "completed" if start is None else start.status


def _find_shell() -> Any:
    """The IPython that runs this program, or None."""
    ipython = sys.modules.get("IPython")
    find = getattr(ipython, "get_ipython", None)
    shell = None if find is None else find()
    return shell if hasattr(shell, "events") else None


def _name_cell(shell: Any) -> object:
    """What tells a cell from others: what the notebook calls it, or what stands in it."""
    parent = getattr(shell, "parent_header", None) or {}
    metadata = parent.get("metadata") if isinstance(parent, dict) else None
    cell_id = metadata.get("cellId") if isinstance(metadata, dict) else None
    if cell_id:
        return "id", cell_id
    sources = getattr(shell, "user_ns", {}).get("In") or [""]
    # Outside of a cell, as at a start of the shell, there is no source to tell by.
    return ("source", sources[-1]) if sources[-1] else None


def _find_turn(shell: Any) -> object:
    """Which execution of a cell goes on now."""
    return getattr(shell, "execution_count", None)


def _tell_failure(result: Any) -> None:
    """IPython's word that a cell has ended."""
    error = getattr(result, "error_in_exec", None) or getattr(result, "error_before_exec", None)
    if error is None:
        return
    details = {
        "exception_type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }
    event_type, severity, level = _CELL_FAILED, "error", "Error"
    message = f"A cell has failed: {type(error).__name__}: {error}"
    status: RunStatus = "failed"
    if isinstance(error, KeyboardInterrupt):
        event_type, severity, level = _CELL_INTERRUPTED, "warning", "Warning"
        message, status = "A cell was interrupted", "interrupted"
    for session in open_runs.sessions:
        start = _starts.get(session)
        if start is not None and start.status != "failed":
            start.status = status
            session.open_run.ending = find_ending(error)
        try:
            session.open_run.emit_event(
                event_type, severity, payload=make_log_payload(message, level, details)
            )
        except Exception:  # noqa: BLE001 - a cell has ended, and that must not fail
            _log.debug("a failed cell could not be reported to %s", session.run_id, exc_info=True)


def emit_end(run: OpenRun, status: RunStatus, ended_us: int) -> None:
    """Say that this process has ended the run, or on a rank that joined it, its part of it."""
    known: dict[str, Any] = {} if run.exit_code is None else {"exit_code": run.exit_code}
    # Whoever ends it where an exception is handled, ends it because of that.
    error = sys.exception()
    if error is not None and run.ending is None and status != "completed":
        log_error(run, error, status)
    name = find_received()
    if status == "interrupted" and run.ending is None and name is not None:
        run.ending = describe_signal(name)
    if run.ending is not None and status != "completed":
        known["ending"] = run.ending.to_dict()
    payload = JsonObject(known) if known else None
    if not run.leads:
        run.emit_event("rank_left", "info", status=status, payload=payload, time_us=ended_us)
        return
    run.emit_event("run_ended", "info", status=status, payload=payload, time_us=ended_us)
    told = ask_extensions(run.extensions, lambda each: each.describe_end(run, status))
    said = {"status": status, **known}
    for each in told:
        said.update(each)
    run.emit_lifecycle("status", said, time_us=ended_us)


def log_error(run: OpenRun, error: BaseException, status: RunStatus) -> None:
    """Write the exception that ends a run into it, with its traceback.

    Args:
        run: The run.
        error: The exception.
        status: "failed" logs a `runtime_error`, "interrupted" a
            `runtime_interruption`.
    """
    failed = status == "failed"
    message = word_error(error)
    run.ending = find_ending(error)
    details = {
        "exception_type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }
    run.emit_event(
        "runtime_error" if failed else "runtime_interruption",
        "error" if failed else "warning",
        status=status,
        payload=make_log_payload(message, "Error" if failed else "Warning", details),
    )


_is_hooked = False
_previous_hook: Callable[..., Any] | None = None
_failure: BaseException | None = None
_exit_watch = ExitWatch()


def watch_process() -> None:
    """Watch for the end of this process; called where a run begins, does its work once."""
    global _is_hooked, _previous_hook
    watch_signals()
    if not _is_hooked:
        _is_hooked = True
        _exit_watch.install()
        _previous_hook = sys.excepthook
        sys.excepthook = _note_exception
        atexit.register(_end_open_runs)


def _note_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _failure
    _failure = error
    if _previous_hook is not None:
        _previous_hook(kind, error, trace)


def _judge(end: BaseException | None) -> tuple[RunStatus, int | None]:
    """How a run ends with the process, and the process's exit code where it is known."""
    if end is None:
        return "completed", None
    if isinstance(end, KeyboardInterrupt):
        return "interrupted", None  # Python ends by the signal itself
    if isinstance(end, SystemExit):
        code = read_exit_code(end)
        return "interrupted" if code or find_signal(end) else "completed", code
    return "interrupted" if is_interruption(end) else "failed", 1


def _end_open_runs() -> None:
    """End what the script left open, as the process ends."""
    end = _exit_watch.find_end() if _failure is None else _failure
    status, code = _judge(end)
    open_runs.process_ends = True
    for session in reversed(open_runs.sessions):
        try:
            session.open_run.exit_code = code
            if end is not None and status != "completed":
                session.log_error(end, status)
            # A kernel that is shut down ends by no error, whatever became of its cells.
            session.end_run(find_status(session) if end is None else status)
        except Exception:  # noqa: BLE001 - the other runs must still be ended
            _log.exception("the end of run %s could not be recorded", session.run_id)
    for run in open_runs.attached:
        run.end_stream("the process ends", settings.exit_timeout_s())
    make_last_calls()
    if isinstance(_failure, KeyboardInterrupt):
        _end_by_the_signal()


def _end_by_the_signal() -> None:
    """Let Python end by SIGINT, as it does after Ctrl-C.

    It remembers that by a flag that any text resets which is executed since, as where a module
    with dataclasses is imported by what a run does at its end.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102 - what sets the flag is such a text itself
