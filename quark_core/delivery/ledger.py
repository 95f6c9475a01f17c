"""What stays of a run's lanes when its journals are gone: one line per writer and lane.

`delivered.jsonl` in the run's directory, made only where a run has mirrors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ["LedgerLine", "append_lines", "read_lines"]

_log = logging.getLogger("quark")
_NAME = "delivered.jsonl"


class LedgerLine(msgspec.Struct, frozen=True):
    """One writer's stream to one backend, as it ended.

    Attributes:
        writer_id, attempt, rank: The writer.
        lane: Name of the lane.
        specification: How to ask for its backend, without secrets.
        primary: Whether it is the run's primary.
        batches: How many batches were passed to it.
        unknown: Records that it may or may not have.
        begun: Whether this says only that a replay was begun.
    """

    writer_id: str
    attempt: int
    rank: int
    lane: str
    specification: str
    primary: bool = False
    batches: int = 0
    unknown: int = 0
    begun: bool = False


def append_lines(run_path: Path, lines: Iterable[LedgerLine]) -> None:
    """Add lines; where they cannot be written, a log entry is all that is lost."""
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            run_path / _NAME,
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0),
            0o666,
        )
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.debug("what was delivered is not noted in %s: %s", run_path, error)


def read_lines(run_path: Path) -> list[LedgerLine]:
    """All lines of a run; a torn one is left out."""
    try:
        data = (run_path / _NAME).read_bytes()
    except OSError:
        return []
    lines = []
    for line in data.splitlines():
        try:
            lines.append(msgspec.json.decode(line, type=LedgerLine))
        except msgspec.DecodeError:
            continue
    return lines
