"""Styled text on the terminal, and how values look in it.

This is the only place where Quark's commands have Rich's from. What a text says
is made fit for the terminal, and none of it is markup, an emoji code or a link: a
name such as `[red]x` is those six characters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import IO, Any

import rich.console
import rich.progress
import rich.text
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from quark.cli.terminal import find_styled
from quark_core.backends.run_summary import StoredRun
from quark_core.records import RunRecord
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line, clean_text

UNBOUNDED = 2_000
"""Columns of what is no terminal."""


class Text(rich.text.Text):
    """A text with styles, in one line unless it says otherwise.

    Args:
        text: What it says.
        style: How.
        lines: Whether ends of lines in it are what they are.
        options: As of Rich's own.
    """

    def __init__(
        self, text: str = "", style: Any = "", *, lines: bool = False, **options: Any
    ) -> None:
        super().__init__(clean_text(text) if lines else clean_line(text), style, **options)

    @classmethod
    def assemble(cls, *parts: Any, **options: Any) -> Text:
        """A text of several parts: texts, or pairs of a text and its style."""
        text = cls(**options)
        for part in parts:
            if isinstance(part, tuple):
                text.append(*part)
            else:
                text.append(part)
        return text

    def append(self, text: rich.text.Text | str, style: Any = None, *, lines: bool = False) -> Text:
        """Add a text."""
        if isinstance(text, str):
            text = clean_text(text) if lines else clean_line(text)
        super().append(text, style)
        return self


class Console(rich.console.Console):
    """Prints to the terminal with styles; `stderr=True` to standard error.

    Lines for a pipe or a file are as long as what they say: programs that read them need whole
    names. COLUMNS bounds them all the same.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = UNBOUNDED

    @property
    def file(self) -> IO[str]:
        """The stream that it prints to."""
        found: IO[str] = find_styled(super().file)
        return found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        """See Rich's own: what is printed, or stands in a table, as a str."""
        return super().render_str(clean_line(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See Rich's own. Whatever a renderable is made of, its segments are fit."""
        for text, style, control in super().render(renderable, options):
            if control:
                yield Segment(text, style, control)
                continue
            unlinked = style.update_link(None) if style is not None and style.link else style
            yield Segment(clean_text(text), unlinked)


class TextColumn(rich.progress.TextColumn):
    """A column of a progress bar in which nothing is markup."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)


_STYLES = {
    "completed": "green",
    "failed": "red",
    "interrupted": "yellow",
    "lost": "magenta",
    "running": "cyan",
}


def describe_fork(run: RunRecord, *, short: bool = False) -> str | None:
    """Which run a run was forked from, and where; None where it is no fork."""
    if run.fork_step is None or run.parent_run_id is None:
        return None
    parent = shorten_run_id(run.parent_run_id) if short else run.parent_run_id
    return f"{parent} at step {run.fork_step}"


def describe_state(state: str) -> Text:
    """A run's state in its colour."""
    return Text(state, style=_STYLES.get(state, ""))


def describe_run_state(stored: StoredRun) -> Text:
    """A run's state in its colour, and where it broke off, why."""
    text = describe_state(stored.state)
    if stored.is_broken_off:
        text.append(stored.describe_end().removeprefix(stored.state))
    return text


def describe_number(value: float | None) -> str:
    """A metric's value in at most ten characters."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
    return f"{value:.3e}"


def describe_duration(seconds: float) -> str:
    """A duration such as 4.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def find_duration_s(stored: StoredRun, last_metric_at: str | None = None) -> float:
    """How long a run took, or has taken, in seconds.

    Args:
        stored: The run.
        last_metric_at: When its newest metric was logged. A lost run counts to
            its last sign of life: this, or its last heartbeat.
    """
    end = stored.run.ended_at
    if end is None and stored.state == "lost":
        beats = [moment for moment in (stored.heartbeat_at, last_metric_at) if moment is not None]
        end = max(beats, key=datetime.fromisoformat, default=None)
    stop = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
    return max(0.0, (stop - datetime.fromisoformat(stored.run.created_at)).total_seconds())


def describe_age(moment: str) -> str:
    """How long ago something was: just now, 5 min ago, 3 h ago, or a date."""
    age_s = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    if age_s < 60:
        return "just now"
    if age_s < 3600:
        return f"{int(age_s // 60)} min ago"
    if age_s < 86400:
        return f"{int(age_s // 3600)} h ago"
    return moment[:10]
