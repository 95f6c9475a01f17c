"""Text as HTML: no markup, and nothing that turns or hides what is read."""

from __future__ import annotations

import html

from quark_core.system.terminal_text import clean_text


def escape(text: str) -> str:
    """A text for HTML, whoever wrote it; see `clean_text` for what is spelled out."""
    return html.escape(clean_text(text))
