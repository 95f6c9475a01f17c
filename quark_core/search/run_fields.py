"""The fields of a run that can be searched and sorted by, and what they hold."""

from __future__ import annotations

from typing import Literal

__all__ = ["CHOICES", "RUN_FIELDS", "RunFieldType"]

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

CHOICES: dict[str, tuple[str, ...]] = {
    "status": ("running", "completed", "failed", "interrupted"),
    "state": ("running", "completed", "failed", "interrupted", "lost"),
}
"""Fields that hold one of a few words."""
