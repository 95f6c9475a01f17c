"""How what stands above the core shows its objects, which know nothing of pages and notebooks.

`quark` says where its painters are; until it has, or without it, an object is its plain text.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark_core.records.runs import RunContext

__all__ = ["bundle", "find_runs", "note_runs", "paint", "report_session", "show_by", "show_live"]

_log = logging.getLogger("quark")
_room: str | None = None
_runs: dict[int, tuple[RunContext, ...]] = {}


def show_by(package: str) -> None:
    """Say which package has `notebook.PAINTERS` and `report.report`; it is imported late."""
    global _room
    _room = package


def paint(value: object) -> str | None:
    """An object as HTML for a notebook, or None: then its plain text is shown.

    Raises nothing: what cannot be painted must not end a cell.
    """
    if _room is None:
        return None
    try:
        painters = import_module(f"{_room}.notebook").PAINTERS
        text: str | None = painters[type(value).__name__](value)
    except Exception:  # noqa: BLE001 - see above
        _log.debug("%s cannot be shown", type(value).__name__, exc_info=True)
        return None
    return text


def note_runs(value: object, contexts: Sequence[RunContext]) -> None:
    """Remember which runs a result is of, as long as it is there: it is shown with their report.

    Args:
        value: The result, which can be referred to weakly.
        contexts: Its runs, the first one first.
    """
    place = id(value)
    _runs[place] = tuple(contexts)
    weakref.finalize(value, _runs.pop, place, None).atexit = False


def find_runs(value: object) -> tuple[RunContext, ...]:
    """The runs that a result is of; none where that was not noted, as of one that was unpickled."""
    return _runs.get(id(value), ())


def bundle(value: object) -> dict[str, str] | None:
    """An object as plain text and as HTML, or None where nobody wants HTML of it.

    What IPython asks for first, also in a terminal, where HTML is made for nothing.
    """
    formatter = getattr(_find_shell(), "display_formatter", None)
    if formatter is not None and "text/html" not in formatter.active_types:
        return None
    html = paint(value)
    return None if html is None else {"text/plain": repr(value), "text/html": html}


def show_live(value: object) -> None:
    """Show an object that changes in the cell that runs now, and go on with it as it changes.

    Raises:
        NotImplementedError: It is shown as it is now, by `bundle`: that is how IPython is told.
    """
    shell = _find_shell()
    if _room is None or getattr(shell, "kernel", None) is None:
        raise NotImplementedError
    try:
        is_shown = import_module(f"{_room}.notebook").show_live(value)
    except Exception:  # noqa: BLE001 - what cannot be shown must not end a cell
        _log.debug("%s cannot be shown live", type(value).__name__, exc_info=True)
        is_shown = False
    if not is_shown:
        raise NotImplementedError


def _find_shell() -> object:
    """The IPython that runs this program, or None."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


def report_session(session: object, **options: Any) -> Any:
    """The report of a session, as `quark.report` makes it.

    Raises:
        RuntimeError: The core is used without `quark`.
    """
    if _room is None:
        raise RuntimeError("a report is made by quark: `import quark` first")
    return import_module(f"{_room}.report").report(session, **options)
