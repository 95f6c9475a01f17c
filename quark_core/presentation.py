"""Shows objects in notebooks through plugins; without one an object is its plain text."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quark_core.records.runs import RunContext

_log = logging.getLogger("quark")
render_html: Callable[[object], str | None] | None = None
"""Asks the plugins for an object's HTML; `quark_core.backends`, which knows them, sets it."""

_runs: dict[int, tuple[RunContext, ...]] = {}


def paint(value: object) -> str | None:
    """An object as HTML for a notebook, or None: then its plain text is shown.

    Raises nothing: what cannot be painted must not end a cell.
    """
    try:
        return None if render_html is None else render_html(value)
    except Exception:  # noqa: BLE001 - see above
        _log.debug("%s cannot be shown", type(value).__name__, exc_info=True)
        return None


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


def has_kernel() -> bool:
    """Whether this program runs in a notebook, which can show objects that change."""
    return getattr(_find_shell(), "kernel", None) is not None


def _find_shell() -> object:
    """The IPython that runs this program, or None."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()
