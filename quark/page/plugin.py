"""Shows objects of the core in notebooks, and makes the reports of sessions."""

from __future__ import annotations

from collections.abc import Mapping

from quark_core.hookspecs import hookimpl


@hookimpl
def quark_render_html(value: object) -> str | None:
    """The card of an object, by the name of its class."""
    from quark.page.notebook import PAINTERS

    paint = PAINTERS.get(type(value).__name__)
    return None if paint is None else paint(value)


@hookimpl
def quark_register_session_methods() -> Mapping[str, str]:
    """The functions behind `session.report` and a session as the last value of a cell."""
    return {"report": "quark.page.report:report", "show_live": "quark.page.notebook:show_live"}
