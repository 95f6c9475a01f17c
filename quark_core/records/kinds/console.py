"""The console output of a run."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, StreamRecord

ConsoleStream = Literal["stdout", "stderr"]


class ConsoleRecord(StreamRecord, frozen=True, gc=False):
    """One line of a run's console, or how far one has come that goes on.

    A progress bar is one line that is written again and again, and a text without an end of
    line may go on: each such state is a record, and of the records with one writer, stream and
    line the last one counts.

    Attributes:
        stream: `stdout` or `stderr`.
        line: Which line of its stream it is, from 0 on.
        text: The line, without its end, control sequences and secrets.
        is_whole: Whether its end has come.
        left_out: Lines of this stream, since the record before, that were not kept because
            too many came.
    """

    stream: str
    line: int
    text: str
    is_whole: bool = True
    left_out: int = 0

    KIND: ClassVar[str] = "console"
    TABLE: ClassVar[str] = "console"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(words={"stream": get_args(ConsoleStream)})

    def check(self) -> None:
        """Refuse a line before the first one."""
        if self.line < 0 or self.left_out < 0:
            raise SchemaValidationError("ConsoleRecord.line and left_out must not be negative")
