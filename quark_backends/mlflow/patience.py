"""How long the MLflow client waits while the mirror calls it; the user's own calls keep theirs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["bounded"]

# MLflow's own retries take minutes; the lane waits and tries again itself.
_BOUNDS: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"

_lock = threading.Lock()
_callers = 0
_set: dict[str, str] = {}


@contextmanager
def bounded(timeout_s: int = 10) -> Iterator[None]:
    """Within it a call to MLflow ends after three tries, whatever the server does.

    MLflow reads these bounds from the environment at each request and takes
    them in no other way. What the user has set stays; what is set here is
    taken back when the last caller has left.

    Args:
        timeout_s: How long each try waits for an answer; of several callers at
            once the first one's counts.
    """
    global _callers
    with _lock:
        _callers += 1
        if _callers == 1:
            bounds = {**_BOUNDS, _TIMEOUT: str(timeout_s)}
            _set.clear()
            _set.update({n: text for n, text in bounds.items() if n not in os.environ})
            os.environ.update(_set)
    try:
        yield
    finally:
        with _lock:
            _callers -= 1
            if _callers == 0:
                _take_back()


def _take_back() -> None:
    for name, text in _set.items():
        # What somebody else has set meanwhile is theirs.
        if os.environ.get(name) == text:
            del os.environ[name]


def _forget_callers() -> None:
    """A forked child has none of the threads that were calling, but has their environment."""
    global _lock, _callers
    _lock = threading.Lock()
    if _callers:
        _callers = 0
        _take_back()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_callers)
