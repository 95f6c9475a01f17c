"""The fields of a run that can be searched and sorted by, and what they hold."""

from __future__ import annotations

from typing import Literal

__all__ = ["ALIASES", "CHOICES", "RUN_FIELDS", "RunFieldType"]

RunFieldType = Literal["text", "number", "time", "tags"]

RUN_FIELDS: dict[str, RunFieldType] = {
    "attempt": "number",
    "created": "time",
    "duration": "number",
    "ended": "time",
    "git_commit": "text",
    "id": "text",
    "name": "text",
    "notes": "text",
    "parent": "text",
    "project": "text",
    "state": "text",
    "status": "text",
    "step": "number",
    "tags": "tags",
    "updated": "time",
}
"""Name of a field -> what it holds."""

ALIASES = {"started": "created"}
"""Another name of a field -> its name: what the lists of runs call it."""

CHOICES: dict[str, tuple[str, ...]] = {
    "status": ("running", "completed", "failed", "interrupted"),
    "state": ("running", "completed", "failed", "interrupted", "lost"),
}
"""Fields that hold one of a few words."""
