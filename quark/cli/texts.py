"""Styled text on the terminal, and how values look in it.

This is the only place where Quark's commands have Rich's from. What a text says
is made fit for the terminal, and none of it is markup, an emoji code or a link: a
name such as `[red]x` is those six characters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

import rich.console
import rich.progress
import rich.text
from rich import box
from rich.console import ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table

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


FOLD: dict[str, Any] = {"overflow": "fold"}
WHOLE: dict[str, Any] = {"no_wrap": True}
RIGHT = {"justify": "right", **WHOLE}
BOLD = {"style": "bold", **WHOLE}
DIM = {"style": "dim", **WHOLE}
PLAIN: dict[str, Any] = {}
"""How columns of tables are: folded, each cell in one line, numbers to the right, or Rich's way."""


def make_table(columns: Mapping[Any, dict[str, Any]], **options: Any) -> Table:
    """A table without rows.

    Args:
        columns: Head of a column, or heads of several -> how they are.
        options: As of Rich's own.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for heads, column in columns.items():
        for head in (heads,) if isinstance(heads, str) else heads:
            table.add_column(Text(head), **column)
    return table


def make_grid(*columns: dict[str, Any]) -> Table:
    """Columns without heads, two blanks apart, without rows."""
    grid = Table.grid(padding=(0, 2))
    for column in columns:
        grid.add_column(**column)
    return grid


def indent(part: RenderableType, columns: int) -> Padding:
    """Something with so many blanks before each line."""
    return Padding(part, (0, 0, 0, columns), expand=False)


class TextColumn(rich.progress.TextColumn):
    """A column of a progress bar in which nothing is markup."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)


def make_progress(*columns: str | rich.progress.ProgressColumn) -> rich.progress.Progress:
    """A bar on standard error; where nothing can be redrawn it would only leave an empty line.

    Args:
        *columns: What stands behind the bar.
    """
    console = Console(stderr=True)
    return rich.progress.Progress(
        TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        *(TextColumn(one) if isinstance(one, str) else one for one in columns),
        console=console,
        disable=not console.is_interactive,
        transient=True,
    )


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
