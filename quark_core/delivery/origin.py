"""Who writes a stream."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["Origin", "make_writer_id"]


def make_writer_id() -> str:
    """A new id for one process's stream; it is never used twice."""
    return os.urandom(6).hex()


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of one stream have in common."""

    run_id: str | None
    writer_id: str = field(default_factory=make_writer_id)
    attempt: int = 0
    rank: int = 0
