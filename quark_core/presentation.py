"""How what stands above the core shows its objects, which know nothing of pages and notebooks.

`quark` says where its painters are; until it has, or without it, an object is its plain text.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

__all__ = ["paint", "report_session", "show_by"]

_log = logging.getLogger("quark")
_room: str | None = None


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


def report_session(session: object, **options: Any) -> Any:
    """The report of a session, as `quark.report` makes it.

    Raises:
        RuntimeError: The core is used without `quark`.
    """
    if _room is None:
        raise RuntimeError("a report is made by quark: `import quark` first")
    return import_module(f"{_room}.report").report(session, **options)
