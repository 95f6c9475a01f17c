"""Tabs that plugins add to the page of a run: each is a table that a function of theirs makes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark_core.backends.registry import default_registry
from quark_core.errors import SchemaValidationError
from quark_core.system.terminal_text import clean_text

if TYPE_CHECKING:
    from quark.page.api.source import PageSource

_log = logging.getLogger("quark")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PLACE = re.compile(r"[\w.]+:\w+")
_MOST_ROWS = 1000


def list_views() -> list[dict[str, str]]:
    """Name and title of each view, sorted by name."""
    return [
        {"name": name, "title": name.replace("_", " ").capitalize()}
        for name in sorted(_find_places())
    ]


def read_view(source: PageSource, run_id: str, name: str) -> dict[str, Any]:
    """The table of a view, its first rows.

    Raises:
        RunNotFoundError: There is no such run.
        SchemaValidationError: There is no such view, or its plugin fails.
    """
    place = _find_places().get(name)
    if place is None:
        raise SchemaValidationError(f"no plugin has a view {name!r:.60}")
    source.load_run(run_id)
    module, _, attribute = place.partition(":")
    try:
        made = getattr(import_module(module), attribute)(source.reader, run_id)
        columns, rows = [str(each) for each in made["columns"]], [list(row) for row in made["rows"]]
    except (Exception, SystemExit) as error:
        _log.exception("view %s at %s", name, place)
        reason = clean_text(f"{type(error).__name__}: {error}")
        raise SchemaValidationError(f"view {name!r} at {place} failed: {reason}") from error
    if any(len(row) != len(columns) for row in rows):
        raise SchemaValidationError(f"view {name!r} at {place} has rows unlike its columns")
    return {"columns": columns, "rows": rows[:_MOST_ROWS], "count": len(rows)}


def _find_places() -> dict[str, str]:
    """View -> where its function is; one that is declared wrongly is left out, and logged."""
    found: dict[str, str] = {}
    for plugin, declared in default_registry().collect("quark_register_views"):
        views = declared.items() if isinstance(declared, Mapping) else [(declared, None)]
        for name, place in views:
            is_named = isinstance(name, str) and _NAME.fullmatch(name) and name not in found
            if is_named and isinstance(place, str) and _PLACE.fullmatch(place):
                found[name] = place
            else:
                _log.warning("left out a view of plugin %s: %r at %r", plugin, name, place)
    return found
