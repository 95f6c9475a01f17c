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
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from quark_core.config import settings
from quark_core.records import RunStatus
from quark_core.records.json_object import JsonObject
from quark_core.runs.extensions import ask_extensions
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.sessions.end_causes import find_ending, is_interruption, word_error
from quark_core.sessions.notebook_cells import find_status
from quark_core.sessions.signals import describe_signal, find_received, watch_signals
from quark_core.system.exit_status import ExitWatch, find_signal, make_last_calls, read_exit_code
from quark_core.writers.events import make_log_payload

_log = logging.getLogger("quark")


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


_watched = False
_previous_hook: Callable[..., Any] | None = None
_failure: BaseException | None = None
_exit_watch = ExitWatch()


def watch_process() -> None:
    """Watch for the end of this process; called where a run begins, does its work once."""
    global _watched, _previous_hook
    watch_signals()
    if not _watched:
        _watched = True
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
