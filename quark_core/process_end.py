"""What happens to open runs when the process is told to end, or ends by itself.

- SIGTERM: everything accepted is brought to the disk (2 s at most), then the
  handler that was there before is called, or the default restored and the
  signal raised again, so that the exit status is that of SIGTERM. There is no
  handler for SIGINT: KeyboardInterrupt does it.
- An exception that nobody catches marks the runs as failed.
- At exit, runs that were left open are ended within the exit timeout.

QUARK_SIGTERM_HANDLER=0 leaves SIGTERM alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from quark_core import settings
from quark_core.json_object import JsonObject
from quark_core.open_run import OpenRun, open_runs
from quark_core.records import RunStatus

__all__ = ["watch_process"]

_log = logging.getLogger("quark")
_SIGNAL_TIMEOUT_S = 2.0
_POLL_S = 0.005

_watched = False
_previous_handler: Callable[[int, FrameType | None], Any] | int | None = None
_previous_hook: Callable[..., Any] | None = None
_failure: BaseException | None = None


def watch_process() -> None:
    """Watch for the end of this process; called where a run begins, does its work once."""
    global _watched, _previous_hook
    _install_signal_handler()
    if not _watched:
        _watched = True
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
    runs = [session.open_run for session in open_runs.peek_sessions()]
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


def _end_open_runs() -> None:
    """End what the script left open: as failed where an exception ended it."""
    status: RunStatus = "completed"
    if _failure is not None:
        status = "interrupted" if isinstance(_failure, KeyboardInterrupt) else "failed"
    for session in reversed(open_runs.sessions):
        try:
            if _failure is not None:
                session.log_error(_failure, status)
            session.end_run(status)
        except Exception:  # noqa: BLE001 - the other runs must still be ended
            _log.exception("the end of run %s could not be recorded", session.run_id)
    for run in open_runs.attached:
        run.end_stream("the process ends", settings.exit_timeout_s())
