"""What a layered configuration remembers: each value that a setting was given, by whom, where."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

COMMAND_LINE = "command line"
ARGPARSE_DEFAULT = "argparse default"
NOWHERE = ""
"""The place of what has none."""

_ROOT = Path(__file__).parents[3]
_OURS = tuple(
    f"{_ROOT / name}{os.sep}" for name in ("quark", "quark_backends", "quark_core", "quark_torch")
)
# A loop that counts up a setting is no history worth keeping whole.
_MOST_OF_A_KEY = 50


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value that a setting was given.

    Attributes:
        source: By what.
        place: Where that stands, or None.
        value: The value.
    """

    source: str
    place: str | None
    value: Any


@dataclass(slots=True)
class Assignments:
    """All values that the settings of one configuration were given.

    Attributes:
        source: What is at work now.
        place: Where that stands, or `NOWHERE`; None to ask the stack for the line that assigns.
        by_key: Setting -> its values, the oldest first.
    """

    source: str = "code"
    place: str | None = None
    by_key: dict[str, list[Assignment]] = field(default_factory=dict)

    def note(self, key: str, value: object) -> None:
        """Remember that a setting has a value from now on."""
        place = find_place() if self.place is None else self.place or None
        known = self.by_key.setdefault(key, [])
        known.append(Assignment(self.source, place, copy_containers(value)))
        if len(known) > _MOST_OF_A_KEY:
            # The first one is worth more than those between.
            del known[1]

    def copy(self) -> dict[str, list[Assignment]]:
        """What is remembered now, as it may be put back."""
        return {key: list(each) for key, each in self.by_key.items()}


def find_place() -> str | None:
    """File and line of the nearest frame that is none of Quark's: `train.py:7`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            return name_place(name, frame.f_lineno)
        frame = frame.f_back
    return None


def name_place(name: str, line: int | None = None) -> str:
    """A file as people call it: from the working directory, or the folder of the script."""
    shown = name if name.startswith("<") else _shorten(name)
    return shown if line is None else f"{shown}:{line}"


def _shorten(name: str) -> str:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for folder in (None, os.path.dirname(script) if isinstance(script, str) else None):
        try:
            shown = os.path.relpath(name, folder or None)
        except (OSError, ValueError):
            continue
        if not shown.startswith(".."):
            return shown
    return name


def copy_containers(value: Any) -> Any:
    """A copy in which lists, sets and mappings are its own; all else is the same object."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_containers(item) for item in value]
    if type(value) is set:
        return set(value)
    return value
