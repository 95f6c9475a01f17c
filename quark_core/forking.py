"""Keeps forks away from imports that threads of ours are at.

A lock that Python holds for a module while one thread imports it is held for
ever in a child that is forked meanwhile, so that the child's own import of
the module never returns. Training forks (data loaders do), and our threads
import late, so a fork waits for the import.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]

# A fork in the middle of an import of its own must not wait for ever.
_FORK_TIMEOUT_S = 5.0

_guard = threading.Lock()
_held = threading.local()


@contextmanager
def importing() -> Iterator[None]:
    """Around late imports on threads of ours; forks of this process wait for its end."""
    with _guard:
        yield


def _before() -> None:
    _held.guard = _guard.acquire(timeout=_FORK_TIMEOUT_S)


def _after_in_parent() -> None:
    if _held.guard:
        _guard.release()


def _after_in_child() -> None:
    # Whoever held the lock has not come along.
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
