"""The end of a run: what is said of it, and what happens to open runs when the process ends.

- SIGTERM: everything accepted is brought to the disk (2 s at most), then the
  handler that was there before is called, or the default restored and the
  signal raised again, so that the exit status is that of SIGTERM. There is no
  handler for SIGINT: KeyboardInterrupt does it.
- At exit, runs that were left open are ended within the exit timeout: as failed
  where an exception that nobody caught has ended the program, as interrupted
  where it ends with a status other than 0 or by Ctrl-C. See `exit_status`.

QUARK_SIGTERM_HANDLER=0 leaves SIGTERM alone.
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
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import StopRequested
from quark_core.records import RunStatus
from quark_core.records.json_object import JsonObject
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.system.exit_status import ExitWatch, last_calls, read_exit_code
from quark_core.writers.events import make_log_payload

if TYPE_CHECKING:
    from quark_core.backends.delivery_report import DeliveryReport

__all__ = ["emit_end", "log_error", "say_what_is_left", "watch_process"]

_log = logging.getLogger("quark")


def emit_end(run: OpenRun, status: RunStatus, ended_us: int) -> None:
    """Say that this process has ended the run, or on a rank that joined it, its part of it."""
    code = {} if run.exit_code is None else {"exit_code": run.exit_code}
    payload = JsonObject(code) if code else None
    if not run.leads:
        run.emit_event("rank_left", "info", status=status, payload=payload, time_us=ended_us)
        return
    run.emit_event("run_ended", "info", status=status, payload=payload, time_us=ended_us)
    said = {"status": status, **code, **_tell_trial(run, status)}
    run.emit_lifecycle("status", said, time_us=ended_us)


def _tell_trial(run: OpenRun, status: RunStatus) -> dict[str, Any]:
    """What the end of a run says of the trial that it has."""
    if run.trial is None:
        return {}
    try:
        told = run.trial.tell(run, status)
    except Exception:  # noqa: BLE001 - the run must end all the same, and its status says enough
        _log.exception("run %s: what became of its trial could not be told", run.context.run_id)
        return {}
    return {} if told is None else {"trial": told}


def log_error(run: OpenRun, error: BaseException, status: RunStatus) -> None:
    """Write the exception that ends a run into it, with its traceback.

    Args:
        run: The run.
        error: The exception.
        status: "failed" logs a `runtime_error`, "interrupted" a
            `runtime_interruption`.
    """
    failed = status == "failed"
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    run.last_error = redact_text(message)
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


def say_what_is_left(run: OpenRun, report: DeliveryReport) -> None:
    """Log what waits where, and how it gets delivered; nothing where all is delivered."""
    if report.complete:
        return
    lanes = "; ".join(lane.describe() for lane in report.lanes if not lane.complete)
    hint = ""
    if run.stream.left_behind is not None:
        hint = f". Deliver what waits with: quark sync {run.context.storage_dir}"
    _log.warning("run %s: %s%s", run.context.run_id, lanes, hint)


_SIGNAL_TIMEOUT_S = 2.0
_POLL_S = 0.005

_watched = False
_previous_handler: Callable[[int, FrameType | None], Any] | int | None = None
_previous_hook: Callable[..., Any] | None = None
_failure: BaseException | None = None
_exit_watch = ExitWatch()


def watch_process() -> None:
    """Watch for the end of this process; called where a run begins, does its work once."""
    global _watched, _previous_hook
    _install_signal_handler()
    if not _watched:
        _watched = True
        _exit_watch.install()
        _previous_hook = sys.excepthook
        sys.excepthook = _note_exception
        atexit.register(_end_open_runs)


def _install_signal_handler() -> None:
    global _previous_handler
    if os.environ.get(settings.SIGTERM_HANDLER, "").strip() == "0":
        return
    # Python allows it in the main thread only; elsewhere the journal must do.
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGTERM)
    # None is a handler that was not installed from Python; an ignored signal stays ignored.
    if current is _handle_signal or current is None or current == signal.SIG_IGN:
        return
    _previous_handler = current
    signal.signal(signal.SIGTERM, _handle_signal)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Runs between two steps of the main thread, which may hold any lock: so it takes none."""
    runs = [session.open_run for session in open_runs.peek_unended()]
    ends_here = not callable(_previous_handler)
    for run in runs:
        if ends_here and not run.is_over:
            _mark_interrupted(run)
    tickets = [(run.stream, run.stream.ask_from_signal()) for run in runs]
    deadline = time.monotonic() + _SIGNAL_TIMEOUT_S
    while time.monotonic() < deadline:
        if all(stream.is_answered(ticket) for stream, ticket in tickets):
            break
        time.sleep(_POLL_S)
    if callable(_previous_handler):
        _previous_handler(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _mark_interrupted(run: OpenRun) -> None:
    message = JsonObject({"message": "SIGTERM", "identifier": "Warning", "signal": "SIGTERM"})
    run.emit_event("runtime_interruption", "warning", status="interrupted", payload=message)
    if run.leads:
        run.emit_lifecycle("status", {"status": "interrupted"})


def _note_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _failure
    _failure = error
    if _previous_hook is not None:
        _previous_hook(kind, error, trace)


def _judge(end: BaseException | None) -> tuple[RunStatus, int | None]:
    """How a run ends with the process, and the process's exit code where it is known."""
    if isinstance(end, KeyboardInterrupt):
        return "interrupted", None  # Python ends by the signal itself
    if isinstance(end, StopRequested):
        return "interrupted", 1
    if isinstance(end, SystemExit):
        code = read_exit_code(end)
        return "interrupted" if code else "completed", code
    return ("completed", None) if end is None else ("failed", 1)


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
            session.end_run(status)
        except Exception:  # noqa: BLE001 - the other runs must still be ended
            _log.exception("the end of run %s could not be recorded", session.run_id)
    for run in open_runs.attached:
        run.end_stream("the process ends", settings.exit_timeout_s())
    for function in last_calls:
        function()
    if isinstance(_failure, KeyboardInterrupt):
        _end_by_the_signal()


def _end_by_the_signal() -> None:
    """Let Python end by SIGINT, as it does after Ctrl-C.

    It remembers that by a flag that any text resets which is executed since, as where a module
    with dataclasses is imported by what a run does at its end.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102 - what sets the flag is such a text itself
