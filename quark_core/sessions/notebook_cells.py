"""Runs that are started in cells of a notebook: what a cell's end means for them.

Only where IPython runs this program already; nothing of it is ever imported.

- An exception in a cell ends no program, so no run either: it is told on every open run of this
  process as an event, and the run goes on. So is an interrupt, which is no error.
- A cell that started a run and is run again has lost the way to that run: it is ended before the
  new one begins, as failed where a cell has failed since its start, as interrupted where one was.
  So is one that is left open when the kernel is shut down.
"""

from __future__ import annotations

import logging
import sys
import traceback
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quark_core.records import RunStatus
from quark_core.runs.open_run import open_runs
from quark_core.sessions.end_causes import find_ending
from quark_core.writers.events import make_log_payload

if TYPE_CHECKING:
    from quark_core.runs.open_run import RunHolder

_log = logging.getLogger("quark")

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
            _log.debug("a failed cell could not be told on %s", session.run_id, exc_info=True)
