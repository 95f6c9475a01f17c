"""Figures of plotting libraries as the bytes of a file, or as JSON."""

from __future__ import annotations

import io
from typing import Any

from quark_core.errors import SchemaValidationError

__all__ = ["MATPLOTLIB_FORMATS", "draw_matplotlib", "find_matplotlib_figure", "is_plotly_figure"]

MATPLOTLIB_FORMATS = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}
"""Format of a matplotlib figure -> media type of its file."""

_MAX_DEPTH = 8  # axes may be in a part of a figure, which may be in a part of one


def find_matplotlib_figure(figure: Any) -> Any | None:
    """The matplotlib figure that an object is, or that its axes are of; else None."""
    candidate = figure
    for _ in range(_MAX_DEPTH):
        module = type(candidate).__module__.partition(".")[0]
        if module == "matplotlib" and hasattr(candidate, "savefig"):
            return candidate
        candidate = getattr(candidate, "figure", None)
    return None


def is_plotly_figure(figure: Any) -> bool:
    """Whether an object is a figure of plotly."""
    return type(figure).__module__.partition(".")[0] == "plotly" and hasattr(figure, "to_json")


def draw_matplotlib(figure: Any, file_format: str, dpi: float) -> bytes:
    """A matplotlib figure as a file.

    Raises:
        SchemaValidationError: An unknown format, or a figure that cannot be drawn.
    """
    if not isinstance(file_format, str) or file_format not in MATPLOTLIB_FORMATS:
        raise SchemaValidationError(
            f"file_format must be one of {', '.join(MATPLOTLIB_FORMATS)}, got {file_format!r:.40}"
        )
    file = io.BytesIO()
    try:
        figure.savefig(file, format=file_format, dpi=dpi)
    except Exception as error:
        # Text in a figure may be any mathematics, and drawing it may raise anything.
        raise SchemaValidationError(
            f"figure cannot be drawn: {type(error).__name__}: {error}"
        ) from error
    return file.getvalue()
