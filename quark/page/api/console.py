"""What a run has printed, a page of lines at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.page.api.parameters import MAX_ROWS, Parameters
from quark_core.runs.console_lines import find_key, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from quark.page.api.source import PageSource
    from quark_core.records.kinds.console import ConsoleRecord

_ROWS = 200
_STREAMS = ("", "stdout", "stderr")


def list_console(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """A page of lines, the newest by default, oldest first.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    stream = parameters.get_word("stream", "", _STREAMS) or None
    text = (parameters.get_text("text") or "").lower()
    before = parameters.get_text("before")
    rank = parameters.get_integer("rank")
    limit = parameters.get_bounded("limit", _ROWS, MAX_ROWS)
    is_wanted: Callable[[ConsoleRecord], bool] | None = None
    if text:
        is_wanted = lambda line: text in line.text.lower()  # noqa: E731
    # One more says whether there are older ones. Those before a line are looked for among all.
    tail = limit + 1 if before is None else None
    lines = read_lines(
        source.reader, run_id, stream=stream, rank=rank, tail=tail, is_wanted=is_wanted
    )
    if before is not None:
        place = next((at for at, line in enumerate(lines) if _name(line) == before), len(lines))
        lines = lines[:place]
    shown = lines[max(0, len(lines) - limit) :]
    return {
        "lines": [_describe(line) for line in shown],
        "next": _name(shown[0]) if len(lines) > len(shown) else None,
    }


def _name(line: ConsoleRecord) -> str:
    """A name that a line keeps while it goes on, which the record's id is not."""
    return "-".join(map(str, find_key(line)))


def _describe(line: ConsoleRecord) -> dict[str, Any]:
    return {
        "id": _name(line),
        "at": line.timestamp,
        "stream": line.stream,
        "rank": line.rank,
        "attempt": line.attempt,
        "text": line.text,
        "is_whole": line.is_whole,
        "left_out": line.left_out,
    }
