"""Reads of sets of weak references that other threads add to."""

from __future__ import annotations

import weakref
from typing import TypeVar

_Member = TypeVar("_Member")


def list_members(members: weakref.WeakSet[_Member]) -> list[_Member]:
    """The members of a set, while other threads may add and take out some; never raises for that.

    Iterating over a WeakSet is Python code that may be interrupted after each member, and raises
    RuntimeError where the set has changed meanwhile.
    """
    while True:
        try:
            return list(members)
        except RuntimeError:
            continue
