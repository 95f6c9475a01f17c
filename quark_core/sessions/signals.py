"""Signals that end the process: SIGTERM, and SIGHUP where a terminal or a parent goes.

Schedulers and launchers send SIGTERM, and SIGKILL 30 s later (Docker: 10 s). The handler says
that the open runs are interrupted and waits until their primary store has all of it; then it
restores the default and raises the signal again, so that the exit status is that of the signal.

- It waits while the primary store gets on: 15 s at most, and no longer than 5 s in which the
  store takes nothing. Mirrors have the first 2 s: what they lack then stays in the journal, and
  is said.
- A handler of the program's own is called once everything is on the disk (2 s at most), and
  decides what becomes of the process. What it raises makes the run an interrupted one; see
  `exit_status.find_signal`. Where it returns, the program goes on, and so does the run.
- The first process of a container (PID 1) outlives the signal, as the kernel has it: its run
  reads as interrupted until its program ends, or says something else.
- An ignored signal stays ignored, and Python lets the main thread alone install handlers: a run
  that is opened in another one has none. Whoever reads next takes up what is in the journal.

There is no handler for SIGINT: KeyboardInterrupt does it. QUARK_SIGTERM_HANDLER=0 leaves all
signals alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from quark_core.config import settings
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import RunEnding
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.system.exit_status import handler_codes

if TYPE_CHECKING:
    from quark_core.backends.delivery_report import DeliveryReport
    from quark_core.delivery.stream import RunStream

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
        hint = f". Deliver what waits with: quark sync {run.context.storage_dir}"
    _log.warning("run %s: %s%s", run.context.run_id, lanes, hint)
