"""Where text leaves for the terminal: nothing passes that could steer it but Quark's own styling.

`guard_streams` makes standard output and standard error such that every text
is made fit on its way, whoever prints it: a command, a log message, a
warning. Only `Console` goes past that, with its styles, and makes fit what it
is given before it adds them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import TextIOWrapper
from typing import IO, TYPE_CHECKING, Any

from quark_core.system.terminal_text import clean_text

if TYPE_CHECKING:
    from typing import TextIO


# What the stream behind it answers; nothing by which text could get past.
_AS_BEFORE = frozenset({"flush", "close", "isatty", "fileno", "encoding", "errors", "closed"})


class GuardedStream:
    """A text stream that makes fit for a terminal what is written to it.

    It has no `buffer`, by which a library would write past it.

    Attributes:
        styled: The stream behind it, for text that is fit and has styles.
    """

    def __init__(self, stream: TextIO) -> None:
        self.styled = stream

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        self.styled.write(clean_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in _AS_BEFORE:
            return getattr(self.styled, name)
        raise AttributeError(name)


def guard_streams() -> None:
    """Guard standard output and standard error of this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            # What a terminal cannot show becomes "?", which is better than no answer.
            stream.reconfigure(errors="replace")
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


def find_styled(stream: IO[str]) -> Any:
    """The stream to which text with styles goes."""
    return stream.styled if isinstance(stream, GuardedStream) else stream
